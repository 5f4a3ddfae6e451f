"""What differs between engines besides kernels: who forms the micro-batches, and what their hosts do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from fullbore.errors import ConfigError

Policy = Literal["fullbore", "sglang", "vllm"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Host time is `driver_s` where another process schedules while stages run, the rest where a stage waits for it."""

    name: str
    policy: Policy
    driver_s: float  # from a token's end on the last stage until the next micro-batch can start on the first
    step_s: float  # per micro-batch and stage: scheduling, preparing inputs
    request_s: float  # per request in a micro-batch and stage: token bookkeeping, sampling parameters
    hides_host_alone: bool  # with a single stage, step_s and request_s are hidden behind the device
    overlaps_host: bool = False  # with several, they overlap with it in part, as launches do
    memory_share: float = 0.90  # of the device's memory that weights, cache and buffers may use
    max_batch: int = 256  # requests running at once, by default
    chunk_tokens: int = 2048  # prompt tokens in a micro-batch, by default
    is_admission_reserved: bool = False  # a request starts only when its longest possible cache fits
    exchanges_first: bool = False  # results are exchanged before launching (SGLang with speculative decoding)
    dynamic_chunks: bool = False  # SGLang's dynamic chunking
    residual_travels_apart: bool = True  # hidden state and residual are two tensors between stages


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        # One scheduler process for all stages (docs/architecture.md); plans are sent ahead.
        Engine(
            name="fullbore",
            policy="fullbore",
            driver_s=0.5e-3,
            step_s=0.2e-3,
            request_s=5e-6,
            hides_host_alone=False,
            residual_travels_apart=False,
        ),
        # Each rank runs the scheduler between its micro-batches; overlap scheduling is off with pipeline stages.
        Engine(
            name="sglang",
            policy="sglang",
            driver_s=0.5e-3,
            step_s=0.4e-3,
            request_s=8e-6,
            hides_host_alone=True,
            memory_share=0.88,
            chunk_tokens=8192,
        ),
        Engine(
            name="vllm",
            policy="vllm",
            driver_s=1.0e-3,
            step_s=0.4e-3,
            request_s=8e-6,
            hides_host_alone=True,
            memory_share=0.92,
            chunk_tokens=8192,
        ),
        # Its own scheduler is modelled by fullbore's: under a full load it fills pp_size micro-batches evenly. Host
        # costs fitted to NVIDIA's published throughputs of Llama 3.3 70B FP4 on RTX PRO 6000, 1k/1k, PP4 and PP8.
        Engine(
            name="trtllm",
            policy="fullbore",
            driver_s=1.0e-3,
            step_s=0.5e-3,
            request_s=5e-6,
            hides_host_alone=True,
            memory_share=0.95,
            max_batch=2048,
            chunk_tokens=8192,
            is_admission_reserved=True,
        ),
        Engine(
            name="trtllm-1.0",
            policy="fullbore",
            driver_s=1.0e-3,
            step_s=1.0e-3,
            request_s=90e-6,
            hides_host_alone=True,
            overlaps_host=True,
            memory_share=0.95,
            max_batch=2048,
            chunk_tokens=8192,
            is_admission_reserved=True,
        ),
    )
}


def find_engine(name: str) -> Engine:
    """Raises ConfigError for a name that is not in the table."""
    found = ENGINES.get(name.lower())
    if found is None:
        close = get_close_matches(name.lower(), ENGINES, 1, 0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"--as {name} is unknown{hint}; known are {', '.join(ENGINES)}.")
    return found

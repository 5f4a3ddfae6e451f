"""From the requests of one load level to its figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from fullbore.bench.target import RequestResult
from fullbore.plan.measure import quantile


class StageUse(Struct):
    """One stage of a fullbore server while the level ran."""

    stage: int
    busy: float  # fraction of the time
    idle: dict[str, float]  # cause -> fraction of the time
    host: float = 0.0  # part of `busy`: preparing, sampling and sending rather than computing


class GpuUse(Struct):
    """One GPU while the level ran (NVML)."""

    gpu: int
    name: str
    utilisation: float  # fraction
    power_w: float


class Level(Struct, kw_only=True, omit_defaults=False):
    """One line of the result; also the format of `bench.json`. Milliseconds and tokens; None where not measured."""

    concurrency: int | None
    request_rate: float | None
    requests: int
    errors: int
    duration_s: float
    output_tok_s: float | None
    total_tok_s: float | None
    requests_s: float
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    ttft_ms_mean: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    itl_ms_mean: float | None
    itl_ms_p99: float | None
    e2e_ms_mean: float | None
    error_messages: dict[str, int] = {}
    interrupted: bool = False
    stages: list[StageUse] | UnsetType = UNSET
    server: dict[str, Any] | UnsetType = UNSET  # of a fullbore server: what `server_setup` keeps
    gpus: list[GpuUse] | UnsetType = UNSET


def measure(
    results: Sequence[RequestResult],
    *,
    concurrency: int | None,
    request_rate: float | None,
    is_interrupted: bool = False,
) -> Level:
    """Figures of a level.

    Tokens are the server's own count. Throughput is over the time from the first request to the last end. The mean
    inter-token latency is (last - first token) / (tokens - 1), each request weighted by its tokens; its p99 is over the
    gaps between pieces of text as they arrived.
    """
    good = [r for r in results if r.is_ok]
    start_s = min((r.due_s for r in results), default=0.0)
    duration_s = max((r.end_s for r in results), default=0.0) - start_s
    output_tokens = sum(r.output_tokens for r in good)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    ttft_ms = sorted(1e3 * r.ttft_s for r in good)
    steps = sum(r.output_tokens - 1 for r in good)
    gaps_ms = sorted(1e3 * (b - a) for r in good for a, b in zip(r.event_s, r.event_s[1:], strict=False))
    messages = Counter(r.error for r in results if r.error is not None)
    return Level(
        concurrency=concurrency,
        request_rate=request_rate,
        requests=len(results),
        errors=len(results) - len(good),
        duration_s=duration_s,
        output_tok_s=output_tokens / duration_s if good else None,
        total_tok_s=(output_tokens + prompt_tokens) / duration_s if good else None,
        requests_s=len(good) / duration_s if good else 0.0,
        prompt_tokens_mean=prompt_tokens / len(good) if good else None,
        output_tokens_mean=output_tokens / len(good) if good else None,
        ttft_ms_mean=_mean(ttft_ms),
        ttft_ms_p50=quantile(ttft_ms, 0.5) if ttft_ms else None,
        ttft_ms_p99=quantile(ttft_ms, 0.99) if ttft_ms else None,
        itl_ms_mean=1e3 * sum(r.decode_s for r in good) / steps if steps else None,
        itl_ms_p99=quantile(gaps_ms, 0.99) if gaps_ms else None,
        e2e_ms_mean=_mean([1e3 * (r.end_s - r.due_s) for r in good]),
        error_messages=dict(messages.most_common(5)),
        interrupted=is_interrupted,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def stage_use(account: dict[str, Any]) -> list[StageUse]:
    """A fullbore server's `/account` as fractions of its window."""
    uses = []
    for entry in account["stages"]:
        window_s = sum(entry["seconds"].values()) or 1.0
        shares = {cause: seconds / window_s for cause, seconds in entry["seconds"].items()}
        host = shares.pop("host", 0.0)
        busy = shares.pop("compute", 0.0) + host
        uses.append(StageUse(entry["stage"], busy, {c: share for c, share in shares.items() if share > 0}, host))
    return uses


# Of /server_info: what a result depends on.
_SETUP = (
    *("version", "model", "architecture", "dtype", "device", "pp_size", "pp_async_batch_depth", "num_micro_batches"),
    *("pp_max_micro_batch_size", "pp_layer_partition", "chunked_prefill_size", "max_running_requests"),
    *("threads_per_stage", "kv_capacity_tokens", "in_flight_limit"),
)


def server_setup(info: dict[str, Any]) -> dict[str, Any]:
    """The settings in a fullbore server's `/server_info` that its speed depends on, and the layers of each stage."""
    layers = [stage["layers"][1] - stage["layers"][0] for stage in info["stages"]]
    return {**{name: info[name] for name in _SETUP if info.get(name) is not None}, "layers_per_stage": layers}

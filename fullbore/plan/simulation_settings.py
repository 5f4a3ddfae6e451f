"""What `fullbore simulate` can be told, and the pipeline, workload and scheduler that this means."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fullbore.config import flag
from fullbore.errors import ConfigError
from fullbore.plan.curves import CurveCosts, CurveName, decode_curve
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import kv_blocks_for
from fullbore.plan.workload import Workload, closed_loop, poisson
from fullbore.scheduler.scheduler import SchedulerConfig

PREFILL_TOKENS_PER_STAGE_TIME = 256
GENERATIONS = 4
MIN_REQUESTS = 32
MOST_STAGES = 256
MOST_CONCURRENCY = 100_000
MOST_TOKENS = 20_000_000  # prompts and answers together: minutes of work and a few hundred MB


def _doc(text: str) -> Meta:
    return Meta(description=text)


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """Times are in milliseconds. C is the concurrency, P the number of stages."""

    stages: Annotated[int, _doc("Pipeline stages P.")] = 4
    stage_ms: Annotated[
        str,
        _doc("Time of a stage for a decode micro-batch of ceil(C/P) requests: one value, or one per stage (10,14)."),
    ] = "10"
    curve: Annotated[
        CurveName,
        _doc("How that time depends on the number of requests in the micro-batch."),
    ] = "linear"
    prefill_token_ms: Annotated[
        float | None, _doc("What a prompt token adds on an average stage; default: 512 of them take twice --stage-ms.")
    ] = None
    driver_ms: Annotated[float, _doc("Delay from a sampled token to the plan that follows from it.")] = 0.0
    hop_ms: Annotated[float, _doc("Delay from each stage to the next.")] = 0.0
    concurrency: Annotated[int, _doc("Clients C, each of which waits for its answer before it asks again.")] = 16
    rate: Annotated[
        float | None, _doc("Requests per second at random times instead; C is then the most that run at once.")
    ] = None
    seed: Annotated[int, _doc("Of the times with --rate.")] = 0
    input_tokens: Annotated[str, _doc("Prompt length; a list (100,4000) is used in turn.")] = "64"
    output_tokens: Annotated[str, _doc("Answer length; a list is used in turn.")] = "64"
    requests: Annotated[int | None, _doc("Requests in all; default: four for each client, at least 32.")] = None
    async_batch_depth: Annotated[
        int | Literal["auto"], _doc("Micro-batches in flight beyond the stages; 'auto' uses what pays.")
    ] = "auto"
    max_micro_batch_size: Annotated[int | Literal["auto"], _doc("Most requests in one micro-batch.")] = "auto"
    micro_batches: Annotated[
        int | Literal["auto"], _doc("Decode in so many micro-batches; 'auto': what the scheduler chooses.")
    ] = "auto"
    chunked_prefill_size: Annotated[int, _doc("Most prompt tokens in one micro-batch.")] = 512
    kv_blocks: Annotated[int | Literal["auto"], _doc("KV blocks; 'auto': enough for everyone.")] = "auto"
    page_size: Annotated[int, _doc("Tokens in one KV block.")] = 16
    no_probe: Annotated[bool, _doc("The scheduler does not know the decode times when it starts.")] = False
    no_learning: Annotated[bool, _doc("The scheduler learns nothing from the stages' records.")] = False

    def validate(self) -> None:
        """Raises ConfigError, naming the flag, for a value that means nothing."""
        for name in ("stages", "concurrency", "requests", "chunked_prefill_size", "page_size"):
            _at_least(self, name, 1)
        for name in ("max_micro_batch_size", "micro_batches", "kv_blocks"):
            _at_least(self, name, 1)
        for name in ("driver_ms", "hop_ms", "prefill_token_ms", "async_batch_depth"):
            _at_least(self, name, 0)
        if self.stages > MOST_STAGES:
            raise ConfigError(f"--stages must be at most {MOST_STAGES}, got {self.stages}.")
        if self.concurrency > MOST_CONCURRENCY:
            raise ConfigError(f"--concurrency must be at most {MOST_CONCURRENCY}, got {self.concurrency}.")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate must be a positive number of requests per second, got {self.rate}.")
        self.stage_times_s()
        self.workload()

    def stage_times_s(self) -> list[float]:
        """Seconds of each stage for a decode micro-batch of ⌈C/P⌉ requests."""
        times = [value * 1e-3 for value in _numbers("--stage-ms", self.stage_ms)]
        if len(times) == 1:
            times *= self.stages
        if len(times) != self.stages:
            raise ConfigError(
                f"--stage-ms gives {len(times)} times but --stages is {self.stages}; give one time, or one for each."
            )
        return times

    def pipeline(self) -> Pipeline:
        """The stages, in units of their mean."""
        times_s = self.stage_times_s()
        mean_s = sum(times_s) / len(times_s)
        token_s = mean_s / PREFILL_TOKENS_PER_STAGE_TIME
        if self.prefill_token_ms is not None:
            token_s = self.prefill_token_ms * 1e-3
        costs = CurveCosts(
            decode_s=decode_curve(self.curve, ceil(self.concurrency / self.stages), mean_s),
            stage_factors=[time_s / mean_s for time_s in times_s],
            prefill_token_s=token_s,
        )
        hops = [Hop(latency_s=self.hop_ms * 1e-3)] * (self.stages - 1)
        return Pipeline(num_stages=self.stages, costs=costs, hops=hops, driver_s=self.driver_ms * 1e-3)

    def workload(self) -> Workload:
        number = self.requests or max(GENERATIONS * self.concurrency, MIN_REQUESTS)
        prompts = _whole_numbers("--input-tokens", self.input_tokens)
        outputs = _whole_numbers("--output-tokens", self.output_tokens)
        num_tokens = int(number * (sum(prompts) / len(prompts) + sum(outputs) / len(outputs)))
        if num_tokens > MOST_TOKENS:
            raise ConfigError(
                f"{number} requests have {num_tokens} tokens together, more than the {MOST_TOKENS} that can be "
                "simulated; lower --requests, --concurrency, --input-tokens or --output-tokens."
            )
        if self.rate is not None:
            return poisson(self.rate, number, prompts, outputs, self.seed)
        return closed_loop(self.concurrency, number, prompts, outputs)

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            pp_size=self.stages,
            num_kv_blocks=kv_blocks_for(self.workload(), self.page_size)
            if self.kv_blocks == "auto"
            else self.kv_blocks,
            pp_async_batch_depth=self.async_batch_depth,
            pp_max_micro_batch_size=self.max_micro_batch_size,
            num_micro_batches=self.micro_batches,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.concurrency,
            page_size=self.page_size,
        )


def _at_least(settings: SimulationSettings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if isinstance(value, int | float) and not least <= value < float("inf"):
        raise ConfigError(f"{flag(name)} must be at least {least}, got {value}.")


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text} is not a number, nor a list of numbers such as 10,10,14.") from None
    if not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"{name} must be greater than 0, got {text}.")
    return values


def _whole_numbers(name: str, text: str) -> list[int]:
    values = _numbers(name, text)
    if any(value != int(value) for value in values):
        raise ConfigError(f"{name} takes whole numbers of tokens, got {text}.")
    return [int(value) for value in values]

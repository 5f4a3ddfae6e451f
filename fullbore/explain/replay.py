"""What was recorded, simulated once more with one thing changed: the tokens/s that a fix would have given.

Stage times, transfers and the driver's delay are the recorded ones (`plan/measured.py`), the scheduler is the engine's
own, and as many clients as were there send requests of the mean length that was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil
from statistics import median
from typing import Literal

from fullbore.errors import FullboreError
from fullbore.plan.loads import Load, StageCosts
from fullbore.plan.measured import pipeline_of
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import kv_blocks_for, simulate
from fullbore.plan.workload import closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.spans import DriverRecord

MOST_CLIENTS, MOST_STAGES = 512, 64  # larger deployments would take too long to simulate
_ROUNDS = 3  # of requests per client
_MOST_OUTPUT_TOKENS = 96  # longer answers are cut, prompts in proportion
_TOKENS_WITHOUT_ARRIVALS = 64  # of each answer, where only the middle of answers was recorded


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A recorded pipeline and its load. `clients`: requests that ran or waited, the median over time."""

    pipeline: Pipeline
    tokens_per_s: float  # as recorded, of the time in which there were requests
    clients: int
    prompt_tokens: int
    output_tokens: int
    max_running: int
    depth: int | Literal["auto"] = "auto"
    micro_batches: int | Literal["auto"] = "auto"

    def factor(self, **changes: object) -> float | None:
        """Tokens/s with some fields changed over tokens/s without, both simulated; None where that takes too long."""
        return self._over(self.simulated_tokens_per_s, changes)

    def factor_of_recorded(self, **changes: object) -> float | None:
        """The same over the recorded tokens/s, where what limited them is not in the simulation."""
        return self._over(lambda: self.tokens_per_s, changes)

    def _over(self, before: Callable[[], float | None], changes: dict[str, object]) -> float | None:
        changed: Replay = replace(self, **changes)  # type: ignore[arg-type]
        after_tokens_per_s, before_tokens_per_s = changed.simulated_tokens_per_s(), before()
        return after_tokens_per_s / before_tokens_per_s if after_tokens_per_s and before_tokens_per_s else None

    def simulated_tokens_per_s(self) -> float | None:
        clients, stages = max(self.clients, 1), self.pipeline.num_stages
        if clients > MOST_CLIENTS or stages > MOST_STAGES:
            return None
        workload = closed_loop(clients, _ROUNDS * clients, self.prompt_tokens, self.output_tokens)
        config = SchedulerConfig(
            num_kv_blocks=kv_blocks_for(workload),
            pp_size=stages,
            pp_async_batch_depth=self.depth,
            num_micro_batches=self.micro_batches,
            max_running_requests=max(self.max_running, 1),
            enable_prefix_cache=False,
        )
        try:
            return simulate(self.pipeline, config, workload).steady.output_tokens_per_s
        except FullboreError:
            return None

    def without_hops(self) -> Pipeline:
        """The same stages on links that take no time."""
        return replace(self.pipeline, hops=[Hop()] * len(self.pipeline.hops))

    def with_stage_factors(self, factors: Sequence[float]) -> Pipeline:
        """Each stage slower by its factor."""
        return replace(self.pipeline, costs=_Scaled(self.pipeline.costs, factors))


@dataclass(frozen=True)
class _Scaled:
    costs: StageCosts
    factors: Sequence[float]

    def seconds(self, load: Load) -> Sequence[float]:
        return [seconds * factor for seconds, factor in zip(self.costs.seconds(load), self.factors, strict=True)]


def replay_of(recording: Recording) -> Replay | None:
    """None where a recording holds too little: no decoding, or no time in which there were requests."""
    launches = [r for r in recording.driver_records if r.event == "launch" and _is_within(recording, r)]
    present = _Present(recording)
    if not launches or present.seconds <= 0:
        return None
    try:
        pipeline = pipeline_of(recording)
    except (FullboreError, ArithmeticError, LookupError, ValueError):
        return None
    prompt_tokens, output_tokens, tokens = _lengths(recording, launches)
    return Replay(
        pipeline=pipeline,
        tokens_per_s=tokens / present.seconds,
        clients=present.clients,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_running=_max_running(recording, launches),
        depth=max(recording.in_flight_limit - recording.pp_size, 0),
        micro_batches=_micro_batches(recording, launches),
    )


def _is_within(recording: Recording, record: DriverRecord) -> bool:
    return recording.start_ns <= record.at_ns <= recording.end_ns


class _Present:
    """`seconds` of the window in which requests ran or waited, and how many: `clients`, the median over that time."""

    def __init__(self, recording: Recording) -> None:
        length_ns: Counter[int] = Counter()
        records = sorted(recording.driver_records, key=lambda r: r.at_ns)
        for record, following in zip_longest(records, records[1:]):
            until_ns = recording.end_ns if following is None else min(following.at_ns, recording.end_ns)
            length_ns[record.running + record.waiting] += max(until_ns - max(record.at_ns, recording.start_ns), 0)
        length_ns.pop(0, None)
        whole_ns = sum(length_ns.values())
        self.seconds = whole_ns * 1e-9
        self.clients = 0
        for count in sorted(length_ns):
            whole_ns -= 2 * length_ns[count]
            if whole_ns <= 0:
                self.clients = count
                break


def _lengths(recording: Recording, launches: Sequence[DriverRecord]) -> tuple[int, int, int]:
    """(prompt tokens, output tokens) of the mean request, and all output tokens of the window.

    Prompts are what was computed of them: tokens taken from the prefix cache cost nothing.
    """
    decodes = sum(r.num_decodes for r in launches)
    prompt_tokens = sum(r.prefill_tokens for r in launches)
    arrivals = sum(r.event == "arrival" and _is_within(recording, r) for r in recording.driver_records)
    if arrivals == 0:
        return 1, _TOKENS_WITHOUT_ARRIVALS, decodes
    output = decodes / arrivals + 1
    scale = min(1.0, _MOST_OUTPUT_TOKENS / output)
    return max(round(scale * prompt_tokens / arrivals), 1), max(ceil(scale * output), 1), decodes + arrivals


def _max_running(recording: Recording, launches: Sequence[DriverRecord]) -> int:
    """What the engine admits at once, as far as it shows: more wait than run only at a limit."""
    is_limited = sum(r.waiting > 0 and not r.is_memory_short for r in launches) > len(launches) / 2
    return max(r.running for r in launches) if is_limited else MOST_CLIENTS


def _micro_batches(recording: Recording, launches: Sequence[DriverRecord]) -> int | Literal["auto"]:
    """So many, if clearly fewer decode at a time than stages and requests allow: that is then a setting."""
    decodes = [r for r in launches if not r.prefill_tokens] or list(launches)
    in_flight, running = median(r.in_flight for r in decodes), median(r.running for r in decodes)
    could_be = min(recording.pp_size, running)
    return max(round(in_flight), 1) if in_flight < 0.75 * could_be else "auto"

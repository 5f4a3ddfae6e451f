"""A simulated pipeline: FIFO stages, the links between them, and the way from the last stage back to the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullbore.plan.loads import Load, StageCosts
from fullbore.scheduler.cost import CostModel, sizes_to_measure
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.telemetry.spans import StageRecord


@dataclass(frozen=True)
class Hop:
    """A link between two stages. It carries one micro-batch at a time for `token_s` per token; `latency_s` overlaps."""

    latency_s: float = 0.0
    token_s: float = 0.0  # bytes of one token's hidden state / bandwidth


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is simulated.

    `driver_s` is a delay and occupies nothing: from the end of sampling until the driver has applied the result and the
    plan that follows from it can be at the stages. `crowded_costs` hold while all stages are busy; None: the same.
    """

    num_stages: int
    costs: StageCosts
    crowded_costs: StageCosts | None = None
    hops: Sequence[Hop] = ()  # num_stages - 1 of them; empty: transfers take no time
    driver_s: float = 0.0

    def seconds(self, load: Load, in_flight: int) -> Sequence[float]:
        """Seconds of a micro-batch on each stage, beside so many others; stages are as crowded as there are others."""
        alone = self.costs.seconds(load)
        if self.crowded_costs is None or not in_flight:
            return alone
        share = min(in_flight / (self.num_stages - 1), 1.0)
        crowded = self.crowded_costs.seconds(load)
        return [one + share * (other - one) for one, other in zip(alone, crowded, strict=True)]


class Journey:
    """One micro-batch on its way: when each stage starts and ends with it, known at launch because stages are FIFO."""

    __slots__ = ("ends_s", "launched_s", "micro_batch", "num_sampled", "records", "starts_s")

    def __init__(self, micro_batch: MicroBatch, launched_s: float, num_sampled: int) -> None:
        self.micro_batch = micro_batch
        self.launched_s = launched_s
        self.num_sampled = num_sampled
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        self.records: list[StageRecord] = []  # empty unless they are wanted


class Stages:
    """The stages' and links' occupancy so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._hops = [Hop(), *(pipeline.hops or [Hop()] * (pipeline.num_stages - 1))]  # into each stage
        if len(self._hops) != pipeline.num_stages:
            raise ValueError(f"{pipeline.num_stages} stages need {pipeline.num_stages - 1} hops")
        self._free_s = [0.0] * pipeline.num_stages
        self._link_free_s = [0.0] * pipeline.num_stages
        self._ends_s = [deque[float]() for _ in range(pipeline.num_stages)]  # of what had no end yet at the last launch
        self.busy_s = [0.0] * pipeline.num_stages

    def run(self, journey: Journey, seconds: Sequence[float], tokens: int, wants_records: bool) -> None:
        """Sends a micro-batch of `tokens` tokens through all stages, on each of which it takes `seconds`."""
        at_s = journey.launched_s  # when the micro-batch is at the stage
        free_s, starts_s, ends_s = self._free_s, journey.starts_s, journey.ends_s
        for stage, (busy_s, hop) in enumerate(zip(seconds, self._hops, strict=True)):
            if hop.token_s:
                at_s = self._link_free_s[stage] = max(at_s, self._link_free_s[stage]) + tokens * hop.token_s
            start_s = max(at_s + hop.latency_s, free_s[stage])
            if wants_records:
                journey.records.append(self._record(journey, stage, start_s, start_s + busy_s))
            at_s = free_s[stage] = start_s + busy_s
            starts_s.append(start_s)
            ends_s.append(at_s)
            self.busy_s[stage] += busy_s

    def busy_until(self, now_s: float, in_flight: Iterable[Journey]) -> list[float]:
        """Seconds that each stage has been busy so far. `in_flight`: all that may not have passed every stage yet."""
        busy_s = list(self.busy_s)
        for journey in in_flight:
            for stage, (start_s, end_s) in enumerate(zip(journey.starts_s, journey.ends_s, strict=True)):
                if end_s > now_s:
                    busy_s[stage] -= end_s - max(start_s, now_s)
        return busy_s

    def _record(self, journey: Journey, stage: int, start_s: float, end_s: float) -> StageRecord:
        """What a stage process would write down. It reads plans between micro-batches: one that comes while it is
        busy is received when that micro-batch ends; it looks for its input when its turn comes.
        """
        unread = self._ends_s[stage]
        while unread and unread[0] < journey.launched_s:
            unread.popleft()
        plan_ns = to_ns(unread[0] if unread else journey.launched_s)
        unread.append(end_s)
        start_ns, end_ns = to_ns(start_s), to_ns(end_s)
        receive_end_ns = start_ns if stage else plan_ns
        return StageRecord(
            stage, journey.micro_batch.id, plan_ns, plan_ns, receive_end_ns, start_ns, end_ns, end_ns, end_ns, end_ns
        )


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def probe(costs: CostModel, pipeline: Pipeline, max_requests: int, chunk_tokens: int = 0) -> None:
    """Measures what an engine measures when it starts: decode curves up to `max_requests`, delays, prompt chunks."""
    for size in sizes_to_measure(max_requests):
        for stage, seconds in enumerate(pipeline.costs.seconds(Load(decodes=size, sampled=size))):
            costs.seed_decode(stage, size, seconds)
    tell_delays(costs, pipeline)
    tokens = max(chunk_tokens // 8, 2)
    while tokens <= chunk_tokens:
        pairs = tokens**2
        for stage, seconds in enumerate(pipeline.costs.seconds(Load(0, tokens, pairs, 1))):
            costs.observe(stage, 0, tokens, pairs, seconds)
        tokens *= 2


def tell_delays(costs: CostModel, pipeline: Pipeline) -> None:
    """What is no stage's time: the hops, with one token each, and the driver's delay."""
    for stage, hop in enumerate(pipeline.hops, start=1):
        costs.hops_s[stage] = hop.latency_s + hop.token_s
    costs.return_s = pipeline.driver_s

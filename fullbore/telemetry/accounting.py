"""Every stage-second has exactly one cause. Pure: records in, integer nanoseconds by cause out.

A stage is `compute`, `host` (preparation, sampling, sending) or waiting. Each wait is explained by the chain of binding
predecessors that ends with it: what had to happen, one thing after the other, before the stage could go on. Walking it
back for one round of the pipeline gives transfers, the driver's share (result back, decision, plan out) and steps of
micro-batches on stages. A formula (`telemetry/round.py`) says what each cause is worth in such a round; the wait is
divided in these proportions. What missing micro-batches are missing for (`memory`, `few-requests`, `packed`) is said by
the scheduler's state. Where there is no full round (the pipe fills), the chain's own parts are the proportions.
`docs/accounting.md` has the rules, and shows each cause in a picture.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from msgspec import Struct

from fullbore.telemetry.round import Round
from fullbore.telemetry.spans import DriverRecord, StageRecord

CAUSES = (
    "compute", "host", "transfer", "control", "no-requests", "memory",
    "few-requests", "packed", "depth", "uneven", "imbalance", "fill-drain",
)  # fmt: skip
BUSY = ("compute", "host")

_TAIL_SHARE = (
    0.05  # a wait this short against the step after it, for data sent while the stage was busy: it was not waiting
)


class Recording(Struct, frozen=True):
    """What driver and stages recorded between `start_ns` and `end_ns` (records before that give context)."""

    pp_size: int
    in_flight_limit: int
    start_ns: int
    end_ns: int
    stage_records: list[StageRecord]
    driver_records: list[DriverRecord]
    # What the scheduler expects of decode micro-batches at `end_ns`: for each stage, requests -> seconds.
    decode_s: list[dict[int, float]] = []


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stage's time: work, or one wait divided among its causes."""

    begin_ns: int
    end_ns: int
    causes: dict[str, int]  # nanoseconds that sum to end_ns - begin_ns

    @property
    def is_wait(self) -> bool:
        return not any(cause in BUSY for cause in self.causes)

    @property
    def main_cause(self) -> str:
        return max(self.causes, key=lambda cause: self.causes[cause])


def account(recording: Recording) -> list[dict[str, int]]:
    """For each stage, nanoseconds by cause; on every stage they sum to `end_ns - start_ns` exactly."""
    totals = []
    for stage_pieces in pieces(recording):
        total = dict.fromkeys(CAUSES, 0)
        for piece in stage_pieces:
            for cause, ns in piece.causes.items():
                total[cause] += ns
        totals.append(total)
    return totals


def pieces(recording: Recording) -> list[list[Piece]]:
    """For each stage, what it did from `start_ns` to `end_ns`, one piece after the other, without a gap."""
    pipeline = _Pipeline(recording)
    return [_pieces_of_stage(pipeline, stage) for stage in range(recording.pp_size)]


@dataclass(slots=True)
class _Step:
    """One micro-batch on one stage."""

    micro_batch_id: int
    stage: int
    available_ns: int  # plan and data are there
    start_ns: int  # ... and the stage is free: work (host, then compute) begins
    compute_start_ns: int
    compute_end_ns: int
    end_ns: int  # the stage is free again
    sent_ns: int  # when its output, or result, left
    is_queued: bool  # the stage was busy until plan and data were there


@dataclass(slots=True)
class _Chain:
    """What a wait's end had been waiting for, one round back."""

    begin_ns: int
    transfer_ns: int
    control_ns: int
    steps: list[tuple[_Step, float]]  # with the part of each that lies within the round
    is_arrival: bool  # it begins with a request's arrival, not with another micro-batch
    is_round: bool  # it spans a whole round


class _Pipeline:
    """The records, indexed for walking."""

    def __init__(self, recording: Recording) -> None:
        self.pp_size = recording.pp_size
        self.limit = recording.in_flight_limit
        self.start_ns, self.end_ns = recording.start_ns, recording.end_ns
        self.driver = sorted(recording.driver_records, key=lambda r: r.at_ns)
        self._driver_ns = [r.at_ns for r in self.driver]
        self.launches = {r.micro_batch_id: r for r in self.driver if r.event == "launch"}
        results = [r for r in self.driver if r.event == "result"]
        self._result_ns = [r.at_ns for r in results]
        self._result_ids = [r.micro_batch_id for r in results]
        self.no_requests = self._spans_without_requests()
        by_key = {(r.stage, r.micro_batch_id): r for r in recording.stage_records}
        self.steps: list[dict[int, _Step]] = []
        for stage in range(self.pp_size):
            mine = sorted((r for r in recording.stage_records if r.stage == stage), key=lambda r: r.compute_start_ns)
            self.steps.append(self._steps(stage, mine, by_key))
        self.order = [list(steps.values()) for steps in self.steps]
        self._starts = [[s.start_ns for s in order] for order in self.order]
        self._work = [list(accumulate((s.end_ns - s.start_ns for s in order), initial=0)) for order in self.order]
        self._positions = [{s.micro_batch_id: n for n, s in enumerate(order)} for order in self.order]

    def _steps(
        self, stage: int, records: list[StageRecord], by_key: dict[tuple[int, int], StageRecord]
    ) -> dict[int, _Step]:
        steps: dict[int, _Step] = {}
        free_ns = -(1 << 62)
        for r in records:
            sent_by = by_key.get((stage - 1, r.micro_batch_id))
            launch = self.launches.get(r.micro_batch_id)
            sent_ns = sent_by.send_start_ns if sent_by else launch.at_ns if launch else r.plan_received_ns
            available_ns = r.plan_received_ns if stage == 0 else max(r.receive_end_ns, r.plan_received_ns)
            available_ns = min(available_ns, r.compute_start_ns)
            leaves_ns = r.send_start_ns if stage < self.pp_size - 1 else r.sample_end_ns
            end_ns = max(r.send_end_ns, r.sample_end_ns)
            steps[r.micro_batch_id] = _Step(
                r.micro_batch_id,
                stage,
                available_ns,
                max(available_ns, min(free_ns, r.compute_start_ns)),
                r.compute_start_ns,
                r.compute_end_ns,
                end_ns,
                leaves_ns,
                sent_ns <= free_ns and available_ns - free_ns <= _TAIL_SHARE * (end_ns - r.compute_start_ns),
            )
            free_ns = end_ns
        return steps

    def _spans_without_requests(self) -> list[tuple[int, int]]:
        spans = []
        since: int | None = self.start_ns if not self.driver or self.driver[0].event == "arrival" else None
        for r in self.driver:
            is_empty = r.running == 0 and r.waiting == 0
            if is_empty and since is None:
                since = r.at_ns
            elif not is_empty and since is not None:
                spans.append((since, r.at_ns))
                since = None
        if since is not None:
            spans.append((since, self.end_ns))
        return spans

    def state_at(self, at_ns: int) -> DriverRecord | None:
        """The driver's latest record at that time."""
        position = bisect_right(self._driver_ns, at_ns)
        return self.driver[position - 1] if position else None

    def result_before(self, at_ns: int) -> int | None:
        """The micro-batch whose result was applied last at that time."""
        position = bisect_right(self._result_ns, at_ns)
        return self._result_ids[position - 1] if position else None

    def step_before(self, step: _Step) -> _Step | None:
        """The one that the same stage worked on before."""
        position = self._positions[step.stage][step.micro_batch_id]
        return self.order[step.stage][position - 1] if position else None

    def work_since(self, stage: int, begin_ns: int, end_ns: int) -> int:
        """How long the stage worked in [begin, end), where `end` is no moment inside one of its steps."""
        starts, order = self._starts[stage], self.order[stage]
        last = bisect_right(starts, end_ns - 1)
        first = bisect_right(starts, begin_ns)
        work = self._work[stage][last] - self._work[stage][min(first, last)]
        if first > 0:
            work += max(0, min(order[first - 1].end_ns, end_ns) - max(begin_ns, order[first - 1].start_ns))
        return work

    def mean_step_ns(self, stage: int, last_id: int, count: int) -> float:
        """Mean time that the stage takes for the `count` micro-batches up to `last_id` (or the nearest it has)."""
        position = self._positions[stage].get(last_id)
        if position is None:
            ids = [s.micro_batch_id for s in self.order[stage]]
            position = min(bisect_right(ids, last_id), len(ids)) - 1
        first = max(0, position + 1 - count)
        last = min(first + count, len(self.order[stage]))
        return (self._work[stage][last] - self._work[stage][first]) / max(last - first, 1)


def _pieces_of_stage(pipeline: _Pipeline, stage: int) -> list[Piece]:
    found: list[Piece] = []
    steps = pipeline.order[stage]
    start_ns, end_ns = pipeline.start_ns, pipeline.end_ns
    free_ns = min(start_ns, steps[0].start_ns) if steps else start_ns
    for step in steps:
        wait = max(free_ns, start_ns), min(step.start_ns, end_ns)
        if wait[0] < wait[1]:
            found.append(Piece(*wait, _explain_wait(pipeline, step, *wait)))
        begin_ns = max(step.start_ns, free_ns, start_ns)
        work = (("host", step.compute_start_ns), ("compute", step.compute_end_ns), ("host", step.end_ns))
        for cause, until_ns in work:
            until_ns = min(until_ns, end_ns)
            if begin_ns < until_ns:
                found.append(Piece(begin_ns, until_ns, {cause: until_ns - begin_ns}))
                begin_ns = until_ns
        free_ns = max(free_ns, step.end_ns)
    if max(free_ns, start_ns) < end_ns:
        wait = max(free_ns, start_ns), end_ns
        found.append(Piece(*wait, _explain_end(pipeline, steps[-1].micro_batch_id if steps else None, *wait)))
    return found


# ------------------------------------------------------------------------------------------------------- one wait


def _explain_wait(pipeline: _Pipeline, step: _Step, begin_ns: int, end_ns: int) -> dict[str, int]:
    """Divides the wait [begin, end) before `step` among its causes."""
    if step.is_queued:  # the stage was late, not its input: what remains is the tail of a message
        return {"transfer" if step.stage else "control": end_ns - begin_ns}
    totals: dict[str, int] = defaultdict(int)
    rest_ns = _take_no_requests(pipeline, begin_ns, end_ns, totals)
    if rest_ns == 0:
        return totals
    chain = _walk_back(pipeline, step)
    before_ns = max(0, min(chain.begin_ns, end_ns) - begin_ns)
    before_ns = max(0, before_ns - (end_ns - begin_ns - rest_ns)) if chain.is_arrival else 0
    if before_ns:  # before the request came that ends this wait, the pipe was draining or short of work
        _divide(before_ns, _missing_for(pipeline, pipeline.state_at(begin_ns), is_open=True), totals)
    _divide(rest_ns - before_ns, _weights(pipeline, step, chain), totals)
    return totals


def _explain_end(pipeline: _Pipeline, last_id: int | None, begin_ns: int, end_ns: int) -> dict[str, int]:
    """The wait after a stage's last micro-batch: nothing is known of what ends it."""
    totals: dict[str, int] = defaultdict(int)
    rest_ns = _take_no_requests(pipeline, begin_ns, end_ns, totals)
    launch = pipeline.launches.get(last_id) if last_id is not None else None
    _divide(rest_ns, _missing_for(pipeline, launch or pipeline.state_at(begin_ns), is_open=True), totals)
    return totals


def _take_no_requests(pipeline: _Pipeline, begin_ns: int, end_ns: int, totals: dict[str, int]) -> int:
    """Books the part of a wait in which there was no request at all; returns what is left of it."""
    position = bisect_right(pipeline.no_requests, (begin_ns, 0)) - 1
    taken = 0
    for since, until in pipeline.no_requests[max(position, 0) :]:
        if since >= end_ns:
            break
        taken += max(0, min(until, end_ns) - max(since, begin_ns))
    totals["no-requests"] += taken
    return end_ns - begin_ns - taken


def _walk_back(pipeline: _Pipeline, waiting: _Step) -> _Chain:
    """The chain of binding predecessors of `waiting` through one round of the pipe.

    A round goes back to where the same stage began the micro-batch that was launched as many launches ago as are in
    flight; over it, the stage's own work is exactly that of the micro-batches in flight.
    """
    launch = pipeline.launches.get(waiting.micro_batch_id)
    round_ago = pipeline.steps[waiting.stage].get(waiting.micro_batch_id - _in_round(pipeline, launch))
    limit_ns = round_ago.start_ns if round_ago else -(1 << 62)
    chain = _Chain(waiting.available_ns, 0, 0, [], is_arrival=False, is_round=False)
    step = waiting
    while chain.begin_ns > limit_ns:
        if step.stage > 0:
            before = pipeline.steps[step.stage - 1].get(step.micro_batch_id)
        else:
            before = _enabling_step(pipeline, step, chain)
        if before is None:
            return chain
        between_ns = step.available_ns - max(before.sent_ns, limit_ns)
        if step.stage > 0:
            chain.transfer_ns += max(between_ns, 0)
        else:
            chain.control_ns += max(between_ns, 0)
        chain.begin_ns = before.sent_ns
        # `before` let `step` begin. Go back through it, and through those that it had to queue behind.
        while chain.begin_ns > limit_ns:
            length_ns = max(before.end_ns - before.start_ns, 1)
            chain.steps.append((before, min(1.0, (before.end_ns - limit_ns) / length_ns)))
            chain.begin_ns = before.start_ns
            earlier = pipeline.step_before(before) if before.is_queued else None
            if earlier is None:
                break
            before = earlier
        step = before
    chain.begin_ns = limit_ns
    chain.is_round = True
    return chain


def _enabling_step(pipeline: _Pipeline, step: _Step, chain: _Chain) -> _Step | None:
    """The last stage's step whose result let the driver launch `step`'s micro-batch; None if an arrival did."""
    launch = pipeline.launches.get(step.micro_batch_id)
    if launch is None:
        return None
    result = pipeline.result_before(launch.at_ns)
    if launch.reason == "request-arrived" or result is None:
        chain.control_ns += max(step.available_ns - launch.reason_since_ns, 0)
        chain.begin_ns = launch.reason_since_ns
        chain.is_arrival = launch.reason == "request-arrived"
        return None
    return pipeline.steps[-1].get(result)


def _in_round(pipeline: _Pipeline, launch: DriverRecord | None) -> int:
    return max(launch.in_flight, 1) if launch is not None else pipeline.pp_size


def _weights(pipeline: _Pipeline, waiting: _Step, chain: _Chain) -> dict[str, float]:
    """The causes of the wait before `waiting`, in proportion."""
    state = pipeline.state_at(waiting.available_ns)
    launch = pipeline.launches.get(waiting.micro_batch_id)
    in_round = _in_round(pipeline, launch)
    means = tuple(pipeline.mean_step_ns(stage, waiting.micro_batch_id, in_round) for stage in range(pipeline.pp_size))
    own_ns = means[waiting.stage]
    uneven_ns = sum(part * (step.end_ns - step.start_ns - means[step.stage]) for step, part in chain.steps)
    if chain.is_round:
        worth = Round(in_round, chain.transfer_ns, chain.control_ns, max(uneven_ns, 0.0), means, own_ns).worth()
    else:
        worked_ns = pipeline.work_since(waiting.stage, chain.begin_ns, waiting.available_ns)
        worth = {
            "transfer": chain.transfer_ns,
            "control": chain.control_ns,
            "uneven": max(uneven_ns, 0.0),
            "imbalance": max(sum(part * (means[step.stage] - own_ns) for step, part in chain.steps), 0.0),
            "missing": max(sum(part for _, part in chain.steps) * own_ns - worked_ns, 0.0),
        }
    weights: dict[str, float] = defaultdict(float)
    weights[_control_cause(pipeline, launch)] += worth.pop("control")
    missing = worth.pop("missing")
    for cause, share in _missing_for(pipeline, state, is_open=False).items():
        weights[cause] += share * missing
    weights.update(worth)
    return weights


def _control_cause(pipeline: _Pipeline, launch: DriverRecord | None) -> str:
    """The driver's share of a round is `depth`'s fault when one more micro-batch in flight would have covered it."""
    if launch is not None and launch.in_flight >= pipeline.limit and launch.running > launch.in_flight:
        return "depth"
    return "control"


def _missing_for(pipeline: _Pipeline, state: DriverRecord | None, *, is_open: bool) -> dict[str, float]:
    """Why there were not more micro-batches in flight: shares by cause, from the scheduler's state."""
    if state is None:
        return {"fill-drain": 1.0}
    if state.is_memory_short:
        return {"memory": 1.0}
    stages, requests, in_flight = pipeline.pp_size, state.running, state.in_flight
    if in_flight >= stages:
        is_depth = not is_open and in_flight >= pipeline.limit and state.ready > 0
        return {"depth": 1.0} if is_depth else {"fill-drain": 1.0}
    few = max(stages - max(requests, in_flight), 0)
    packed = max(min(stages, requests) - in_flight, 0)
    if few + packed == 0:
        return {"fill-drain": 1.0}
    return {"few-requests": few / (few + packed), "packed": packed / (few + packed)}


def _divide(total_ns: int, weights: dict[str, float], totals: dict[str, int]) -> None:
    """Adds `total_ns` to `totals` in proportion to the weights, in whole nanoseconds that sum to it."""
    if total_ns <= 0:
        return
    whole = sum(weights.values())
    if whole <= 0:
        totals["fill-drain"] += total_ns
        return
    shares = {cause: int(total_ns * weight / whole) for cause, weight in weights.items()}
    largest = max(weights, key=lambda cause: weights[cause])
    shares[largest] += total_ns - sum(shares.values())
    for cause, share in shares.items():
        totals[cause] += share

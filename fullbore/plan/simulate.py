"""The real scheduler over simulated stages and a virtual clock.

Stages are FIFO, so all times of a micro-batch are known when it is launched; only arrivals, ends and results are
events. The scheduler is called as a driver calls it: what has happened is told first, then everything that can be
launched is launched. A stage's records reach the scheduler together with the micro-batch's result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any

from fullbore.plan.loads import load_of
from fullbore.plan.measure import Meter, Moment, SimulationResult, Window
from fullbore.plan.pipeline import Journey, Pipeline, Stages, probe, to_ns
from fullbore.plan.workload import Job, Workload
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import DriverRecord, StageRecord

PROGRESS_EVERY_EVENTS = 2000
NEVER_S = -1.0
_TOKEN = 0  # what the simulated model says, always


def simulate(
    pipeline: Pipeline,
    config: SchedulerConfig,
    workload: Workload,
    *,
    is_probed: bool = True,
    learns: bool = True,
    record_until_s: float = NEVER_S,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Runs a workload to its end.

    Args:
        is_probed: the scheduler starts with measured costs and delays, as an engine's does after its probe.
        learns: the scheduler is given the stages' records and improves its estimates from them.
        record_until_s: what happens up to this time leaves records in the result; nothing by default.
        on_progress: called now and then with (requests ended, requests in all).

    Raises:
        RequestError: if a job can never fit the context or the KV cache.
    """
    scheduler = Scheduler(config)
    if is_probed:
        probe(scheduler.costs, pipeline, _largest_micro_batch(config, workload), config.chunked_prefill_size)
    return Simulation(pipeline, scheduler, workload, learns=learns, record_until_s=record_until_s).run(on_progress)


def kv_blocks_for(workload: Workload, page_size: int = 16) -> int:
    """KV blocks with which no request of the workload ever waits for memory.

    One more for each than it fills, since the scheduler admits nobody into the room that others may want next.
    """
    longest = max(job.prompt_tokens + job.output_tokens for job in workload.jobs)
    return (ceil(longest / page_size) + 1) * (workload.concurrency or len(workload.jobs))


def _largest_micro_batch(config: SchedulerConfig, workload: Workload) -> int:
    return min(config.max_running_requests, workload.concurrency or len(workload.jobs))


@dataclass
class Simulation:
    """One run; see `simulate`. `scheduler` may be one that has served before."""

    pipeline: Pipeline
    scheduler: Scheduler
    workload: Workload
    learns: bool = True
    record_until_s: float = NEVER_S
    now_s: float = 0.0
    _events: list[tuple[float, int, Callable[[Any], None], Any]] = field(default_factory=list)
    _sequence: count[int] = field(default_factory=count)
    _in_flight: dict[int, Journey] = field(default_factory=dict)
    _spans: list[StageRecord] = field(default_factory=list)
    _driver_records: list[DriverRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stages = Stages(self.pipeline)
        self._meter = Meter()
        self._window = Window(self.workload.concurrency, len(self.workload.jobs))
        self._unsent = iter(enumerate(self.workload.jobs))
        self._num_arrived = self._num_ended = 0

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> SimulationResult:
        if self.workload.concurrency is None:
            for request_id, job in self._unsent:
                self._at(job.arrival_s, self._arrive, (request_id, job))
        else:
            for _ in range(self.workload.concurrency):
                self._send_next()
        for step in count():
            if on_progress is not None and step % PROGRESS_EVERY_EVENTS == 0:
                on_progress(self._num_ended, len(self.workload.jobs))
            if not self._events:
                break
            self._advance()
        if not self.scheduler.is_idle:
            raise AssertionError(f"nothing left to happen, but not finished: {self.scheduler.state()}")
        start, end = Moment(0.0, [0.0] * self.pipeline.num_stages), self._moment()
        return SimulationResult(
            steady=self._meter.figures(*self._window.bounds(start, end)),
            whole=self._meter.figures(start, end),
            spans=self._spans,
            driver_records=self._driver_records,
            preemptions=self.scheduler.state().preemptions,
        )

    def _advance(self) -> None:
        """Everything that happens at the next moment, then what can be launched after it."""
        self.now_s = now_s = self._events[0][0]
        while self._events and self._events[0][0] <= now_s:
            _, _, happen, what = heapq.heappop(self._events)
            happen(what)
        if self._window.needs_moment(self._meter.num_first_tokens, self._num_ended):
            self._window.mark(self._moment(), self._num_ended)
        while (micro_batch := self.scheduler.next_micro_batch(now_s)) is not None:
            self._launch(micro_batch)

    def _write_down(self, event: str, micro_batch: MicroBatch | None = None) -> None:
        """A driver record, if records are wanted now."""
        if self.now_s <= self.record_until_s:
            self._driver_records.append(self.scheduler.record(event, to_ns(self.now_s), micro_batch))

    def _moment(self) -> Moment:
        return Moment(self.now_s, self._stages.busy_until(self.now_s, self._in_flight.values()))

    def _at(self, time_s: float, happen: Callable[[Any], None], what: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), happen, what))

    # ------------------------------------------------------------------------------------------------- requests

    def _send_next(self) -> None:
        """A client sends its next request now, or leaves."""
        request_id, job = next(self._unsent, (-1, None))
        if job is not None:
            self._at(self.now_s, self._arrive, (request_id, job))
        elif self._window.close is None:
            self._window.close = self._moment()

    def _arrive(self, arrival: tuple[int, Job]) -> None:
        request_id, job = arrival
        now_s = self.now_s
        deadline_s = None if job.timeout_s is None else now_s + job.timeout_s
        prompt = _prompt(request_id, job)
        self.scheduler.add(Request(request_id, prompt, job.output_tokens, arrival_s=now_s, deadline_s=deadline_s))
        self._write_down("arrival")
        self._meter.arrived(request_id, job.prompt_tokens, now_s)
        self._num_arrived += 1
        if self.workload.concurrency is None and self._num_arrived == len(self.workload.jobs):
            self._window.close = self._moment()
        if deadline_s is not None:
            self._at(deadline_s, self._expire, None)
        if job.abort_after_s is not None:
            self._at(now_s + job.abort_after_s, self._abort, request_id)

    def _expire(self, _: None) -> None:
        self._cut(self.scheduler.expire(self.now_s))

    def _abort(self, request_id: int) -> None:
        ended = self.scheduler.abort(request_id)
        self._cut([] if ended is None else [ended])

    def _cut(self, ends: list[TokenOutput]) -> None:
        for _ in ends:
            self._write_down("end")
        self._hand_out(ends)

    # ------------------------------------------------------------------------------------------- micro-batches

    def _launch(self, micro_batch: MicroBatch) -> None:
        load = load_of(micro_batch)
        journey = Journey(micro_batch, self.now_s, load.sampled)
        wants_spans = self.now_s <= self.record_until_s
        self._stages.run(
            journey, self.pipeline.seconds(load, len(self._in_flight)), load.tokens, self.learns or wants_spans
        )
        self._in_flight[micro_batch.id] = journey
        self._meter.launched(len(micro_batch.runs), load.prefill_tokens > 0, self.now_s)
        if wants_spans:
            self._spans += journey.records
            self._write_down("launch", micro_batch)
        self._at(journey.ends_s[-1] + self.pipeline.driver_s, self._return, journey)

    def _return(self, journey: Journey) -> None:
        if self.learns:
            for record in journey.records:
                self.scheduler.observe(record)
        del self._in_flight[journey.micro_batch.id]
        self._meter.returned(self.now_s)
        outputs = self.scheduler.complete(journey.micro_batch.id, [_TOKEN] * journey.num_sampled, self.now_s)
        self._write_down("result", journey.micro_batch)
        self._hand_out(outputs)

    def _hand_out(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.token_id is not None:
                self._meter.got_token(output.request_id, self.now_s)
            if output.finish_reason is not None:
                self._meter.ended(output.request_id)
                self._num_ended += 1
                if self.workload.concurrency is not None:
                    self._send_next()


def _prompt(request_id: int, job: Job) -> list[int]:
    """Tokens that no other job's prompt has at the same place, after the shared prefix."""
    shared = min(job.shared_prefix_tokens, job.prompt_tokens)
    return [_TOKEN] * shared + [request_id + 1] * (job.prompt_tokens - shared)

"""A pipeline of P stages in a few lines, for driving the scheduler in tests: FIFO stages and a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import Scheduler


@dataclass
class PipelineModel:
    """Runs `scheduler` over stages with `stage_s(stage, micro_batch)`; results come back `return_s` after the last."""

    scheduler: Scheduler
    stage_s: Callable[[int, MicroBatch], float]
    token: Callable[[int, int], int | None] = lambda request_id, position: 1
    return_s: float = 0.0
    now_s: float = 0.0
    launched: list[MicroBatch] = field(default_factory=list)
    starts: list[list[float]] = field(default_factory=list)  # per micro-batch: start on each stage
    ends: list[list[float]] = field(default_factory=list)
    in_flight_after_launch: list[int] = field(default_factory=list)
    outputs: dict[int, list[TokenOutput]] = field(default_factory=dict)
    _results: list[tuple[float, int]] = field(default_factory=list)
    _stage_free_s: dict[int, float] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.scheduler.add(request)

    def launch(self) -> None:
        while (micro_batch := self.scheduler.next_micro_batch(self.now_s)) is not None:
            at_s = self.now_s
            starts, ends = [], []
            for stage in range(self.scheduler.config.pp_size):
                starts.append(max(at_s, self._stage_free_s.get(stage, 0.0)))
                at_s = starts[-1] + self.stage_s(stage, micro_batch)
                self._stage_free_s[stage] = at_s
                ends.append(at_s)
            self.launched.append(micro_batch)
            self.starts.append(starts)
            self.ends.append(ends)
            heapq.heappush(self._results, (at_s + self.return_s, micro_batch.id))
            self.in_flight_after_launch.append(len(self._results))

    def step(self) -> bool:
        """Launches what can be launched, then applies the next result; False when nothing is left."""
        self.launch()
        if not self._results:
            return False
        self.now_s, micro_batch_id = heapq.heappop(self._results)
        sampled = [run for run in self.launched[micro_batch_id].runs if run.sampling is not None]
        tokens = [self.token(run.request_id, run.sampling.position) for run in sampled if run.sampling]
        for output in self.scheduler.complete(micro_batch_id, tokens, self.now_s):
            self.outputs[output.request_id].append(output)
        return True

    def run(self, max_steps: int = 1_000_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not finished after {max_steps} micro-batches")

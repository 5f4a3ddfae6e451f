"""The whole pipeline in one process: the real scheduler, transport checks and stage runners, without processes.

For tests over many models and numbers of stages. Micro-batches are truly in flight: a tick lets every stage execute at
most one, so that P stages hold P different ones. With a seed, which stage gets on when is random.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from fullbore.config import Backend
from fullbore.engine.messages import Execute, encode_plan, to_stage_decoder
from fullbore.engine.records import Records
from fullbore.engine.runner import Runner
from fullbore.engine.transport import LoopbackTransport, Received
from fullbore.scheduler.logprobs import MicroBatchLogprobs
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import StageRecord

_TICK_S = 1e-3  # the virtual clock


def load_stages(
    model_path: Path,
    partition: tuple[int, ...],
    num_kv_blocks: int,
    page_size: int,
    dtype: str = "float32",
    backend: Backend = "auto",
) -> list[Runner]:
    """All stages of a Hugging Face folder on the CPU, with KV blocks allocated."""
    from fullbore.model.runner import StageRunner

    stages: list[Runner] = []
    for stage in range(len(partition)):
        runner = StageRunner.load(model_path, stage, partition, "cpu", dtype, page_size, backend=backend)
        runner.allocate_kv(num_kv_blocks)
        stages.append(runner)
    return stages


class LoopbackStage:
    """One stage: its queue of plans, in the driver's order, and its runner."""

    def __init__(self, stage: int, num_stages: int, runner: Runner) -> None:
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.runner = runner
        self.transport = LoopbackTransport(runner.hidden_size, runner.dtype)
        self.plans: deque[tuple[MicroBatch, Received | None]] = deque()

    def take(self, micro_batch: MicroBatch) -> None:
        received = None if self.is_first else self.transport.post_receive(micro_batch.id, micro_batch.num_tokens)
        self.plans.append((micro_batch, received))

    @property
    def can_execute(self) -> bool:
        """A plan is here, and what the stage before must send for it."""
        return bool(self.plans) and (self.is_first or bool(self.transport.inbox))

    def execute(self) -> tuple[MicroBatch, list[int | None] | None, MicroBatchLogprobs | None]:
        """The next micro-batch, and on the last stage its tokens and log-probabilities."""
        micro_batch, received = self.plans.popleft()
        hidden = None
        if received is not None:
            self.runner.prepare(micro_batch)  # as a stage process does, before it waits
            hidden = received.wait()
        output = self.runner.forward(micro_batch, hidden)
        token_ids = logprobs = None
        if self.is_last:
            token_ids = self.runner.sample(micro_batch, output)
            logprobs = self.runner.logprobs(micro_batch, output, token_ids)
        else:
            self.transport.send(micro_batch.id, output)
        if received is not None:
            received.release()
        return micro_batch, token_ids, logprobs


class LoopbackEngine:
    """Scheduler and stages in one process, one step at a time.

    Args:
        runners: one per stage, with `config.num_kv_blocks` KV blocks allocated.
        seed: None: every tick moves every stage; otherwise stages (and launches) pause at random.
    """

    def __init__(self, runners: Sequence[Runner], config: SchedulerConfig, seed: int | None = None) -> None:
        assert len(runners) == config.pp_size, "one runner per stage"
        self.scheduler = Scheduler(config)
        self.records = Records(config.pp_size, config.in_flight_limit, started_ns=0)
        self.stages = [LoopbackStage(stage, len(runners), runner) for stage, runner in enumerate(runners)]
        for stage, next_stage in zip(self.stages, self.stages[1:], strict=False):
            stage.transport.link(next_stage.transport)
        self.in_flight = 0
        self.now_s = 0.0
        self._random = None if seed is None else random.Random(seed)

    @property
    def max_in_flight(self) -> int:
        return max(self.records.in_flight_at_launch, default=0)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self.in_flight == 0

    def add(self, request: Request) -> None:
        """Raises RequestError as the scheduler does."""
        request.arrival_s = self.now_s
        self.scheduler.add(request)

    def abort(self, request_id: int) -> TokenOutput | None:
        return self.scheduler.abort(request_id)

    def tick(self) -> list[TokenOutput]:
        """Launches what can be launched and lets every stage execute at most one micro-batch.

        The last stage goes first, so that a micro-batch moves by one stage in a tick.
        """
        self.now_s += _TICK_S
        outputs = self.scheduler.expire(self.now_s)
        if not self._pauses():
            self._launch()
        stages = list(reversed(self.stages))
        if self._random is not None:
            self._random.shuffle(stages)
        for stage in stages:
            if stage.can_execute and not self._pauses():
                outputs += self._execute(stage)
        return outputs

    def generate(self, requests: Sequence[Request], max_ticks: int = 1_000_000) -> dict[int, list[int]]:
        """Runs all requests to their ends. Returns request id -> output tokens."""
        tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.add(request)
        for _ in range(max_ticks):
            if self.is_idle:
                return tokens
            for output in self.tick():
                if output.token_id is not None:
                    tokens[output.request_id].append(output.token_id)
        raise AssertionError(f"not finished after {max_ticks} ticks: {self.scheduler.state()}")

    def _pauses(self) -> bool:
        return self._random is not None and self._random.random() < 0.3

    def _launch(self) -> None:
        while (micro_batch := self.scheduler.next_micro_batch(self.now_s)) is not None:
            self.in_flight += 1
            self.records.add_event(self.scheduler.record("launch", int(self.now_s * 1e9), micro_batch))
            for_earlier, for_last = encode_plan(micro_batch)
            for stage in self.stages:  # every stage has its own copy, as between processes
                execute = to_stage_decoder.decode(for_last if stage.is_last else for_earlier)
                assert isinstance(execute, Execute)
                stage.take(execute.micro_batch)

    def _execute(self, stage: LoopbackStage) -> list[TokenOutput]:
        micro_batch, token_ids, logprobs = stage.execute()
        now_ns = int(self.now_s * 1e9)
        start_ns = now_ns - int(_TICK_S * 1e9)
        record = StageRecord(stage.stage, micro_batch.id, *[start_ns] * 4, *[now_ns] * 4)
        self.records.add_step(record, stage.runner.used_graph)
        self.scheduler.observe(record)
        if token_ids is None:
            return []
        self.in_flight -= 1
        return self.scheduler.complete(micro_batch.id, token_ids, self.now_s, logprobs)

"""Bounds: on the wait for a prompt's turn, and on the work of choosing m."""

from __future__ import annotations

from math import ceil

import pytest
from pipeline_model import PipelineModel

from fullbore.scheduler.cost import CostModel, DecodeCurve
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.policy import best_micro_batches
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig

SHORTEST_CHUNK = 32
LONG = 1000


def add(pipeline: PipelineModel, request_id: int, prompt: int, max_tokens: int) -> None:
    tokens = [request_id * 7919 + i for i in range(prompt)]
    pipeline.add(Request(request_id, tokens, max_tokens, arrival_s=pipeline.now_s))


def tokens_of(micro_batch: MicroBatch) -> float:
    return float(micro_batch.num_tokens)


def first_sampled(pipeline: PipelineModel) -> dict[int, int]:
    """Request -> number of the micro-batch that its first token comes from."""
    found: dict[int, int] = {}
    for number, micro_batch in enumerate(pipeline.launched):
        for run in micro_batch.runs:
            if run.sampling is not None:
                found.setdefault(run.request_id, number)
    return found


@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("num_ahead", [0, 3, 10])
@pytest.mark.parametrize("prompt", [40, 700, 3000])
def test_a_prompt_s_turn_comes_after_those_ahead_of_it(pp_size: int, num_ahead: int, prompt: int) -> None:
    """W tokens ahead of n: launched within ⌈(W + n) / shortest chunk⌉ micro-batches, whatever comes later."""
    config = SchedulerConfig(pp_size=pp_size, num_kv_blocks=5000, chunked_prefill_size=64)
    pipeline = PipelineModel(Scheduler(config), lambda stage, micro_batch: tokens_of(micro_batch))
    for i in range(12):
        add(pipeline, i, prompt=30, max_tokens=100_000 // 12)  # decode all the time
    for _ in range(60):
        pipeline.step()
    ahead = [50 + 37 * i for i in range(num_ahead)]
    for i, length in enumerate(ahead):
        add(pipeline, 100 + i, length, max_tokens=50)
    add(pipeline, LONG, prompt, max_tokens=2)
    launched_before = len(pipeline.launched)
    next_id = LONG + 1
    while LONG not in first_sampled(pipeline):
        add(pipeline, next_id, prompt=16, max_tokens=2)  # a stream that never stops
        next_id += 1
        pipeline.step()
        assert len(pipeline.launched) - launched_before <= ceil((sum(ahead) + prompt) / SHORTEST_CHUNK) + 1
    sampled = first_sampled(pipeline)
    assert all(sampled[later] >= sampled[LONG] for later in range(LONG + 1, next_id) if later in sampled), "overtaken"


def test_with_a_cap_the_first_come_run_and_the_next_follow_when_they_end() -> None:
    """At most cap · L requests take part in decoding; the others are not forgotten."""
    config = SchedulerConfig(
        pp_size=2, num_kv_blocks=5000, pp_max_micro_batch_size=1, pp_async_batch_depth=0, max_running_requests=100
    )
    pipeline = PipelineModel(Scheduler(config), lambda stage, micro_batch: tokens_of(micro_batch))
    for i in range(8):
        add(pipeline, i, prompt=16, max_tokens=20)
    pipeline.run()
    assert list(first_sampled(pipeline)) == list(range(8))


def test_choosing_m_looks_at_each_size_once() -> None:
    """The work of a choice: one look at the curves for each distinct micro-batch size among m = 1 … L."""
    costs = CostModel(64)
    for stage in range(64):
        for size in (1, 16, 1024):
            costs.seed_decode(stage, size, 0.01 + 0.0001 * size)
    looks = 0

    class Counting(DecodeCurve):
        def at(self, size: int, context_tokens: float = 0) -> float:
            nonlocal looks
            looks += 1
            return 0.01 + 0.0001 * size

    costs.decode[-1] = Counting(sizes=[1, 2], seconds={1: 0.01, 2: 0.01})
    assert 1 <= best_micro_batches(costs, 1024, 64, 128, 1024) <= 128
    sizes = {size for m in range(1, 129) for size in (1024 // m, -(-1024 // m))}
    assert looks <= len(sizes)

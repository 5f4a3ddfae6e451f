"""Runs that come back without a token, since their logits were not finite."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from pipeline_model import PipelineModel

from fullbore.scheduler.kv_blocks import ROOT, BlockPool
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE = 4
PROMPT = list(range(10))


def make(token: Callable[[int, int], int | None], num_kv_blocks: int = 100, **settings: object) -> PipelineModel:
    config = SchedulerConfig(num_kv_blocks=num_kv_blocks, pp_size=3, page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]
    return PipelineModel(Scheduler(config), lambda stage, micro_batch: 1.0, token)


def assert_at_rest(scheduler: Scheduler) -> None:
    state = scheduler.state()
    assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
    assert scheduler.is_idle


@pytest.mark.parametrize("num_good_tokens", [0, 2])
def test_the_request_ends_and_its_neighbours_get_on(num_good_tokens: int) -> None:
    fatal = len(PROMPT) + num_good_tokens
    pipeline = make(lambda request_id, position: None if request_id == 2 and position == fatal else 7)
    for request_id in range(4):
        pipeline.add(Request(request_id, [100 * request_id + token for token in PROMPT], 5))
    pipeline.run()
    assert pipeline.outputs.pop(2) == [TokenOutput(2, 7, None)] * num_good_tokens + [TokenOutput(2, None, "error")]
    for outputs in pipeline.outputs.values():
        assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert_at_rest(pipeline.scheduler)


@pytest.mark.parametrize("recovers", [True, False])
def test_one_that_shares_blocks_computes_all_of_them_itself_before_it_is_given_up(recovers: bool) -> None:
    source, sharer = Request(0, PROMPT, 3), Request(1, [*PROMPT, 77], 3)
    pipeline = make(lambda request_id, position: None if request_id == 1 and not (recovers and sharer.epoch) else 7)
    pipeline.add(source)
    pipeline.run()
    pipeline.add(sharer)
    pipeline.run()
    assert sharer.num_cached_tokens == 2 * PAGE_SIZE
    assert sharer.epoch == 1
    assert sharer.num_shared_blocks == 0
    starts = [run.start for micro_batch in pipeline.launched for run in micro_batch.runs if run.request_id == 1]
    assert starts[:2] == [2 * PAGE_SIZE, 0]
    ends = [output.finish_reason for output in pipeline.outputs[1]]
    assert ends == ([None, None, "length"] if recovers else ["error"])
    assert_at_rest(pipeline.scheduler)


def test_blocks_of_a_failed_request_are_found_no_more() -> None:
    pipeline = make(lambda request_id, position: None if request_id == 0 else 7)
    for request_id in range(3):
        request = Request(request_id, PROMPT, 2)
        pipeline.add(request)
        pipeline.run()
        assert request.num_cached_tokens == (2 * PAGE_SIZE if request_id == 2 else 0)


def test_a_request_set_back_keeps_its_rank() -> None:
    old = Request(1, [*PROMPT, 77], 20)
    pipeline = make(lambda request_id, position: None if request_id == 1 and old.epoch == 0 else 7)
    pipeline.add(Request(0, PROMPT, 1))
    pipeline.run()
    for request in (old, *(Request(k, [100 * k + token for token in PROMPT], 20) for k in range(2, 6))):
        pipeline.add(request)
    while old.epoch == 0 or old.num_launched_tokens == 0:
        pipeline.step()
    assert list(pipeline.scheduler._running) == sorted(pipeline.scheduler._running)


@pytest.mark.parametrize("seed", range(20))
def test_failures_preemptions_and_sharing_together_leave_nothing_and_mix_up_nothing(seed: int) -> None:
    chance = random.Random(seed)
    doomed = {request_id for request_id in range(40) if chance.random() < 0.2}
    requests: dict[int, Request] = {}

    def token(request_id: int, position: int) -> int | None:
        if request_id in doomed or (requests[request_id].num_shared_blocks and chance.random() < 0.2):
            return None
        return position

    pipeline = make(token, num_kv_blocks=24, chunked_prefill_size=9)
    for request_id in range(40):
        prompt = [chance.randrange(2) * 50 + token for token in range(chance.randint(1, 30))]
        prompt[: chance.randint(0, 30)] = PROMPT[: len(prompt)]
        requests[request_id] = Request(request_id, prompt, chance.randint(1, 12))
        pipeline.add(requests[request_id])
        while chance.random() < 0.3:
            pipeline.step()
    pipeline.run()
    for micro_batch in pipeline.launched:
        assert_written_once(micro_batch)
    for request_id, request in requests.items():
        tokens = [output.token_id for output in pipeline.outputs[request_id]]
        begin = len(request.prompt_token_ids)
        if request_id in doomed:
            assert tokens == [None]
        else:
            assert tokens == list(range(begin, begin + request.max_tokens))
    assert pipeline.scheduler.state().preemptions > 0
    assert_at_rest(pipeline.scheduler)


def assert_written_once(micro_batch: MicroBatch) -> None:
    """No two runs write into the same block."""
    written = [
        block
        for run in micro_batch.runs
        for block in run.block_ids[run.start // PAGE_SIZE : (run.start + len(run.token_ids) - 1) // PAGE_SIZE + 1]
    ]
    assert len(set(written)) == len(written)


def test_forgotten_blocks_go_back_to_the_free_ones() -> None:
    pool = BlockPool(3, PAGE_SIZE)
    blocks = pool.allocate(2)
    assert blocks is not None
    content = pool.register(blocks[0], ROOT, [1, 2, 3, 4])
    pool.forget(blocks)
    pool.forget(blocks)
    assert pool.match_prefix([1, 2, 3, 4, 5], 4) == ([], ROOT)
    assert pool.register(blocks[1], ROOT, [1, 2, 3, 4]) != content
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.match_prefix([1, 2, 3, 4, 5], 4)[0] == [blocks[1]]

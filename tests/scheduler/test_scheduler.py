"""Behaviour of the scheduler on small, exact examples."""

from __future__ import annotations

import pytest
from pipeline_model import PipelineModel

from fullbore.errors import RequestError
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig


def make(pp_size: int = 4, num_kv_blocks: int = 1000, **settings: object) -> Scheduler:
    return Scheduler(SchedulerConfig(pp_size=pp_size, num_kv_blocks=num_kv_blocks, **settings))  # type: ignore[arg-type]


def request(request_id: int, prompt: int = 8, max_tokens: int = 8, **settings: object) -> Request:
    tokens = [1000 * request_id + i for i in range(prompt)]
    return Request(request_id, tokens, max_tokens, **settings)  # type: ignore[arg-type]


def one_per_request(stage: int, micro_batch: MicroBatch) -> float:
    return float(micro_batch.num_tokens)


def assert_at_rest(scheduler: Scheduler) -> None:
    state = scheduler.state()
    assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
    assert scheduler.is_idle


@pytest.mark.parametrize("pp_size", [1, 2, 4, 8])
def test_lone_request_runs_to_its_exact_length(pp_size: int) -> None:
    scheduler = make(pp_size)
    pipeline = PipelineModel(scheduler, one_per_request)
    pipeline.add(request(7, prompt=5, max_tokens=3))
    pipeline.run()
    assert [o.finish_reason for o in pipeline.outputs[7]] == [None, None, "length"]
    assert [mb.num_tokens for mb in pipeline.launched] == [5, 1, 1]
    assert_at_rest(scheduler)


def test_max_tokens_one_ends_with_the_prefill() -> None:
    pipeline = PipelineModel(make(2), one_per_request)
    pipeline.add(request(1, max_tokens=1))
    pipeline.run()
    assert [o.finish_reason for o in pipeline.outputs[1]] == ["length"]


def test_stop_token_ends_with_the_token_itself() -> None:
    pipeline = PipelineModel(make(2), one_per_request, token=lambda request_id, position: position)
    pipeline.add(request(1, prompt=4, max_tokens=10, stop_token_ids=frozenset({6})))
    pipeline.run()
    assert [(o.token_id, o.finish_reason) for o in pipeline.outputs[1]] == [(4, None), (5, None), (6, "stop")]


def test_burst_of_eight_on_eight_stages_becomes_eight_micro_batches() -> None:
    pipeline = PipelineModel(make(8), one_per_request)
    for i in range(8):
        pipeline.add(request(i, prompt=64, max_tokens=4))
    pipeline.launch()
    assert [len(mb.runs) for mb in pipeline.launched] == [1] * 8
    pipeline.run()
    assert {len(mb.runs) for mb in pipeline.launched} == {1}


@pytest.mark.parametrize("prompt", [1, 5, 100])
def test_burst_on_four_stages_keeps_four_in_flight(prompt: int) -> None:
    pipeline = PipelineModel(make(4), one_per_request)
    for i in range(8):
        pipeline.add(request(i, prompt=prompt, max_tokens=16))
    pipeline.run()
    steady = pipeline.in_flight_after_launch[8:-8]
    assert min(steady) >= 4


def test_decodes_are_spread_again_when_requests_end() -> None:
    scheduler = make(4, pp_async_batch_depth=0)
    pipeline = PipelineModel(scheduler, one_per_request)
    for i in range(16):
        pipeline.add(request(i, prompt=16, max_tokens=10 if i < 8 else 40))
    pipeline.run()
    tail = [len(mb.runs) for mb in pipeline.launched[-24:-4]]
    assert set(tail) == {2}, "eight requests left on four stages: two in each micro-batch"


@pytest.mark.parametrize("prompt", [1, 16, 600])
@pytest.mark.parametrize(("pp_size", "num_requests"), [(3, 7), (3, 10), (4, 9), (4, 14), (8, 17), (8, 31)])
def test_sizes_differ_by_at_most_one(pp_size: int, num_requests: int, prompt: int) -> None:
    pipeline = PipelineModel(make(pp_size, num_kv_blocks=2000, pp_async_batch_depth=0), one_per_request)
    for i in range(num_requests):
        pipeline.add(request(i, prompt=prompt, max_tokens=40))
    pipeline.run()
    sizes = [len(mb.runs) for mb in pipeline.launched[-15 * pp_size : -5 * pp_size]]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes[:pp_size]) == num_requests, "every request once in each turn of the pipeline"


@pytest.mark.parametrize("pp_size", [1, 2])
def test_prompt_tokens_of_a_micro_batch_stay_within_the_budget(pp_size: int) -> None:
    """Stages size their buffers for so many; the end of a prompt may be taken along only as far as it fits."""
    for first in range(1, 70):
        pipeline = PipelineModel(make(pp_size, chunked_prefill_size=32), one_per_request)
        for i, prompt in enumerate([first, 9, 33, 5]):
            pipeline.add(request(i, prompt=prompt, max_tokens=1))
        pipeline.run()
        assert max(mb.num_tokens for mb in pipeline.launched) <= 32


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_in_flight_never_exceeds_the_limit(depth: int) -> None:
    pipeline = PipelineModel(make(2, pp_async_batch_depth=depth, pp_max_micro_batch_size=1), one_per_request)
    for i in range(12):
        pipeline.add(request(i))
    pipeline.run()
    assert 2 <= max(pipeline.in_flight_after_launch) <= 2 + depth


def test_cap_on_requests_in_a_micro_batch() -> None:
    pipeline = PipelineModel(make(2, pp_max_micro_batch_size=3), one_per_request)
    for i in range(20):
        pipeline.add(request(i))
    pipeline.run()
    assert max(len(mb.runs) for mb in pipeline.launched) == 3


def test_chunks_of_one_prompt_follow_each_other() -> None:
    pipeline = PipelineModel(make(4, chunked_prefill_size=32), one_per_request)
    pipeline.add(request(1, prompt=320, max_tokens=1))
    pipeline.run()
    assert [mb.num_tokens for mb in pipeline.launched] == [32] * 10
    for k in range(9):
        assert pipeline.starts[k + 1][0] < pipeline.ends[k][3]
    assert pipeline.now_s == pytest.approx((10 + 3) * 32)


def test_unequal_prompts_make_equal_micro_batches() -> None:
    pipeline = PipelineModel(make(4), one_per_request)
    for i, prompt in enumerate([4000, 100, 100, 100]):
        pipeline.add(request(i, prompt=prompt, max_tokens=1))
    pipeline.run()
    sizes = [mb.num_tokens for mb in pipeline.launched]
    assert max(sizes) / (sum(sizes) / len(sizes)) <= 1.15


def test_equal_prefixes_share_blocks_and_report_it() -> None:
    scheduler = make(2, page_size=16)
    pipeline = PipelineModel(scheduler, one_per_request)
    prompt = list(range(100))
    pipeline.add(Request(1, prompt, 2))
    pipeline.run()
    pipeline.add(Request(2, [*prompt, 5, 6, 7], 2))
    pipeline.run()
    assert pipeline.outputs[2][0].num_cached_tokens == 96
    pipeline.add(Request(3, prompt[:96], 2))
    pipeline.run()
    assert pipeline.outputs[3][0].num_cached_tokens == 80, "the last token is always computed"
    assert_at_rest(scheduler)


def test_prefix_cache_can_be_switched_off() -> None:
    pipeline = PipelineModel(make(2, enable_prefix_cache=False), one_per_request)
    for i in (1, 2):
        pipeline.add(Request(i, list(range(100)), 2))
        pipeline.run()
    assert pipeline.outputs[2][0].num_cached_tokens == 0


def test_output_is_reused_as_prefix_of_the_next_turn() -> None:
    pipeline = PipelineModel(make(1), one_per_request, token=lambda request_id, position: position)
    pipeline.add(Request(1, list(range(10)), 30))
    pipeline.run()
    pipeline.add(Request(2, list(range(40)), 1))
    pipeline.run()
    assert pipeline.outputs[2][0].num_cached_tokens == 32


def test_preempted_request_keeps_its_tokens_and_finishes() -> None:
    scheduler = make(2, num_kv_blocks=6, page_size=4, enable_prefix_cache=False)
    pipeline = PipelineModel(scheduler, one_per_request, token=lambda request_id, position: 100 * request_id + position)
    for i in (1, 2, 3):
        pipeline.add(request(i, prompt=4, max_tokens=16))
    pipeline.run()
    assert scheduler.state().preemptions > 0
    for i in (1, 2, 3):
        assert [o.token_id for o in pipeline.outputs[i]] == [100 * i + p for p in range(4, 20)]
    assert_at_rest(scheduler)


def test_nobody_is_admitted_into_the_room_that_others_need_next() -> None:
    """Four requests decode; the fifth would fit, but only until each of them needs its next block."""
    scheduler = make(1, num_kv_blocks=12, page_size=4, enable_prefix_cache=False)
    pipeline = PipelineModel(scheduler, one_per_request)
    for i in range(4):
        pipeline.add(request(i, prompt=7, max_tokens=5))
    pipeline.step()
    assert (scheduler.state().running, scheduler.state().free_blocks) == (4, 4)
    pipeline.add(request(4, prompt=8, max_tokens=4))
    pipeline.run()
    assert scheduler.state().preemptions == 0


def test_prompts_are_throttled_when_memory_gets_short() -> None:
    """Less than a quarter of the KV blocks free, and decoding requests that will want some."""
    chunks = []
    for num_kv_blocks in (340, 10_000):
        pipeline = PipelineModel(make(1, num_kv_blocks=num_kv_blocks), one_per_request)
        for i in range(8):
            pipeline.add(request(i, prompt=500, max_tokens=100))
        for _ in range(12):
            pipeline.step()
        pipeline.add(request(9, prompt=1024, max_tokens=2))
        launched = len(pipeline.launched)
        pipeline.run()
        runs = [run for mb in pipeline.launched[launched:] for run in mb.runs if run.request_id == 9]
        chunks.append([len(run.token_ids) for run in runs if run.start < 1024])
    assert chunks[1] == [512, 512]
    assert chunks[0][1] < 0.7 * 512
    assert sum(chunks[0]) == 1024


def test_abort_in_every_state_frees_everything() -> None:
    scheduler = make(2, num_kv_blocks=64, chunked_prefill_size=16, max_running_requests=3)
    pipeline = PipelineModel(scheduler, one_per_request)
    for i in range(6):
        pipeline.add(request(i, prompt=64, max_tokens=20))
    for _ in range(12):
        pipeline.step()
    for i in range(6):
        ended = scheduler.abort(i)
        assert ended is not None
        assert ended.finish_reason == "abort"
        assert scheduler.abort(i) is None
    assert scheduler.abort(99) is None
    before = {i: len(pipeline.outputs[i]) for i in range(6)}
    pipeline.run()
    assert {i: len(pipeline.outputs[i]) for i in range(6)} == before
    assert_at_rest(scheduler)


def test_deadline_ends_a_request_once() -> None:
    scheduler = make(2)
    scheduler.add(request(1, deadline_s=5.0))
    scheduler.add(request(2))
    assert scheduler.expire(4.9) == []
    assert [(o.request_id, o.finish_reason) for o in scheduler.expire(5.0)] == [(1, "timeout")]
    assert scheduler.expire(6.0) == []
    assert scheduler.state().waiting == 1


def test_long_prompt_is_not_overtaken_by_a_stream_of_short_ones() -> None:
    scheduler = make(2, num_kv_blocks=70, page_size=16, chunked_prefill_size=64)
    pipeline = PipelineModel(scheduler, one_per_request)
    for i in range(8):
        pipeline.add(request(i, prompt=64, max_tokens=30))
    for _ in range(4):
        pipeline.step()
    pipeline.add(request(100, prompt=900, max_tokens=4))
    next_id, first_after = 101, None
    for _ in range(2000):
        pipeline.add(request(next_id, prompt=16, max_tokens=4))
        next_id += 1
        pipeline.step()
        if pipeline.outputs[100]:
            break
        if first_after is None and any(pipeline.outputs[i] for i in range(101, next_id)):
            first_after = pipeline.now_s
    assert pipeline.outputs[100]
    assert first_after is None, "a later request got a token before the long prompt"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"prompt": 0}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": 900, "max_tokens": 200}, "max_tokens"),
    ],
)
def test_refused_requests_leave_nothing(bad: dict[str, int], param: str) -> None:
    scheduler = make(2, context_length=1000)
    with pytest.raises(RequestError) as error:
        scheduler.add(request(1, **bad))
    assert error.value.param == param
    assert_at_rest(scheduler)


def test_same_id_twice_is_refused() -> None:
    scheduler = make()
    scheduler.add(request(1))
    with pytest.raises(RequestError):
        scheduler.add(request(1))


def test_wrong_results_are_refused() -> None:
    scheduler = make(1)
    scheduler.add(request(1))
    micro_batch = scheduler.next_micro_batch(0.0)
    assert micro_batch is not None
    with pytest.raises(ValueError, match="not in flight"):
        scheduler.complete(5, [], 0.0)
    with pytest.raises(ValueError, match="1 tokens due"):
        scheduler.complete(micro_batch.id, [1, 2], 0.0)


def test_launch_reasons() -> None:
    scheduler = make(1, pp_async_batch_depth=0)
    scheduler.add(request(1, max_tokens=2, arrival_s=1.0))
    first = scheduler.next_micro_batch(1.0)
    assert first is not None
    assert (first.launch_reason, first.launch_reason_since_s) == ("request-arrived", 1.0)
    scheduler.add(request(2, max_tokens=2, arrival_s=2.0))
    assert scheduler.next_micro_batch(2.0) is None
    scheduler.complete(first.id, [1], 3.0)
    second = scheduler.next_micro_batch(3.5)
    assert second is not None
    assert second.launch_reason in ("slot-freed", "token-returned")
    assert second.launch_reason_since_s == 3.0

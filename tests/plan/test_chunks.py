"""How prompts are cut, seen in the micro-batches that leave and in what they cost."""

from __future__ import annotations

import pytest
from plan_helpers import MS, pipeline, run

from fullbore.plan.workload import Job, Workload, closed_loop

MIN_CHUNK = 32


def chunks_of_last_prompt(num_stages: int, curve: str, prompt_tokens: int) -> list[tuple[int, float]]:
    """(tokens, milliseconds on a stage) of each chunk, after two other prompts have taught the scheduler the costs.

    Attention: at 16,000 tokens of context a chunk costs as much again as its tokens alone.
    """
    pipe = pipeline(
        [1.0] * num_stages,
        curve=curve,
        stage_s=5 * MS,
        reference=8,
        prefill_token_s=0.04 * MS,
        prefill_token_pair_s=1.25e-6 * MS,
    )
    result = run(pipe, closed_loop(1, 3, [8000, prompt_tokens, prompt_tokens], 2), record_until_s=1e9)
    took_ms = {r.micro_batch_id: (r.compute_end_ns - r.compute_start_ns) * 1e-6 for r in result.spans if r.stage == 0}
    launches = [r for r in result.driver_records if r.event == "launch" and r.prefill_tokens]
    chunks: list[tuple[int, float]] = []
    while sum(tokens for tokens, _ in chunks) < prompt_tokens:
        launch = launches.pop()
        chunks.insert(0, (launch.prefill_tokens, took_ms[launch.micro_batch_id]))
    return chunks


@pytest.mark.parametrize("curve", ["flat", "linear"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt_tokens", [513, 700, 1100, 4100, 8191, 16_000])
def test_no_chunk_takes_longer_than_the_first_and_none_is_a_crumb(
    num_stages: int, curve: str, prompt_tokens: int
) -> None:
    chunks = chunks_of_last_prompt(num_stages, curve, prompt_tokens)
    assert sum(tokens for tokens, _ in chunks) == prompt_tokens
    first_ms = chunks[0][1]
    assert max(ms for _, ms in chunks) <= 1.15 * first_ms, chunks
    assert min(tokens for tokens, _ in chunks) >= 0.75 * MIN_CHUNK, chunks
    assert chunks[-1][0] >= chunks[-2][0] / 4, chunks


@pytest.mark.parametrize("num_stages", [4, 8])
def test_chunks_of_equal_size_teach_enough(num_stages: int) -> None:
    """Chunks all alike do not tell a fixed part of the cost from the rest; prompts still must not be minced."""
    pipe = pipeline([1.0] * num_stages, curve="flat", stage_s=5 * MS, prefill_token_s=0.04 * MS)
    result = run(pipe, closed_loop(1, 40, 512, 1), record_until_s=1e9, is_probed=False, chunked_prefill_size=256)
    launches = [r.prefill_tokens for r in result.driver_records if r.event == "launch"]
    assert min(launches) >= MIN_CHUNK
    alone_s = 2 * (5 + 0.04 * 256) * MS + (num_stages - 1) * (5 + 0.04 * 256) * MS
    assert result.steady.ttft.p50_s <= 1.02 * alone_s


def test_a_long_prompt_streams_through_the_stages() -> None:
    """Ten chunks on four stages: (10 + 3) chunk times, each chunk entering while the one before is under way."""
    pipe = pipeline([1.0] * 4, curve="linear", prefill_token_s=1 / 32, driver_s=0.9)
    result = run(pipe, closed_loop(1, 1, 320, 1), chunked_prefill_size=32, record_until_s=1e9)
    spans = {(r.micro_batch_id, r.stage): r for r in result.spans}
    assert len(spans) == 10 * 4
    assert all(spans[k + 1, 0].compute_start_ns < spans[k, 3].compute_end_ns for k in range(9))
    assert result.whole.ttft.mean_s == pytest.approx(13 + 0.9)


def test_a_decode_does_not_queue_behind_a_heap_of_prompt_chunks() -> None:
    """No more chunks in flight than keep the stages busy: P, and cover for the driver."""
    pipe = pipeline([1.0] * 4, curve="affine", stage_s=5 * MS, prefill_token_s=0.04 * MS)
    work = Workload([Job(64, 400), *(Job(4000, 1) for _ in range(6))], concurrency=2)
    result = run(pipe, work, record_until_s=1e9)
    took_s = [(r.compute_end_ns - r.compute_start_ns) * 1e-9 for r in result.spans if r.stage == 0]
    assert result.whole.itl.p99_s <= 6.5 * max(took_s)


def test_unequal_prompts_make_equal_micro_batches() -> None:
    pipe = pipeline([1.0] * 4, curve="linear", prefill_token_s=0.04 * MS)
    result = run(pipe, closed_loop(4, 4, [4000, 100, 100, 100], 1), record_until_s=1e9)
    took = [r.compute_end_ns - r.compute_start_ns for r in result.spans if r.stage == 0]
    assert max(took) / (sum(took) / len(took)) <= 1.15


@pytest.mark.parametrize("is_probed", [True, False])
def test_a_burst_of_eight_fills_eight_stages(is_probed: bool) -> None:
    pipe = pipeline([1.0] * 8, curve="affine", stage_s=10 * MS, reference=8, prefill_token_s=0.04 * MS)
    result = run(pipe, closed_loop(8, 8, 64, 64), record_until_s=1e9, is_probed=is_probed)
    launches = [r for r in result.driver_records if r.event == "launch"]
    assert [launch.num_requests for launch in launches[:8]] == [1] * 8
    assert [launch.at_ns for launch in launches[:8]] == [0] * 8
    assert min(result.steady.stage_busy) >= 0.99

"""How many micro-batches, and how many prompt tokens in each, on known costs."""

from __future__ import annotations

from math import ceil

from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.policy import best_micro_batches, chunk_tokens, prefill_quota_tokens

MS = 1e-3


def costs(num_stages: int, token_ms: float = 0.04, pair_ms: float = 0.0, decode_ms: float = 10.0) -> CostModel:
    """Flat decode curves, and prefill costs that are known exactly."""
    model = CostModel(num_stages)
    for stage in range(num_stages):
        for size in (1, 64):
            model.seed_decode(stage, size, decode_ms * MS)
        for start, tokens in [(0, 64), (0, 128), (0, 256), (256, 256), (512, 64), (512, 128), (1024, 256), (2048, 512)]:
            pairs = (start + tokens) ** 2 - start**2
            model.observe(stage, 0, tokens, pairs, (decode_ms + token_ms * tokens + pair_ms * pairs) * MS)
        model.prefill[stage].refit()
    return model


def quota(waiting_tokens: int, waiting_requests: int, num_decoding: int, num_stages: int = 8) -> int:
    num_decodes = ceil(num_decoding / num_stages)
    return prefill_quota_tokens(
        costs(num_stages), waiting_tokens, waiting_requests, num_decoding, num_decodes, num_stages, 512, 32
    )


def test_a_lone_prompt_is_cut_where_its_own_latency_is_least() -> None:
    def latency_ms(tokens: int) -> float:
        pieces = ceil(1024 / tokens)
        return (pieces + 7) * (10 + 0.04 * 1024 / pieces)

    best = min(latency_ms(tokens) for tokens in range(16, 513))
    assert latency_ms(quota(1024, 1, num_decoding=0)) <= 1.02 * best


def test_prompts_are_cut_finer_the_more_requests_decode() -> None:
    quotas = [quota(1024, 1, num_decoding) for num_decoding in (0, 8, 64)]
    assert quotas == sorted(quotas, reverse=True)
    assert quotas[0] > 2 * quotas[2]
    assert quotas[2] >= 32


def test_and_coarser_the_more_prompts_wait() -> None:
    assert quota(1024, 16, 64) > quota(1024, 1, 64)
    assert quota(512 * 200, 50, 64) == 512


def test_later_chunks_of_a_long_prompt_are_shorter_and_cost_the_same() -> None:
    model = costs(4, token_ms=0.04, pair_ms=2e-5)
    fixed_s = 10 * MS
    first_s = fixed_s + model.prefill[0].chunk_s(512, 0)
    sizes = [chunk_tokens(model, 512, context) for context in range(0, 16_000, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    for context, tokens in zip(range(0, 16_000, 1000), sizes, strict=True):
        if tokens > 512 // 8:
            cost_s = fixed_s + model.prefill[0].chunk_s(tokens, context)
            assert first_s <= cost_s <= 1.06 * first_s
    assert min(sizes) == 64


def test_costs_that_hardly_depend_on_tokens_do_not_shrink_chunks() -> None:
    model = costs(4, token_ms=1e-7, pair_ms=1e-9)
    assert [chunk_tokens(model, 512, context) for context in (0, 512, 5120)] == [512] * 3


def test_flat_curve_and_slow_last_stage_want_one_micro_batch() -> None:
    model = CostModel(8)
    for stage in range(8):
        for size in (1, 64):
            model.seed_decode(stage, size, (20 if stage == 7 else 10) * MS)
    assert best_micro_batches(model, 16, 8, 16, 256) <= 4


def test_one_micro_batch_per_stage_unless_another_number_is_clearly_better() -> None:
    """A percent may be noise in the measurements; more in flight for it would cost latency."""

    def choice(overhead_ms: float) -> int:
        model = CostModel(8)
        for stage in range(8):
            for size in range(1, 65):
                model.seed_decode(stage, size, size * MS)  # linear: splitting costs nothing
        model.return_s = overhead_ms * MS
        return best_micro_batches(model, 64, 8, 16, 256)

    assert choice(0.0) == 8
    assert choice(0.6) == 8, "64.6 ms instead of 64"
    assert choice(4.0) > 8, "68 ms instead of 64"

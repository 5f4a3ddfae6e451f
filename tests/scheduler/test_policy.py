"""How many micro-batches, and how many prompt tokens in each, on known costs."""

from __future__ import annotations

from math import ceil

import pytest

from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.policy import (
    best_micro_batches,
    chunk_tokens,
    cut_tokens,
    prefill_quota_tokens,
    rounded_context,
)

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


def with_contexts(base_ms: float, context_token_ms: float) -> CostModel:
    """Four stages with flat curves, the last twice as slow; cached tokens cost the same on all."""
    model = CostModel(4)
    for stage in range(4):
        own_ms = base_ms * (2 if stage == 3 else 1)
        for size in (1, 64):
            model.seed_decode(stage, size, own_ms * MS)
        model.seed_context(stage, 4, 4096, (own_ms + 4096 * context_token_ms) * MS)
    return model


def test_reading_long_contexts_is_shared_by_splitting() -> None:
    """What a context costs is paid once however many micro-batches there are; the fixed part in each of them."""
    model = with_contexts(10, 0.005)
    assert best_micro_batches(model, 16, 4, 8, 256, context=0) <= 2
    assert best_micro_batches(model, 16, 4, 8, 256, context=16_384) >= 4


def test_growing_contexts_are_not_taken_for_a_slower_machine() -> None:
    model = with_contexts(10, 0.005)
    for context in range(0, 16_384, 64):
        for stage in range(4):
            own_ms = 20 if stage == 3 else 10
            model.observe(stage, 4, 0, 0.0, (own_ms + 4 * context * 0.005) * MS, 4 * context)
    for curve in model.decode:
        assert curve.drift == pytest.approx(1.0)
    assert best_micro_batches(model, 16, 4, 8, 256, context=64) <= 2
    assert model.decode_s(4, 8192)[1] == pytest.approx((20 + 4 * 8192 * 0.005) * MS)


def test_contexts_are_rounded_to_what_can_be_told_apart() -> None:
    assert [rounded_context(tokens) for tokens in (0, 63, 64, 500, 8191, 8192, 9000, 16_383)] == [
        *(0, 0, 64, 448, 7168, 8192, 8192, 14_336)
    ]
    assert len({rounded_context(tokens) for tokens in range(131_072)}) < 64


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


@pytest.mark.parametrize("quota_tokens", [32, 100, 128, 500])
def test_a_prompt_is_never_cut_to_crumbs(quota_tokens: int) -> None:
    for prompt_tokens in range(1, 1200):
        pieces = []
        while sum(pieces) < prompt_tokens:
            remaining = prompt_tokens - sum(pieces)
            pieces.append(cut_tokens(remaining, quota_tokens, quota_tokens, 0, 512, 32))
        assert sum(pieces) == prompt_tokens
        assert max(pieces) <= min(quota_tokens + max(quota_tokens // 8, 32), 512)
        assert min(pieces) >= min(prompt_tokens, 16)


def test_a_prompt_that_hardly_fits_waits_for_the_next_micro_batch() -> None:
    assert cut_tokens(300, 10, 128, 118, 512, 32) == 0, "10 tokens are not worth a run"
    assert cut_tokens(300, 64, 128, 64, 512, 32) == 64
    assert cut_tokens(20, 10, 128, 118, 512, 32) == 20, "the rest is taken along rather than left"

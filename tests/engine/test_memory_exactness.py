"""Neither preemption nor the prefix cache changes a token, greedy or drawn at random."""

from __future__ import annotations

import pytest
from tiny_references import DRAWN, GREEDY, SHARING, TinyModels

MIXED = [index for pair in zip(GREEDY, DRAWN, strict=False) for index in pair]  # every second one drawn at random
FEW_BLOCKS = 32  # 128 tokens; the longest case alone needs 22

FAST = [("LlamaForCausalLM-tied", 1), ("LlamaForCausalLM-tied", 4), ("Qwen3MoeForCausalLM", 2)]
FAST += [("DeepseekV3ForCausalLM", 3)]
SLOW = [(name, pp_size) for name in sorted({name for name, _ in FAST}) for pp_size in (1, 2, 3, 4)]
GRID = [*FAST, *(pytest.param(*point, marks=pytest.mark.slow) for point in SLOW if point not in FAST)]


@pytest.mark.parametrize(("name", "pp_size"), GRID)
def test_preemption(tiny: TinyModels, name: str, pp_size: int) -> None:
    """What a request computes again it finds in the prefix cache or, on an odd number of stages, it does not."""
    settings = {"num_kv_blocks": FEW_BLOCKS, "chunked_prefill_size": 16, "enable_prefix_cache": pp_size % 2 == 0}
    engine = tiny.engine(name, pp_size, pp_size, **settings)
    tiny.run_and_check(name, engine, MIXED, pp_size)
    assert engine.scheduler.state().preemptions > 0


@pytest.mark.parametrize(("name", "pp_size"), GRID)
def test_prefix_cache(tiny: TinyModels, name: str, pp_size: int) -> None:
    """The second time even the first prompt is found, and what was generated after the shorter ones."""
    engine = tiny.engine(name, pp_size, pp_size)
    tiny.run_and_check(name, engine, SHARING, pp_size)
    first_hits = engine.scheduler.state().cached_tokens
    tiny.run_and_check(name, engine, SHARING, pp_size)
    second_hits = engine.scheduler.state().cached_tokens - first_hits
    assert 0 < first_hits < second_hits
    without = tiny.engine(name, pp_size, pp_size, enable_prefix_cache=False)
    tiny.run_and_check(name, without, SHARING, pp_size)
    assert without.scheduler.state().cached_tokens == 0

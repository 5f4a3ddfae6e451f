"""The block allocator and its prefix cache."""

from __future__ import annotations

import pytest

from fullbore.scheduler.kv_blocks import ROOT, BlockPool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks for a sequence of full blocks, made findable."""
    size = pool.page_size
    blocks = pool.allocate(len(tokens) // size)
    assert blocks is not None
    content = ROOT
    for block, start in zip(blocks, range(0, len(tokens), size), strict=True):
        content = pool.register(block, content, tokens[start : start + size])
    return blocks


def test_all_or_nothing() -> None:
    pool = BlockPool(4, page_size=2)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    blocks = pool.allocate(4)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_released_twice_is_an_error() -> None:
    pool = BlockPool(2, page_size=2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_prefix_is_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8, page_size=2)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match_prefix([1, 2, 3, 4, 9, 9], 6)[0] == blocks[:2]
    assert pool.match_prefix([9, 9, 3, 4], 4)[0] == []
    assert pool.match_prefix([1, 2, 3, 4, 5, 6], 5)[0] == blocks[:2], "only full blocks within the limit"


def test_equal_tokens_after_different_prefixes_are_different() -> None:
    pool = BlockPool(8, page_size=2)
    fill(pool, [1, 2, 7, 8])
    other = fill(pool, [3, 4, 7, 8])
    assert pool.match_prefix([3, 4, 7, 8], 4)[0] == other


def test_a_stale_prefix_matches_nothing() -> None:
    """The block after an evicted one is cached still, but must not be found through a later equal prefix's id."""
    pool = BlockPool(3, page_size=2)
    first = fill(pool, [1, 2])
    second = fill(pool, [5, 6])
    pool.release(first)
    assert pool.allocate(2) is not None, "evicts [1, 2]"
    again, content = pool.match_prefix([1, 2, 5, 6], 4)
    assert again == []
    assert content == ROOT
    assert pool.match_prefix([5, 6], 2)[0] == second


def test_the_least_recently_used_goes_first_and_tails_before_prefixes() -> None:
    pool = BlockPool(4, page_size=2)
    old = fill(pool, [1, 2, 3, 4])
    new = fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    evicted = pool.allocate(1)
    assert evicted == [old[1]], "the tail of the older one"
    assert pool.match_prefix([1, 2, 3, 4], 4)[0] == [old[0]]
    pool.release([old[0]])
    assert pool.allocate(1) == [new[1]], "[1, 2] was used since"


def test_shared_blocks_are_freed_by_the_last_who_holds_them() -> None:
    pool = BlockPool(4, page_size=2)
    blocks = fill(pool, [1, 2])
    shared, _ = pool.match_prefix([1, 2, 9], 3)
    assert shared == blocks
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(shared)
    assert pool.num_used == 0
    assert pool.match_prefix([1, 2, 9], 3)[0] == blocks, "still findable"


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(4, page_size=2, enable_prefix_cache=False)
    fill(pool, [1, 2])
    assert pool.match_prefix([1, 2], 2)[0] == []

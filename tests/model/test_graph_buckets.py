"""The shapes of CUDA graphs, and plans padded to them."""

from __future__ import annotations

import pytest

from fullbore.model.native.buckets import Bucket, choose_bucket, is_decode, make_buckets, pad, request_counts
from fullbore.scheduler.micro_batch import MicroBatch, Run

PAGE_SIZE = 16
SCRATCH = 99


def micro_batch(*runs: Run) -> MicroBatch:
    return MicroBatch(0, list(runs), "slot-freed", 0.0)


def decode(start: int, blocks: list[int], token_id: int = 5) -> Run:
    return Run(0, 0, start, [token_id], blocks, None)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (7, [1, 2, 4, 7]),
        (16, [1, 2, 4, 8, 16]),
        (20, [1, 2, 4, 8, 16, 20]),
        (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]),
    ],
)
def test_request_counts(most: int, expected: list[int]) -> None:
    assert request_counts(most) == expected


@pytest.mark.parametrize("most", [1, 3, 17, 256])
@pytest.mark.parametrize("gathers", [True, False])
def test_every_small_enough_micro_batch_has_a_bucket_and_little_padding(most: int, gathers: bool) -> None:
    buckets = make_buckets(most, 1000, PAGE_SIZE, gathers=gathers)
    assert buckets == sorted(set(buckets))
    for requests in range(1, most + 1):
        for start in (0, 15, 16, 511, 512, 999):
            blocks = list(range(start // PAGE_SIZE + 1))
            bucket = choose_bucket(buckets, micro_batch(*[decode(start, blocks)] * requests), PAGE_SIZE)
            if bucket is None:
                assert gathers
                assert requests * 1008 > 65_536 // 1.5, "only what would gather too much has none"
                continue
            assert requests <= bucket.requests < max(2 * requests, 2)
            assert len(blocks) <= bucket.blocks


def test_longer_contexts_have_graphs_of_their_own_only_where_blocks_are_gathered() -> None:
    assert make_buckets(1, 8192, PAGE_SIZE, gathers=False) == [Bucket(1, 512)]
    assert make_buckets(1, 8192, PAGE_SIZE, gathers=True) == [Bucket(1, 32), Bucket(1, 128), Bucket(1, 512)]
    assert make_buckets(1, 100, PAGE_SIZE, gathers=True) == [Bucket(1, 7)]
    assert make_buckets(1, 520, 1024, gathers=True) == [Bucket(1, 1)]


def test_contexts_too_long_for_the_graphs_memory_run_without() -> None:
    buckets = make_buckets(64, 32_768, PAGE_SIZE, gathers=True)
    long = decode(32_767, list(range(2048)))
    assert choose_bucket(buckets, micro_batch(long, long), PAGE_SIZE) == Bucket(2, 2048)
    assert choose_bucket(buckets, micro_batch(long, *[decode(0, [3])] * 2), PAGE_SIZE) is None


def test_only_single_tokens_are_decodes() -> None:
    assert is_decode(micro_batch(decode(0, [1]), decode(40, [1, 2, 3])))
    assert not is_decode(micro_batch(decode(0, [1]), Run(1, 0, 0, [1, 2], [4], None)))


def test_rows_of_requests_are_as_planned() -> None:
    # The second request has a block in reserve; the third begins a block with this token.
    batch = micro_batch(decode(0, [7], 11), decode(20, [3, 4, 5], 12), decode(32, [8, 9, 2], 13))
    rows = pad(batch, Bucket(3, 4), PAGE_SIZE, SCRATCH)
    assert rows.token_ids == [11, 12, 13]
    assert rows.positions == [0, 20, 32]
    assert rows.slots == [7 * 16, 4 * 16 + 4, 2 * 16]
    assert rows.new_blocks == [7, SCRATCH, 2]
    assert rows.contexts == [1, 21, 33]
    assert rows.tables == [[7, 7, 7, 7], [3, 4, 3, 3], [8, 9, 2, 8]]


def test_padding_touches_the_scratch_block_alone() -> None:
    rows = pad(micro_batch(decode(20, [3, 4])), Bucket(4, 2), PAGE_SIZE, SCRATCH)
    assert {len(column) for column in rows} == {4}
    assert rows.slots[1:] == [SCRATCH * 16] * 3
    assert rows.new_blocks[1:] == [SCRATCH] * 3
    assert rows.tables[1:] == [[SCRATCH, SCRATCH]] * 3
    assert rows.contexts[1:] == [1] * 3, "a row that sees nothing would be NaN"
    assert SCRATCH not in rows.tables[0]

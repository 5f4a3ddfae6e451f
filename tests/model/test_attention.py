"""Paged attention against dense attention computed run by run."""

from __future__ import annotations

import random

import pytest
import torch

from fullbore.model.attention import AttentionMetadata, paged_attention
from fullbore.model.kv_cache import KVCache
from fullbore.scheduler.micro_batch import MicroBatch, Run

PAGE_SIZE = 8
NUM_BLOCKS = 160
FIRST_LAYER = 5
SCALE = 0.3


def make_cache(
    num_heads: int = 2, k_head_dim: int = 12, v_head_dim: int = 12, garbage: float = float("nan")
) -> KVCache:
    """Two layers full of garbage: what is read without having been written shows, even if it is multiplied by 0."""
    cache = KVCache(
        FIRST_LAYER, 2, NUM_BLOCKS, num_heads, PAGE_SIZE, k_head_dim, v_head_dim, dtype=torch.float32, device="cpu"
    )
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(garbage)
    return cache


class Sequences:
    """Keys and values of every request, dense, and the blocks that hold them."""

    def __init__(self, lengths: list[int], cache: KVCache, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        k_head_dim, v_head_dim = cache.keys[0].shape[-1], cache.values[0].shape[-1]
        self.keys = [torch.randn(length, cache.num_heads, k_head_dim, generator=generator) for length in lengths]
        self.values = [torch.randn(length, cache.num_heads, v_head_dim, generator=generator) for length in lengths]
        free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        # One block more than needed, as when the driver reserves ahead.
        self.block_ids = [[free.pop() for _ in range(length // PAGE_SIZE + 2)] for length in lengths]

    def micro_batch(self, parts: list[tuple[int, int, int]]) -> MicroBatch:
        """Runs from (request, start, number of tokens)."""
        runs = [Run(who, 0, start, [0] * count, self.block_ids[who], None) for who, start, count in parts]
        return MicroBatch(0, runs, "slot-freed", 0.0)

    def new(self, dense: list[torch.Tensor], parts: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([dense[who][start : start + count] for who, start, count in parts])


def expect(query: torch.Tensor, sequences: Sequences, parts: list[tuple[int, int, int]]) -> torch.Tensor:
    """Dense attention in float64."""
    outputs, row = [], 0
    for who, start, count in parts:
        for position in range(start, start + count):
            keys = sequences.keys[who][: position + 1].double()
            values = sequences.values[who][: position + 1].double()
            share = query.shape[1] // keys.shape[1]
            keys, values = (tensor.repeat_interleave(share, dim=1) for tensor in (keys, values))
            scores = torch.einsum("hd,thd->ht", query[row].double(), keys) * SCALE
            outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
            row += 1
    return torch.stack(outputs).float()


def run(
    cache: KVCache, sequences: Sequences, parts: list[tuple[int, int, int]], num_query_heads: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What paged attention gives for the parts, and what it should."""
    metadata = AttentionMetadata.build(sequences.micro_batch(parts), cache)
    keys, values = sequences.new(sequences.keys, parts), sequences.new(sequences.values, parts)
    query = torch.randn(len(keys), num_query_heads, keys.shape[2], generator=torch.Generator().manual_seed(9))
    output = paged_attention(query, keys, values, layer, cache, metadata, SCALE)
    return output, expect(query, sequences, parts)


@pytest.mark.parametrize(
    ("num_query_heads", "num_heads", "k_head_dim", "v_head_dim"),
    [(6, 2, 12, 12), (4, 4, 16, 16), (4, 1, 8, 8), (3, 3, 20, 12)],
    ids=["grouped", "multi-head", "multi-query", "latent-expanded"],
)
def test_prefill_and_decode_of_many_requests_mixed(
    num_query_heads: int, num_heads: int, k_head_dim: int, v_head_dim: int
) -> None:
    cache = make_cache(num_heads, k_head_dim, v_head_dim)
    sequences = Sequences([300, 40, 40, 17, 9, 1, 150], cache)
    steps = [
        [(0, 0, 298), (1, 0, 39)],  # two whole prompts
        [(0, 298, 1), (2, 0, 7), (1, 39, 1), (5, 0, 1)],  # decodes of lengths far apart, a prefill, a one-token prompt
        [(2, 7, 20), (3, 0, 16), (0, 299, 1), (6, 0, 149)],  # a chunk in the middle of a prompt between others
        [(3, 16, 1), (6, 149, 1)],  # decodes only
        [(4, 0, 8), (2, 27, 1)],
        [(2, 28, 12), (4, 8, 1)],  # a chunk that ends at the end of a block
    ]
    for parts in steps:
        for layer in (FIRST_LAYER, FIRST_LAYER + 1):
            output, expected = run(cache, sequences, parts, num_query_heads, layer)
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_what_the_whole_prompt_gives(chunk: int) -> None:
    cache = make_cache()
    sequences = Sequences([130], cache)
    whole, _ = run(cache, sequences, [(0, 0, 130)], 6, FIRST_LAYER)
    query = torch.randn(130, 6, 12, generator=torch.Generator().manual_seed(9))
    for start in range(0, 130, chunk):
        part = [(0, start, min(chunk, 130 - start))]
        metadata = AttentionMetadata.build(sequences.micro_batch(part), cache)
        keys, values = sequences.new(sequences.keys, part), sequences.new(sequences.values, part)
        output = paged_attention(query[start : start + chunk], keys, values, FIRST_LAYER + 1, cache, metadata, SCALE)
        torch.testing.assert_close(output, whole[start : start + chunk], atol=2e-5, rtol=1e-4)


def test_only_the_new_tokens_slots_of_the_layer_are_written() -> None:
    cache = make_cache(garbage=1e6)
    sequences = Sequences([30, 12], cache)
    run(cache, sequences, [(0, 0, 30), (1, 0, 11)], 2, FIRST_LAYER)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    run(cache, sequences, [(1, 11, 1)], 2, FIRST_LAYER)
    after = [*cache.keys, *cache.values]
    block, offset = sequences.block_ids[1][11 // PAGE_SIZE], 11 % PAGE_SIZE
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = (old != new).any(-1).nonzero()
        own = [[block, head, offset] for head in range(2)] if index in (0, 2) else []
        assert changed.tolist() == own


def test_a_new_block_is_cleared_behind_its_first_tokens() -> None:
    cache = make_cache(garbage=1e6)
    sequences = Sequences([3 * PAGE_SIZE], cache)
    for start, count in [(0, PAGE_SIZE + 1), (PAGE_SIZE + 1, 1), (PAGE_SIZE + 2, PAGE_SIZE - 2)]:
        run(cache, sequences, [(0, start, count)], 2, FIRST_LAYER)
    full, cleared, untouched = (cache.keys[0][block] for block in sequences.block_ids[0][:3])
    run(cache, sequences, [(0, 2 * PAGE_SIZE, 1)], 2, FIRST_LAYER)
    assert not (full == 0).all(-1).any()
    assert not (cleared == 0).all(-1).any(), "filled by later runs, which leave the tokens before alone"
    assert (untouched[:, 1:] == 0).all()


def test_decodes_attend_together_unless_one_context_is_far_longer() -> None:
    cache = make_cache()
    sequences = Sequences([20, 100, 120, 500], cache)
    parts = [(0, 19, 1), (1, 99, 1), (2, 119, 1), (3, 499, 1)]
    metadata = AttentionMetadata.build(sequences.micro_batch(parts), cache)
    assert [(group.num_runs, group.context_length) for group in metadata.decodes] == [(3, 120), (1, 500)]


def test_block_bytes_is_what_a_block_takes() -> None:
    cache = make_cache(num_heads=3, k_head_dim=20, v_head_dim=12)
    allocated = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert KVCache.block_bytes(2, 3, PAGE_SIZE, 20, 12, torch.float32) * NUM_BLOCKS == allocated

"""Attention of one micro-batch over the paged KV cache: prefill chunks and decodes of many requests in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from fullbore.model.kv_cache import KVCache
from fullbore.scheduler.micro_batch import MicroBatch, Run

_SMALLEST_GROUP_TOKENS = 128  # contexts up to here attend together; longer ones only with those less than twice as long


@dataclass(frozen=True)
class ChunkMetadata:
    """One run of several tokens: tokens `begin` … `end-1` of the micro-batch."""

    begin: int
    end: int
    context_length: int  # tokens of the request in the cache after this run
    block_rows: torch.Tensor | None  # None: the run starts at position 0, so that it attends to itself alone
    mask: torch.Tensor | None  # [end - begin, context_length], added to the scores


@dataclass(frozen=True)
class DecodeMetadata:
    """Runs of one token with contexts of similar length, which attend together, padded to the longest."""

    num_runs: int
    token_rows: torch.Tensor | None  # [num_runs] rows of the micro-batch; None: all of them
    context_length: int  # the longest
    block_rows: torch.Tensor
    mask: torch.Tensor | None  # [num_runs, 1, 1, context_length], added to the scores; None: all are as long


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a micro-batch's tokens go in the cache and what each may see. Built once, used by every layer."""

    new_block_rows: torch.Tensor | None  # blocks that get their first tokens and are not filled; None: there are none
    slot_rows: torch.Tensor
    chunks: list[ChunkMetadata]
    decodes: list[DecodeMetadata]

    @classmethod
    def build(cls, micro_batch: MicroBatch, cache: KVCache) -> AttentionMetadata:
        """Tensors are made on the cache's device, masks in its number type."""
        keys = cache.keys[0]
        slots: list[int] = []
        new_blocks: list[int] = []
        chunks: list[ChunkMetadata] = []
        groups: dict[int, list[tuple[int, Run]]] = {}  # upper bound of the context length -> (token row, run)
        for run in micro_batch.runs:
            row = len(slots)
            slots += _slots(run, cache.page_size)
            new_blocks += _new_blocks(run, cache.page_size)
            if len(run.token_ids) == 1:
                bound = max(_SMALLEST_GROUP_TOKENS, 1 << run.start.bit_length())
                groups.setdefault(bound, []).append((row, run))
            else:
                chunks.append(_build_chunk(row, run, cache))
        decodes = [_build_decodes(group, len(slots), cache) for group in groups.values()]
        new_block_rows = cache.block_rows(torch.tensor([new_blocks], device=keys.device)) if new_blocks else None
        return cls(new_block_rows, cache.slot_rows(torch.tensor(slots, device=keys.device)), chunks, decodes)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Stores the new keys and values of a layer, then lets every token attend to its request up to itself.

    Args:
        query: [tokens, num_query_heads, k_head_dim], any strides.
        key, value: [tokens, num_heads, k_head_dim or v_head_dim] of the new tokens.
        layer: global index.
        scale: factor of the scores.

    Returns:
        [tokens, num_query_heads, v_head_dim]
    """
    if metadata.new_block_rows is not None:
        cache.clear(layer, metadata.new_block_rows)
    cache.write(layer, metadata.slot_rows, key, value)
    if not metadata.chunks and len(metadata.decodes) == 1:
        return _attend_decodes(query, layer, cache, metadata.decodes[0], scale)
    output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    for chunk in metadata.chunks:
        own = slice(chunk.begin, chunk.end)
        output[own] = _attend_chunk(query[own], key[own], value[own], layer, cache, chunk, scale)
    for decodes in metadata.decodes:
        assert decodes.token_rows is not None
        attended = _attend_decodes(query[decodes.token_rows], layer, cache, decodes, scale)
        output.index_copy_(0, decodes.token_rows, attended)
    return output


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    cache: KVCache,
    chunk: ChunkMetadata,
    scale: float,
) -> torch.Tensor:
    if chunk.block_rows is None:
        keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    else:
        keys, values = cache.gather(layer, chunk.block_rows, num_runs=1)
        keys, values = keys[:, :, : chunk.context_length], values[:, :, : chunk.context_length]
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended[0].transpose(0, 1)


def _attend_decodes(
    query: torch.Tensor, layer: int, cache: KVCache, decodes: DecodeMetadata, scale: float
) -> torch.Tensor:
    keys, values = cache.gather(layer, decodes.block_rows, decodes.num_runs)
    keys, values = keys[:, :, : decodes.context_length], values[:, :, : decodes.context_length]
    # The query heads that share a key head act as its query tokens: each key is read once.
    grouped = query.reshape(decodes.num_runs, cache.num_heads, -1, query.shape[2])
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=decodes.mask, scale=scale)
    return attended.reshape(decodes.num_runs, query.shape[1], -1)


def _slots(run: Run, page_size: int) -> list[int]:
    """The cache slot of each token of the run."""
    return [
        run.block_ids[position // page_size] * page_size + position % page_size
        for position in range(run.start, run.start + len(run.token_ids))
    ]


def _new_blocks(run: Run, page_size: int) -> list[int]:
    """The block, if there is one, whose first tokens this run writes but not its last ones."""
    end = run.start + len(run.token_ids)
    begin_of_last = end - end % page_size
    return [run.block_ids[end // page_size]] if run.start <= begin_of_last < end else []


def _build_chunk(begin: int, run: Run, cache: KVCache) -> ChunkMetadata:
    num_tokens = len(run.token_ids)
    context_length = run.start + num_tokens
    if run.start == 0:
        return ChunkMetadata(begin, begin + num_tokens, context_length, None, None)
    keys = cache.keys[0]
    num_blocks = -(-context_length // cache.page_size)
    block_table = torch.tensor([run.block_ids[:num_blocks]], device=keys.device)
    hidden = torch.full((num_tokens, context_length), float("-inf"), dtype=keys.dtype, device=keys.device)
    mask = hidden.triu_(run.start + 1)
    return ChunkMetadata(begin, begin + num_tokens, context_length, cache.block_rows(block_table), mask)


def _build_decodes(group: list[tuple[int, Run]], num_tokens: int, cache: KVCache) -> DecodeMetadata:
    keys = cache.keys[0]
    lengths = [run.start + 1 for _, run in group]
    longest = max(lengths)
    num_blocks = -(-longest // cache.page_size)
    tables = [run.block_ids[: -(-length // cache.page_size)] for length, (_, run) in zip(lengths, group, strict=True)]
    # The mask hides the padding, but multiplies it by 0, and 0 * NaN is NaN: none but the request's own blocks will do.
    padded = [table + table[:1] * (num_blocks - len(table)) for table in tables]
    block_table = torch.tensor(padded, device=keys.device)
    mask = None
    if min(lengths) < longest:
        is_hidden = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=keys.dtype).masked_fill_(is_hidden, float("-inf")).to(keys.device)
        mask = mask[:, None, None]
    covers_all = len(group) == num_tokens
    token_rows = None if covers_all else torch.tensor([row for row, _ in group], device=keys.device)
    return DecodeMetadata(len(group), token_rows, longest, cache.block_rows(block_table), mask)

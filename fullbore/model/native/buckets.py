"""Which CUDA graph a decode micro-batch runs in, and its plan padded to that graph's fixed shapes. No torch in here.

A graph repeats the same operations on the same addresses, so there is one for each of a few sizes, and a micro-batch
takes the smallest that it fits into. Rows that only fill up belong to no request: they read and write a scratch block
of the KV cache that nobody else has, and what they compute is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from fullbore.scheduler.micro_batch import MicroBatch

_FIRST_CONTEXT_TOKENS = 512  # contexts up to here share their graphs; the next reach four times as far, and so on
_CONTEXT_FACTOR = 4
_MOST_GATHERED_TOKENS = 65_536  # requests times context: longer ones run eagerly, which groups them by length


class Bucket(NamedTuple):
    """The fixed shapes of one graph."""

    requests: int
    blocks: int  # KV blocks of each request that attention can read


class DecodeRows(NamedTuple):
    """A decode micro-batch in the shapes of a bucket; one entry per row in each list."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]  # where the token's keys and values go: block * page_size + offset
    new_blocks: list[int]  # the block that gets its first token now, otherwise the scratch block
    contexts: list[int]  # tokens of the request in the cache after this step
    tables: list[list[int]]  # `bucket.blocks` each


def request_counts(most_requests: int) -> list[int]:
    """1, 2, 4, 8, 16, and from there on halfway between as well: 24, 32, 48, 64, … `most_requests`."""
    counts = []
    power = 1
    while power < most_requests:
        counts += [power, power * 3 // 2] if power >= 16 else [power]
        power *= 2
    return [count for count in counts if count < most_requests] + [most_requests]


def make_buckets(most_requests: int, context_tokens: int, page_size: int, *, gathers: bool) -> list[Bucket]:
    """All buckets, the smallest first.

    Args:
        most_requests: in one micro-batch.
        context_tokens: of the longest request.
        gathers: attention copies the blocks of every request side by side, so that a graph's time and memory go with
            `blocks`; otherwise one context length is enough for all.
    """
    longest = ceil(context_tokens / page_size)
    if not gathers:
        return [Bucket(requests, longest) for requests in request_counts(most_requests)]
    widths = []
    tokens = _FIRST_CONTEXT_TOKENS
    while tokens < context_tokens:
        widths.append(ceil(tokens / page_size))
        tokens *= _CONTEXT_FACTOR
    return [
        Bucket(requests, blocks)
        for requests in request_counts(most_requests)
        for blocks in dict.fromkeys([*widths, longest])
        if requests * blocks * page_size <= _MOST_GATHERED_TOKENS
    ]


def is_decode(micro_batch: MicroBatch) -> bool:
    """Whether every run has one token: nothing to prefill but, perhaps, a prompt of one token."""
    return all(len(run.token_ids) == 1 for run in micro_batch.runs)


def choose_bucket(buckets: Sequence[Bucket], micro_batch: MicroBatch, page_size: int) -> Bucket | None:
    """The smallest that a decode micro-batch fits into; None: there is none.

    Args:
        buckets: the smallest first, as `make_buckets` gives them.
    """
    requests = len(micro_batch.runs)
    blocks = max(run.start for run in micro_batch.runs) // page_size + 1
    return next((bucket for bucket in buckets if bucket.requests >= requests and bucket.blocks >= blocks), None)


def pad(micro_batch: MicroBatch, bucket: Bucket, page_size: int, scratch_block: int) -> DecodeRows:
    """A decode micro-batch that fits into `bucket`, filled up with rows that only use the scratch block."""
    rows = DecodeRows([], [], [], [], [], [])
    for run in micro_batch.runs:
        block = run.block_ids[run.start // page_size]
        in_use = run.block_ids[: run.start // page_size + 1]
        rows.token_ids.append(run.token_ids[0])
        rows.positions.append(run.start)
        rows.slots.append(block * page_size + run.start % page_size)
        rows.new_blocks.append(scratch_block if run.start % page_size else block)
        rows.contexts.append(run.start + 1)
        # What lies behind the context is multiplied by 0, and 0 * NaN is NaN: only the request's own blocks will do.
        rows.tables.append(in_use + in_use[:1] * (bucket.blocks - len(in_use)))
    for _ in range(bucket.requests - len(micro_batch.runs)):
        rows.token_ids.append(0)
        rows.positions.append(0)
        rows.slots.append(scratch_block * page_size)
        rows.new_blocks.append(scratch_block)
        rows.contexts.append(1)
        rows.tables.append([scratch_block] * bucket.blocks)
    return rows

"""Where the keys and values of a micro-batch lie, in the form that FlashInfer's kernels read. No torch in here.

Request r's pages (KV blocks) are `indices[indptr[r] : indptr[r + 1]]`, the last of which holds `last_page_len[r]`
tokens, 1 to the page size; its new tokens are `qo_indptr[r]` … `qo_indptr[r + 1] - 1` of the micro-batch.
https://docs.flashinfer.ai/tutorials/kv_layout.html
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from fullbore.model.native.buckets import DecodeRows
from fullbore.scheduler.micro_batch import MicroBatch


class PagedMetadata(NamedTuple):
    """For `n` requests."""

    qo_indptr: list[int]  # [n + 1]
    indptr: list[int]  # [n + 1]
    indices: list[int]  # [indptr[n]]
    last_page_len: list[int]  # [n]


def of_micro_batch(micro_batch: MicroBatch, page_size: int) -> PagedMetadata:
    """Contexts are those after the runs' own tokens are stored. Blocks held in reserve are left out."""
    return _build(
        ((len(run.token_ids), run.start + len(run.token_ids), run.block_ids) for run in micro_batch.runs), page_size
    )


def of_rows(rows: DecodeRows, page_size: int) -> PagedMetadata:
    """Of a padded decode micro-batch: what fills a table up to its width is left out, padding rows are requests."""
    return _build(((1, context, table) for context, table in zip(rows.contexts, rows.tables, strict=True)), page_size)


def _build(requests: Iterable[tuple[int, int, list[int]]], page_size: int) -> PagedMetadata:
    """From each request's number of new tokens, tokens in the cache, and blocks."""
    lengths: list[int] = []
    num_pages: list[int] = []
    indices: list[int] = []
    last_page_len: list[int] = []
    for length, context, blocks in requests:
        pages = -(-context // page_size)
        lengths.append(length)
        num_pages.append(pages)
        indices += blocks[:pages]
        last_page_len.append(context - (pages - 1) * page_size)
    return PagedMetadata([0, *accumulate(lengths)], [0, *accumulate(num_pages)], indices, last_page_len)

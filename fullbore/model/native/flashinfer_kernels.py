"""Attention by FlashInfer, which reads the KV blocks where they lie; everything else as TorchKernels.

Used on NVIDIA GPUs where `pip install fullbore[flashinfer]` put it and it passes a check against torch's attention;
FULLBORE_FLASHINFER=0 does without. Written for FlashInfer 0.7 (https://docs.flashinfer.ai). Our blocks
[block, head, page_size, dim] are what it calls the HND layout.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.buckets import Bucket, DecodeRows, is_decode
from fullbore.model.native.kernels import Batch, HeadShape
from fullbore.model.native.paged_metadata import PagedMetadata, of_micro_batch, of_rows
from fullbore.model.native.torch_kernels import StaticBatch, TorchKernels
from fullbore.scheduler.micro_batch import MicroBatch, Run

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
_BACKEND = "fa2"  # runs on all GPUs since Ampere and takes any number of query heads per key head
_TOLERANCE = 0.03  # of the largest value, in 16 bits, when checked against torch


@dataclass(frozen=True)
class FlashInferBatch:
    """Tensors on the cache's device, and the wrapper that has planned the attention of this micro-batch."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slot_rows: torch.Tensor
    wrapper: Any
    num_tokens: int
    longest_context: int


class FlashInferStaticBatch:
    """See `StaticBatch`. The wrapper keeps its part in tensors that stay where they are as well."""

    def __init__(self, kernels: FlashInferKernels, bucket: Bucket, cache: KVCache, longest_context: int) -> None:
        self._kernels = kernels
        self._cache = cache
        self._longest_context = longest_context
        self._integers = torch.zeros(3, bucket.requests, dtype=torch.int64, device=cache.keys[0].device)
        self._wrapper = kernels.graph_wrapper(bucket)

    def fill(self, rows: DecodeRows) -> None:
        columns = [rows.token_ids, rows.positions, rows.slots]
        host = torch.tensor(columns, dtype=torch.int64, pin_memory=self._integers.is_cuda)
        self._integers.copy_(host, non_blocking=True)
        self._kernels.plan_decode(self._wrapper, of_rows(rows, self._cache.page_size), self._cache.page_size)

    def batch(self) -> Batch:
        token_ids, positions, slots = self._integers.unbind()
        slot_rows = self._cache.slot_rows(slots)
        return FlashInferBatch(token_ids, positions, slot_rows, self._wrapper, len(token_ids), self._longest_context)


class FlashInferKernels(TorchKernels):
    """See `Kernels`.

    Args:
        flashinfer: the module.
    """

    gathers = False

    def __init__(self, dtype: torch.dtype, device: str, shape: HeadShape, flashinfer: Any) -> None:
        super().__init__(dtype, device)
        self._device = device
        self._shape = shape
        self._flashinfer = flashinfer
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)  # pages of all requests, for graphs
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=True, backend=_BACKEND
        )
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=_BACKEND)

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Batch:
        runs, page_size = micro_batch.runs, cache.page_size
        metadata = of_micro_batch(micro_batch, page_size)
        wrapper = self._decode if is_decode(micro_batch) else self._prefill
        if wrapper is self._decode:
            self.plan_decode(wrapper, metadata, page_size)
        else:
            self._plan_prefill(metadata, page_size)
        positions = [p for run in runs for p in range(run.start, run.start + len(run.token_ids))]
        slots = [
            run.block_ids[p // page_size] * page_size + p % page_size
            for run in runs
            for p in range(run.start, run.start + len(run.token_ids))
        ]
        return FlashInferBatch(
            torch.tensor([token_id for run in runs for token_id in run.token_ids], device=self._device),
            torch.tensor(positions, device=self._device),
            cache.slot_rows(torch.tensor(slots, device=self._device)),
            wrapper,
            len(positions),
            max(run.start + len(run.token_ids) for run in runs),
        )

    def static_batch(self, bucket: Bucket, cache: KVCache, longest_context: int) -> StaticBatch:
        return FlashInferStaticBatch(self, bucket, cache, longest_context)

    def graph_wrapper(self, bucket: Bucket) -> Any:
        """For decode micro-batches in one bucket; a graph may hold its `run`."""
        if len(self._indices) < bucket.requests * bucket.blocks:  # the largest bucket comes first
            self._indices = torch.zeros(bucket.requests * bucket.blocks, dtype=torch.int32, device=self._device)
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(bucket.requests + 1, dtype=torch.int32, device=self._device),
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=torch.zeros(bucket.requests, dtype=torch.int32, device=self._device),
            backend=_BACKEND,
        )

    def plan_decode(self, wrapper: Any, metadata: PagedMetadata, page_size: int) -> None:
        """Divides the work of a decode micro-batch; on the host, so outside of any graph."""
        _, indptr, indices, last_page_len = map(_int32, metadata)
        wrapper.plan(indptr, indices, last_page_len, *self._sizes(page_size), **self._types())

    def _plan_prefill(self, metadata: PagedMetadata, page_size: int) -> None:
        qo_indptr, indptr, indices, last_page_len = map(_int32, metadata)
        # The last token of a run sees the whole context, those before it correspondingly less: FlashInfer's "causal".
        self._prefill.plan(
            qo_indptr, indptr, indices, last_page_len, *self._sizes(page_size), causal=True, **self._types()
        )

    def _sizes(self, page_size: int) -> tuple[int, int, int, int]:
        return self._shape.heads, self._shape.kv_heads, self._shape.dim, page_size

    def _types(self) -> dict[str, Any]:
        dtype = self.compute_dtype
        return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": self._shape.dim**-0.5}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Any,
        cache: KVCache,
        scale: float,
    ) -> torch.Tensor:
        cache.write(layer, batch.slot_rows, key, value)
        index = layer - cache.first_layer
        attended: torch.Tensor = batch.wrapper.run(query, (cache.keys[index], cache.values[index]))
        return attended


def make_flashinfer_kernels(dtype: torch.dtype, device: str, shape: HeadShape) -> FlashInferKernels | None:
    """None where FlashInfer is not installed, cannot do it, or does it wrong, which is said once.

    The first use on a machine may compile for minutes, unless its kernels came with it.
    """
    if dtype not in (torch.float16, torch.bfloat16) or shape.dim not in _HEAD_DIMS or not device.startswith("cuda"):
        return None
    if os.environ.get("FULLBORE_FLASHINFER") == "0":
        return None
    try:
        import flashinfer
    except ModuleNotFoundError:
        return None
    except Exception as error:  # its libraries do not fit this machine
        _say_without(error)
        return None
    try:
        kernels = FlashInferKernels(dtype, device, shape, flashinfer)
        difference = difference_from_torch(kernels, dtype, device, shape)
    except Exception as error:  # no compiler for its kernels, a GPU that it does not know, another version
        _say_without(error)
        return None
    if not difference < _TOLERANCE:
        _say_without(f"its attention differs from torch's by {difference:.2g} of the largest value")
        return None
    return kernels


@torch.inference_mode()
def difference_from_torch(kernels: FlashInferKernels, dtype: torch.dtype, device: str, shape: HeadShape) -> float:
    """Largest difference of attention outputs, as a share of the largest value: prompts, then decodes beside a prompt,
    then decodes alone."""
    reference = TorchKernels(dtype, device)
    caches = [KVCache(0, 1, 8, shape.kv_heads, 16, shape.dim, shape.dim, dtype, device) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for parts in ([(0, 0, 20), (1, 0, 33)], [(0, 20, 1), (2, 0, 7), (1, 33, 5)], [(2, 7, 1), (0, 21, 1), (1, 38, 1)]):
        tables = [[5, 2], [0, 7, 3], [4]]
        runs = [Run(who, 0, start, [0] * count, tables[who], None) for who, start, count in parts]
        micro_batch = MicroBatch(-1, runs, "slot-freed", 0.0)
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.randn(micro_batch.num_tokens, heads, shape.dim, generator=generator).to(device, dtype)
        query, key, value = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        outputs = [
            each.attend(
                query.contiguous(), key, value, 0, each.prepare(micro_batch, kv_cache), kv_cache, shape.dim**-0.5
            ).float()
            for each, kv_cache in zip((kernels, reference), caches, strict=True)
        ]
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()))
    return worst


def _say_without(reason: Exception | str) -> None:
    text = " ".join(str(reason).split()) or type(reason).__name__
    print(f"FlashInfer cannot be used ({text[:300]}); attention by torch.", file=sys.stderr, flush=True)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)

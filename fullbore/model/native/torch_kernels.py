"""The native decoder's operations in torch: on a GPU, in float16, and on a CPU without a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import rms_norm, silu

from fullbore.model.attention import AttentionMetadata, DecodeMetadata, paged_attention
from fullbore.model.kv_cache import KVCache
from fullbore.model.native.buckets import Bucket, DecodeRows
from fullbore.model.native.kernels import Batch, HeadShape, LayerWeights, Linear, Rotary
from fullbore.scheduler.micro_batch import MicroBatch


@dataclass(frozen=True)
class TorchBatch:
    """Tensors on the cache's device."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    metadata: AttentionMetadata
    num_tokens: int
    longest_context: int

    @classmethod
    def build(cls, micro_batch: MicroBatch, cache: KVCache) -> TorchBatch:
        device = cache.keys[0].device
        token_ids = [token_id for run in micro_batch.runs for token_id in run.token_ids]
        positions = [p for run in micro_batch.runs for p in range(run.start, run.start + len(run.token_ids))]
        return cls(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            AttentionMetadata.build(micro_batch, cache),
            len(positions),
            max(run.start + len(run.token_ids) for run in micro_batch.runs),
        )


class StaticBatch(Protocol):
    """A decode micro-batch in the shapes of a bucket, in tensors that stay where they are: what a CUDA graph reads."""

    def fill(self, rows: DecodeRows) -> None:
        """Takes over what was padded for the bucket."""
        ...

    def batch(self) -> Batch:
        """What the layers need, made from the tensors by operations on the device alone, so that a graph holds them."""
        ...


class TorchStaticBatch:
    """See `StaticBatch`.

    Args:
        longest_context: of any request in any bucket, in tokens.
    """

    def __init__(self, bucket: Bucket, cache: KVCache, longest_context: int) -> None:
        requests, blocks = bucket
        keys = cache.keys[0]
        self._cache = cache
        self._dtype = keys.dtype
        self._longest_context = longest_context
        # All in one piece, so that filling it is one copy to the device.
        sizes = [requests] * (len(DecodeRows._fields) - 1) + [requests * blocks]
        self._integers = torch.zeros(sum(sizes), dtype=torch.int64, device=keys.device)
        *columns, tables = torch.split(self._integers, sizes)
        self._token_ids, self._positions, self._slots, self._new_blocks, self._contexts = columns
        self._tables = tables.view(requests, blocks)

    def fill(self, rows: DecodeRows) -> None:
        values = [value for column in rows[:-1] for value in column]
        for table in rows.tables:
            values += table
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self._integers.is_cuda)
        self._integers.copy_(host, non_blocking=True)  # torch keeps pinned memory until the copy is done

    def batch(self) -> Batch:
        cache = self._cache
        requests, blocks = self._tables.shape
        context_length = blocks * cache.page_size
        offsets = torch.arange(context_length, device=self._tables.device)
        is_hidden = offsets[None] >= self._contexts[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=is_hidden.device)
        mask = mask.masked_fill_(is_hidden, float("-inf"))[:, None, None]
        decodes = DecodeMetadata(requests, None, context_length, cache.block_rows(self._tables), mask)
        new_block_rows = cache.block_rows(self._new_blocks[None])
        metadata = AttentionMetadata(new_block_rows, cache.slot_rows(self._slots), [], [decodes])
        return TorchBatch(self._token_ids, self._positions, metadata, requests, self._longest_context)


class TorchKernels:
    """See `Kernels`. On a CPU, weights are packed by oneDNN where it is there: 1.1 to 2.6 times as fast."""

    gathers = True  # attention copies the blocks of requests side by side

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.compute_dtype = dtype
        self._packs = device == "cpu" and _onednn_packs(dtype)

    def weight_dtype(self, file_dtypes: set[torch.dtype]) -> torch.dtype:
        return self.compute_dtype

    def packed_bytes(self, outputs: int, inputs: int, dtype: torch.dtype, *, is_gated: bool = False) -> int:
        return outputs * (2 if is_gated else 1) * inputs * dtype.itemsize

    def reserve(self, num_bytes: int) -> None:
        pass

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool = False, in_rows: bool = False
    ) -> Linear:
        outputs, inputs = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        if self._packs and not in_rows:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return Linear(weight, bias, outputs, inputs)

    def rows(self, linear: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        return linear.weight[token_ids]

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return _linear(linear, x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight, epsilon)

    def layers(self, layers: Sequence[LayerWeights], shape: HeadShape, epsilon: float) -> TorchLayers:
        return TorchLayers(layers, shape, epsilon, self.attend)

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Batch:
        return TorchBatch.build(micro_batch, cache)

    def static_batch(self, bucket: Bucket, cache: KVCache, longest_context: int) -> StaticBatch:
        """For a CUDA graph; see graphs.py."""
        return TorchStaticBatch(bucket, cache, longest_context)

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
        """Stores keys and values and attends. query: [tokens, heads, dim], contiguous; key and value with their heads.

        Returns [tokens, heads, dim].
        """
        return paged_attention(query, key, value, layer, cache, batch.metadata, scale)


class TorchLayers:
    """See `Layers`."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        shape: HeadShape,
        epsilon: float,
        attend: Callable[..., torch.Tensor],
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._epsilon = epsilon
        self._attend = attend  # of the kernels

    def forward(self, hidden: torch.Tensor, batch: Any, rotary: Rotary, cache: KVCache) -> None:
        cosines = rotary.cosines[batch.positions, None].to(hidden.dtype)
        sines = rotary.sines[batch.positions, None].to(hidden.dtype)
        for index, layer in enumerate(self._layers, start=cache.first_layer):
            qkv = _linear(layer.qkv, self._norm(hidden, layer.attention_norm))
            query, key, value = self._rotated(layer, qkv, cosines, sines)
            attended = self._attend(query, key, value, index, batch, cache, self._shape.dim**-0.5)
            hidden += _linear(layer.output, attended.reshape(batch.num_tokens, -1))
            gate, up = _linear(layer.gate_up, self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden += _linear(layer.down, silu(gate).mul_(up))

    def _rotated(
        self, layer: LayerWeights, qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [tokens, heads, dim], the first two normed, where the model does so, and rotated."""
        shape = self._shape
        heads = qkv.view(len(qkv), -1, shape.dim)
        query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        return _rotate(query, cosines, sines), _rotate(key, cosines, sines), value

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self._epsilon)


def _linear(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    if linear.weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "none", [], "")
        return y
    return plain_linear(x, linear.weight, linear.bias)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + dim / 2) of every head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _onednn_packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and bool(torch._C._has_mkldnn)

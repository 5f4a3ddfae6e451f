"""The layers of a stage as the C++ code reads them (cpp/layers.h): weights, the plan, and one call for all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.kernels import HeadShape, LayerWeights, Linear, Rotary
from fullbore.scheduler.micro_batch import MicroBatch

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
STORE, ADD, GATE = range(3)  # what happens to a linear layer's sums; enum Epilogue in linear.h

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MatrixStruct(ctypes.Structure):
    """A linear layer's packed weights."""

    _fields_ = (("weights", _POINTER), ("bias", _POINTER), ("type", _LONG), ("inputs", _LONG), ("outputs", _LONG))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("keys", _POINTER),
        ("values", _POINTER),
    )


class ShapeStruct(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("hidden_size", "heads", "kv_heads", "dim", "page_size", "cache_type")),
        ("epsilon", _FLOAT),
        ("scale", _FLOAT),
    )


class BatchStruct(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("tokens", "runs", "most_blocks")),
        *((name, _POINTER) for name in ("positions", "slots", "begins", "lengths", "contexts", "tables")),
        ("cosines", _POINTER),
        ("sines", _POINTER),
    )


def matrix_struct(linear: Linear) -> MatrixStruct:
    """Valid as long as `linear`."""
    return MatrixStruct(
        linear.weight.data_ptr(), _address(linear.bias), TYPES[linear.weight.dtype], linear.inputs, linear.outputs
    )


class CpuBatch:
    """A micro-batch in 32-bit integers.

    Raises:
        IndexError: it names blocks that the cache does not have; the C++ code does not look.
    """

    def __init__(self, micro_batch: MicroBatch, page_size: int, num_blocks: int) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        begins: list[int] = []
        lengths: list[int] = []
        contexts: list[int] = []
        for run in micro_batch.runs:
            length, start, block_ids = len(run.token_ids), run.start, run.block_ids
            begins.append(len(positions))
            lengths.append(length)
            contexts.append(start + length)
            token_ids += run.token_ids
            positions += range(start, start + length)
            slots += [block_ids[p // page_size] * page_size + p % page_size for p in range(start, start + length)]
        self.longest_context = max(contexts)
        most_blocks = -(-self.longest_context // page_size)
        tables = np.zeros((len(contexts), most_blocks), dtype=np.int32)
        for row, (run, context) in enumerate(zip(micro_batch.runs, contexts, strict=True)):
            in_use = -(-context // page_size)
            tables[row, :in_use] = run.block_ids[:in_use]
        if tables.min() < 0 or tables.max() >= num_blocks:
            raise IndexError(f"Micro-batch {micro_batch.id} names KV blocks beyond the {num_blocks} that there are.")
        self._tables = tables
        self._integers = np.array(token_ids + positions + slots + begins + lengths + contexts, dtype=np.int32)
        tokens, runs = len(positions), len(lengths)
        self.token_ids = torch.from_numpy(self._integers[:tokens])
        at: int = self._integers.ctypes.data
        offsets = np.cumsum([tokens, tokens, tokens, runs, runs])  # of what follows the token ids
        parts = [at + 4 * int(offset) for offset in offsets]
        self.struct = BatchStruct(tokens, runs, most_blocks, *parts, tables.ctypes.data)


class CpuLayers:
    """See `Layers`."""

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[LayerWeights], shape: HeadShape, epsilon: float, dtype: torch.dtype
    ) -> None:
        self._library = library
        self._layers = layers
        self._shape = shape
        self._epsilon = epsilon
        self._cache_type = TYPES[dtype]
        self._cache: KVCache | None = None  # whose addresses are in the structures

    def forward(self, hidden: torch.Tensor, batch: CpuBatch, rotary: Rotary, cache: KVCache) -> None:
        self._meet(cache)
        struct = self._with_angles(batch, rotary)
        self._library.fb_run_layers(
            self._layer_structs, len(self._layers), ctypes.byref(self._shape_struct), ctypes.byref(struct),
            hidden.data_ptr(),
        )  # fmt: skip

    def attend(
        self, layer: int, qkv: torch.Tensor, batch: CpuBatch, rotary: Rotary, cache: KVCache, out: torch.Tensor
    ) -> None:
        """A part of `forward`, for tests: [tokens, qkv_size] -> `out`, [tokens, heads * dim]."""
        self._meet(cache)
        struct = self._with_angles(batch, rotary)
        self._library.fb_attend(
            ctypes.byref(self._layer_structs[layer]), ctypes.byref(self._shape_struct), ctypes.byref(struct),
            qkv.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def _meet(self, cache: KVCache) -> None:
        """Writes down all addresses; they stay."""
        if cache is self._cache:
            return
        shape = self._shape
        self._shape_struct = ShapeStruct(
            self._layers[0].qkv.inputs, shape.heads, shape.kv_heads, shape.dim, cache.page_size, self._cache_type,
            self._epsilon, shape.dim**-0.5,
        )  # fmt: skip
        self._layer_structs = (LayerStruct * len(self._layers))(
            *map(_layer_struct, self._layers, cache.keys, cache.values)
        )
        self._cache = cache

    def _with_angles(self, batch: CpuBatch, rotary: Rotary) -> BatchStruct:
        """The tables may have moved since the batch was prepared."""
        batch.struct.cosines, batch.struct.sines = rotary.cosines.data_ptr(), rotary.sines.data_ptr()
        return batch.struct


def _layer_struct(layer: LayerWeights, keys: torch.Tensor, values: torch.Tensor) -> LayerStruct:
    return LayerStruct(
        *map(_address, (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)),
        *map(matrix_struct, (layer.qkv, layer.output, layer.gate_up, layer.down)),
        keys.data_ptr(),
        values.data_ptr(),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

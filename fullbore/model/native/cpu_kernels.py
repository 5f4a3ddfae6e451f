"""The native decoder's operations on the CPU, by our own C++ code (cpp/). Everything is computed in float32.

Weights stay in the checkpoint's own type where that has 16 bits, and are widened on their way into the registers: the
result is the same, bit for bit, and a step reads half the memory. With --dtype bfloat16 all weights and the KV cache
are rounded to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.kernels import AttentionWeights, Linear, Rotary
from fullbore.scheduler.micro_batch import MicroBatch

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type in kernels.cpp
_STORE, _ADD, _GATE = range(3)  # what happens to the sums; enum Epilogue in linear.h
_ALIGNMENT_BYTES = 64
_HUGE_PAGE_BYTES = 2 * 2**20

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "fb_set_threads": [_INT],
    "fb_pack": [_POINTER, _INT, _LONG, _LONG, _INT, _POINTER],
    "fb_linear": [_POINTER, _LONG, _POINTER, _INT, _POINTER, *[_LONG] * 2, _INT, _POINTER],
    "fb_rows_of_packed": [_POINTER, _INT, _LONG, _POINTER, _LONG, _POINTER],
    "fb_read": [_POINTER, _LONG],
    "fb_rms_norm": [_POINTER, _POINTER, _FLOAT, _LONG, _LONG, _POINTER],
    "fb_rotate_and_store": [
        *[_POINTER, *[_LONG] * 4, _POINTER, _POINTER, _FLOAT],
        *[_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _INT],
    ],
    "fb_attention": [
        *[_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT, *[_POINTER] * 4],
        *[*[_LONG] * 7, _FLOAT],
    ],
}


@dataclass(frozen=True)
class CpuBatch:
    """Arrays of 32-bit integers, as the C++ code reads them."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens] places in the KV cache
    begins: torch.Tensor  # [runs] row of the run's first token
    lengths: torch.Tensor  # [runs] tokens of the run
    contexts: torch.Tensor  # [runs] tokens of the request in the cache after this run
    tables: torch.Tensor  # [runs, blocks]
    num_tokens: int
    longest_context: int

    @classmethod
    def build(cls, micro_batch: MicroBatch, page_size: int, num_blocks: int) -> CpuBatch:
        """Raises IndexError for blocks that the cache does not have: the C++ code does not look."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        contexts: list[int] = []
        for run in micro_batch.runs:
            length, start = len(run.token_ids), run.start
            token_ids += run.token_ids
            if length == 1:
                positions.append(start)
                slots.append(run.block_ids[start // page_size] * page_size + start % page_size)
            else:
                own = range(start, start + length)
                positions += own
                slots += [run.block_ids[p // page_size] * page_size + p % page_size for p in own]
            lengths.append(length)
            contexts.append(start + length)
        longest = max(contexts)
        tables = np.zeros((len(contexts), -(-longest // page_size)), dtype=np.int32)
        for row, (run, context) in enumerate(zip(micro_batch.runs, contexts, strict=True)):
            in_use = -(-context // page_size)
            tables[row, :in_use] = run.block_ids[:in_use]
        if tables.min() < 0 or tables.max() >= num_blocks:
            raise IndexError(f"Micro-batch {micro_batch.id} names KV blocks beyond the {num_blocks} that there are.")
        begins = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        return cls(
            _integers(token_ids),
            _integers(positions),
            _integers(slots),
            _integers(begins),
            _integers(lengths),
            _integers(contexts),
            torch.from_numpy(tables),
            len(positions),
            longest,
        )


class CpuKernels:
    """See `Kernels`. One pool of threads serves the whole process.

    Args:
        dtype: of the KV cache, float32 or bfloat16; no weights are more precise.
    """

    compute_dtype = torch.float32

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        for name, types in _SIGNATURES.items():
            getattr(library, name).argtypes = types
        self._library = library
        self._dtype = dtype
        self._cache_type = _TYPES[dtype]
        self._has_float16 = bool(library.fb_has_float16())
        self._lanes: int = library.fb_lanes()  # floats in a vector
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_used_bytes = 0
        library.fb_set_threads(num_threads)

    # -------------------------------------------------------------------------------------------------- weights

    def weight_dtype(self, file_dtypes: set[torch.dtype]) -> torch.dtype:
        if self._dtype != torch.float32:
            return self._dtype
        if file_dtypes == {torch.bfloat16} or (file_dtypes == {torch.float16} and self._has_float16):
            return next(iter(file_dtypes))  # every value is also a float32: nothing is lost
        return torch.float32

    def packed_bytes(self, outputs: int, inputs: int, dtype: torch.dtype, *, is_gated: bool = False) -> int:
        num_bytes = self._num_panels(outputs, is_gated) * 2 * self._lanes * inputs * dtype.itemsize
        return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def reserve(self, num_bytes: int) -> None:
        self._arena = huge_pages(num_bytes)
        self._arena_used_bytes = 0

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool = False, in_rows: bool = False
    ) -> Linear:
        """Into panels of two vectors of outputs each, in a gated layer of gates and ups; see linear.h."""
        outputs, inputs = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        num_panels = self._num_panels(outputs, is_gated)
        num_bytes = self.packed_bytes(outputs, inputs, weight.dtype, is_gated=is_gated)
        room = self._arena[self._arena_used_bytes :][:num_bytes]
        self._arena_used_bytes += num_bytes
        packed = room.view(weight.dtype)[: num_panels * inputs * 2 * self._lanes]
        self._pack(weight, outputs, inputs, is_gated, packed)
        if bias is not None:
            packed_bias = torch.empty(num_panels * 2 * self._lanes)
            self._pack(bias.float(), outputs, 1, is_gated, packed_bias)
            bias = packed_bias
        return Linear(packed, bias, outputs, inputs)

    def _pack(self, weight: torch.Tensor, outputs: int, inputs: int, is_gated: bool, packed: torch.Tensor) -> None:
        assert weight.is_contiguous()
        self._library.fb_pack(
            weight.data_ptr(), _TYPES[weight.dtype], outputs, inputs, int(is_gated), packed.data_ptr()
        )

    def _num_panels(self, outputs: int, is_gated: bool) -> int:
        return -(-outputs // (self._lanes if is_gated else 2 * self._lanes))

    def rows(self, linear: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < linear.outputs:
            raise IndexError(f"There are token ids beyond the vocabulary of {linear.outputs}.")
        out = torch.empty(len(token_ids), linear.inputs)
        self._library.fb_rows_of_packed(
            linear.weight.data_ptr(),
            _TYPES[linear.weight.dtype],
            linear.inputs,
            token_ids.data_ptr(),
            len(token_ids),
            out.data_ptr(),
        )
        return out

    # ----------------------------------------------------------------------------------------------- operations

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._linear(linear, x, out, _STORE)

    def add_linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> None:
        self._linear(linear, x, residual, _ADD)

    def gated_linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._linear(linear, x, out, _GATE)

    def _linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, epilogue: int) -> torch.Tensor:
        self._library.fb_linear(
            x.data_ptr(),
            x.shape[0],
            linear.weight.data_ptr(),
            _TYPES[linear.weight.dtype],
            None if linear.bias is None else linear.bias.data_ptr(),
            linear.inputs,
            linear.outputs,
            epilogue,
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> torch.Tensor:
        self._library.fb_rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, x.shape[0], x.shape[1], out.data_ptr())
        return out

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> CpuBatch:
        return CpuBatch.build(micro_batch, cache.page_size, cache.num_blocks)

    def attend(
        self,
        qkv: torch.Tensor,
        weights: AttentionWeights,
        rotary: Rotary,
        layer: int,
        batch: CpuBatch,
        cache: KVCache,
        out: torch.Tensor,
    ) -> torch.Tensor:
        shape = weights.shape
        keys = cache.keys[layer - cache.first_layer].data_ptr()
        values = cache.values[layer - cache.first_layer].data_ptr()
        self._library.fb_rotate_and_store(
            qkv.data_ptr(),
            batch.num_tokens,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            None if weights.q_norm is None else weights.q_norm.data_ptr(),
            None if weights.k_norm is None else weights.k_norm.data_ptr(),
            weights.epsilon,
            batch.positions.data_ptr(),
            rotary.cosines.data_ptr(),
            rotary.sines.data_ptr(),
            shape.dim // 2,
            batch.slots.data_ptr(),
            cache.page_size,
            keys,
            values,
            self._cache_type,
        )
        self._library.fb_attention(
            qkv.data_ptr(),
            shape.qkv_size,
            out.data_ptr(),
            keys,
            values,
            self._cache_type,
            batch.begins.data_ptr(),
            batch.lengths.data_ptr(),
            batch.contexts.data_ptr(),
            batch.tables.data_ptr(),
            len(batch.lengths),
            batch.tables.shape[1],
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.dim,
            cache.page_size,
            shape.dim**-0.5,
        )
        return out


def _integers(values: list[int] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Fresh memory in the system's large pages, where it has them: reading weights is 1.5 times as fast from these."""
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :][:num_bytes]

"""The native decoder's operations on the CPU, by our own C++ code (cpp/). Everything is computed in float32.

Weights stay in the checkpoint's own type where that has 16 bits, and are widened on their way into the registers: the
result is the same, bit for bit, and a step reads half the memory. With --dtype bfloat16 all weights and the KV cache
are rounded to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

import torch

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.cpu_layers import STORE, TYPES, CpuBatch, CpuLayers, matrix_struct
from fullbore.model.native.kernels import HeadShape, LayerWeights, Linear
from fullbore.scheduler.micro_batch import MicroBatch

_ALIGNMENT_BYTES = 64
_HUGE_PAGE_BYTES = 2 * 2**20

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "fb_set_threads": [_INT],
    "fb_pack": [_POINTER, _INT, _LONG, _LONG, _INT, _POINTER],
    "fb_linear": [_POINTER, _POINTER, _LONG, _INT, _POINTER],
    "fb_rows_of_packed": [_POINTER, _POINTER, _LONG, _POINTER],
    "fb_rms_norm": [_POINTER, _POINTER, _FLOAT, _LONG, _LONG, _POINTER],
    "fb_attend": [_POINTER] * 5,
    "fb_run_layers": [_POINTER, _LONG, *[_POINTER] * 3],
    "fb_read": [_POINTER, _LONG],
}


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
        self._library.fb_pack(weight.data_ptr(), TYPES[weight.dtype], outputs, inputs, int(is_gated), packed.data_ptr())

    def _num_panels(self, outputs: int, is_gated: bool) -> int:
        return -(-outputs // (self._lanes if is_gated else 2 * self._lanes))

    def rows(self, linear: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < linear.outputs:
            raise IndexError(f"There are token ids beyond the vocabulary of {linear.outputs}.")
        out = torch.empty(len(token_ids), linear.inputs)
        matrix = matrix_struct(linear)
        self._library.fb_rows_of_packed(ctypes.byref(matrix), token_ids.data_ptr(), len(token_ids), out.data_ptr())
        return out

    # ----------------------------------------------------------------------------------------------- operations

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.linear_into(linear, x, torch.empty(len(x), linear.outputs), STORE)

    def linear_into(self, linear: Linear, x: torch.Tensor, out: torch.Tensor, epilogue: int) -> torch.Tensor:
        """What a layer does with its matrices: `epilogue` STORE, ADD to what is in `out`, or GATE."""
        matrix = matrix_struct(linear)
        self._library.fb_linear(ctypes.byref(matrix), x.data_ptr(), len(x), epilogue, out.data_ptr())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._library.fb_rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, x.shape[0], x.shape[1], out.data_ptr())
        return out

    def layers(self, layers: Sequence[LayerWeights], shape: HeadShape, epsilon: float) -> CpuLayers:
        return CpuLayers(self._library, layers, shape, epsilon, self._dtype)

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> CpuBatch:
        return CpuBatch(micro_batch, cache.page_size, cache.num_blocks)


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

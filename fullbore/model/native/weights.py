"""Reads a stage's weights from a checkpoint, tensor by tensor, into the layout that the kernels like.

The decoder asks for them twice, in the same order: first a SizeCounter, which only adds up, then a CheckpointReader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fullbore.model.checkpoint import Checkpoint
from fullbore.model.native.kernels import Kernels, Linear


class WeightSource(Protocol):
    """Sizes come from config.json; what the file holds must fit them."""

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm's weights."""
        ...

    def linear(
        self,
        names: list[str],
        outputs: list[int],
        inputs: int,
        *,
        has_bias: bool = False,
        is_gated: bool = False,
        in_rows: bool = False,
    ) -> Linear:
        """The matrices `<name>.weight` of one [outputs, inputs] each on top of each other, packed; see `Kernels`."""
        ...


class SizeCounter:
    """Bytes of all weights, of the largest matrix, and how often each of the names is read."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, vector_dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._vector_dtype = vector_dtype
        self.names: list[str] = []
        self.packed_bytes = 0
        self.vector_bytes = 0

    def vector(self, name: str, size: int) -> torch.Tensor:
        self.names.append(name)
        self.vector_bytes += size * self._vector_dtype.itemsize
        return torch.empty(size, device="meta")

    def linear(
        self,
        names: list[str],
        outputs: list[int],
        inputs: int,
        *,
        has_bias: bool = False,
        is_gated: bool = False,
        in_rows: bool = False,
    ) -> Linear:
        matrices = [f"{name}.weight" for name in names]
        self.names += matrices
        rows = sum(outputs) // (2 if is_gated else 1)
        dtype = self._kernels.weight_dtype({self._checkpoint.info(name).dtype for name in matrices})
        self.packed_bytes += self._kernels.packed_bytes(rows, inputs, dtype, is_gated=is_gated)
        if has_bias:
            self.names += [f"{name}.bias" for name in names]
            self.vector_bytes += sum(outputs) * self._vector_dtype.itemsize
        return Linear(torch.empty(0, device="meta"), None, rows, inputs)


class CheckpointReader:
    """Reads them. `on_progress(loaded_bytes, total_bytes)` counts bytes of the files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        vector_dtype: torch.dtype,
        device: str,
        total_bytes: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._vector_dtype = vector_dtype
        self._device = device
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._on_progress = on_progress

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._read([name], [(size,)], self._vector_dtype)

    def linear(
        self,
        names: list[str],
        outputs: list[int],
        inputs: int,
        *,
        has_bias: bool = False,
        is_gated: bool = False,
        in_rows: bool = False,
    ) -> Linear:
        matrices = [f"{name}.weight" for name in names]
        dtype = self._kernels.weight_dtype({self._checkpoint.info(name).dtype for name in matrices})
        weight = self._read(matrices, [(rows, inputs) for rows in outputs], dtype)
        bias = None
        if has_bias:
            bias = self._read([f"{name}.bias" for name in names], [(rows,) for rows in outputs], self._vector_dtype)
        return self._kernels.pack(weight, bias, is_gated=is_gated, in_rows=in_rows)

    def _read(self, names: list[str], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
        """Some tensors of the file on top of each other."""
        rows = sum(shape[0] for shape in shapes)
        stacked = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=self._device)
        for name, part in zip(names, torch.split(stacked, [shape[0] for shape in shapes]), strict=True):
            self._checkpoint.load_into(name, part)
            self._loaded_bytes += self._checkpoint.nbytes(name)
            if self._on_progress is not None:
                self._on_progress(self._loaded_bytes, self._total_bytes)
        return stacked

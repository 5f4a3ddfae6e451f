"""What the native decoder asks of a machine: layers of paged attention and MLP, and what stands before and after them.

CpuKernels computes with our own C++ code, TorchKernels with torch's operations wherever torch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullbore.model.kv_cache import KVCache
from fullbore.scheduler.micro_batch import MicroBatch


@dataclass(frozen=True)
class Linear:
    """Weights of a linear layer [outputs, inputs], laid out as the kernels that packed them like it.

    A gated one has the rows of gate and up in `weight`, and `outputs` of each.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    inputs: int


@dataclass(frozen=True)
class HeadShape:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def qkv_size(self) -> int:
        """Elements of a token's queries, keys and values, side by side."""
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclass(frozen=True)
class LayerWeights:
    """A pre-norm residual block: grouped attention, then a gated MLP. down(silu(gate(x)) * up(x))"""

    attention_norm: torch.Tensor  # [hidden_size]
    qkv: Linear
    q_norm: torch.Tensor | None  # [dim]: of each query and key before it is rotated
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear
    down: Linear


class Batch(Protocol):
    """A micro-batch made ready for all layers."""

    @property
    def token_ids(self) -> torch.Tensor: ...  # [tokens] integers

    @property
    def longest_context(self) -> int: ...  # in tokens


class Rotary(Protocol):
    """Cosines and sines [positions, dim / 2] of every position in the batch."""

    cosines: torch.Tensor
    sines: torch.Tensor


class Layers(Protocol):
    """The layers of a stage, ready to run."""

    def forward(self, hidden: torch.Tensor, batch: Any, rotary: Rotary, cache: KVCache) -> None:
        """Changes `hidden`, [tokens, hidden_size] of the kernels' dtype, in place. `batch`: what `prepare` made."""
        ...


class Kernels(Protocol):
    """Hidden states are [tokens, hidden_size] of `compute_dtype`. Results are fresh tensors."""

    compute_dtype: torch.dtype

    def weight_dtype(self, file_dtypes: set[torch.dtype]) -> torch.dtype:
        """The type in which weights are kept that have these types in the checkpoint."""
        ...

    def packed_bytes(self, outputs: int, inputs: int, dtype: torch.dtype, *, is_gated: bool = False) -> int:
        """Memory that the weights will take in `pack`."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Makes room for that much of packed weights."""
        ...

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool = False, in_rows: bool = False
    ) -> Linear:
        """Takes over the weights of a layer: [outputs, inputs], or [2 * outputs, inputs] with the gate's rows first.

        `in_rows`: rows will be asked for too, as of an embedding.
        """
        ...

    def rows(self, linear: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, a fresh tensor."""
        ...

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """x · weightᵀ + bias."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + epsilon) * weight, row by row."""
        ...

    def layers(self, layers: Sequence[LayerWeights], shape: HeadShape, epsilon: float) -> Layers:
        """Takes over the layers of a stage, in order; the cache has them in the same order."""
        ...

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Batch:
        """All that does not depend on the hidden states."""
        ...

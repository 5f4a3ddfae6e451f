"""What the native decoder asks of a machine: linear layers, norms and paged attention.

CpuKernels computes with our own C++ code, TorchKernels with torch's operations wherever torch runs.
"""

from __future__ import annotations

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
class AttentionWeights:
    """What happens to queries and keys between their projection and their meeting, besides rotation."""

    shape: HeadShape
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    epsilon: float


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


class Kernels(Protocol):
    """Hidden states are [tokens, hidden_size] of `compute_dtype`. Results may live in buffers that are used again."""

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

    def linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` = x · weightᵀ + bias."""
        ...

    def add_linear(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> None:
        """The same, added to `residual` in place."""
        ...

    def gated_linear(self, linear: Linear, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` = silu(gate(x)) * up(x): [tokens, outputs]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> torch.Tensor:
        """`out` = x / sqrt(mean(x²) + epsilon) * weight, row by row."""
        ...

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Batch:
        """All that does not depend on the hidden states."""
        ...

    def attend(
        self,
        qkv: torch.Tensor,
        weights: AttentionWeights,
        rotary: Rotary,
        layer: int,
        batch: Any,
        cache: KVCache,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Rotates queries and keys, stores keys and values, attends: [tokens, heads * dim] in `out`.

        Args:
            qkv: [tokens, qkv_size]; may be overwritten.
            layer: global index.
            batch: what `prepare` made.
        """
        ...

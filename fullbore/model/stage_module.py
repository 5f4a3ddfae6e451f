"""What a StageRunner asks of a backend: one stage's part of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fullbore.model.checkpoint import Checkpoint
from fullbore.model.kv_cache import KVCache
from fullbore.scheduler.micro_batch import MicroBatch


class StageModule(Protocol):
    """Layers `first_layer` … `first_layer + num_layers - 1`; the first stage has the embedding, the last the head."""

    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool

    def weight_bytes(self) -> int:
        """Memory of the weights, known before they are loaded; a shared one counts once."""
        ...

    def load(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Reads the stage's tensors and no others. `on_progress(loaded_bytes, total_bytes)` counts bytes of the files.

        Raises:
            ModelError: a tensor is missing, or its shape does not fit the config.
        """
        ...

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Any:
        """All that `forward` needs of a plan; does not depend on hidden states, so it can be made in advance."""
        ...

    def forward(self, prepared: Any, hidden: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of the stage before (None on the first stage) -> hidden states."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden_size] after the last layer -> float32 [rows, vocab_size]."""
        ...

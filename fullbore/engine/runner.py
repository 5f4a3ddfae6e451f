"""What a stage process asks of the model part: one stage's layers, its KV cache and, on the last stage, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from fullbore.config import EngineConfig
from fullbore.engine.messages import StageSetup
from fullbore.engine.sleep_model import is_sleep_model
from fullbore.scheduler.logprobs import MicroBatchLogprobs
from fullbore.scheduler.micro_batch import MicroBatch


class Runner(Protocol):
    """`fullbore.model.runner.StageRunner`, or a stage that only sleeps."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_block_bytes(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def used_graph(self) -> bool:
        """Whether the last `forward` came from a CUDA graph."""
        ...

    def allocate_kv(self, num_blocks: int) -> None: ...

    def prepare(self, micro_batch: MicroBatch) -> None:
        """What can be done for the next `forward` while its hidden states are still on their way."""
        ...

    def forward(self, micro_batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same; on the last stage the logits of the runs with a token due."""
        ...

    def sample(self, micro_batch: MicroBatch, logits: torch.Tensor) -> list[int | None]:
        """One token per run with a token due, in the plan's order; None: the logits are not finite."""
        ...

    def logprobs(
        self, micro_batch: MicroBatch, logits: torch.Tensor, token_ids: Sequence[int | None]
    ) -> MicroBatchLogprobs | None:
        """What the plan asks for beside the tokens; after `sample`, on the last stage. None: it asks for nothing."""
        ...

    def free_memory_bytes(self) -> int: ...


def load_runner(setup: StageSetup, on_progress: Callable[[int, int], None]) -> Runner:
    """Loads the stage's weights. `on_progress(loaded_bytes, total_bytes)` is called while reading.

    Raises:
        ModelError: the weights cannot be read.
        OutOfMemoryError: they do not fit.
    """
    if is_sleep_model(setup.model_path):
        from fullbore.engine.sleep_runner import SleepRunner

        return SleepRunner.load(setup.model_path, setup.stage, setup.partition, setup.config.page_size)
    from fullbore.model.runner import StageRunner

    return StageRunner.load(
        model_path=Path(setup.model_path),
        stage=setup.stage,
        partition=setup.partition,
        device=setup.device,
        dtype=setup.dtype,
        page_size=setup.config.page_size,
        on_progress=on_progress,
        backend=setup.config.backend,
        graph_requests=graph_requests(setup.config, setup.device),
    )


def graph_requests(config: EngineConfig, device: str) -> int:
    """Decode micro-batches of up to so many requests run in CUDA graphs; 0: none do."""
    return 0 if device == "cpu" or config.disable_cuda_graph else config.most_in_micro_batch

"""Does it fit, with how many tokens of KV cache, and what is left over where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbore.plan.engines import Engine
from fullbore.plan.layout import Stage
from fullbore.plan.models import ACTIVATION_BYTES, DecoderModel

GPU_RUNTIME_BYTES = 2.0e9  # context, libraries, communication buffers, graphs; about what engines report
CPU_RUNTIME_BYTES = 0.3e9
# Of the tensors that a layer writes for one token, about half are alive at once.
ALIVE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of one stage."""

    usable_bytes: float  # what the engine allows itself of the device
    weight_bytes: float
    buffer_bytes: float  # runtime, activations, tensors in flight, logits
    cache_bytes_per_token: float

    @property
    def cache_bytes(self) -> float:
        """What is left for the KV cache; 0 if the rest does not even fit."""
        return max(self.usable_bytes - self.weight_bytes - self.buffer_bytes, 0.0)

    @property
    def missing_bytes(self) -> float:
        """How much weights and buffers exceed the device; 0 if they fit."""
        return max(self.weight_bytes + self.buffer_bytes - self.usable_bytes, 0.0)

    @property
    def cache_tokens(self) -> int:
        return int(self.cache_bytes // self.cache_bytes_per_token)


@dataclass(frozen=True)
class MemoryPlan:
    """All stages. The smallest stage decides the capacity, since each stage keeps its layers of every request."""

    stages: tuple[StageMemory, ...]

    @property
    def cache_tokens(self) -> int:
        return min(stage.cache_tokens for stage in self.stages)

    @property
    def stranded_bytes(self) -> tuple[float, ...]:
        """Cache memory per stage that the smallest stage makes useless."""
        tokens = self.cache_tokens
        return tuple(stage.cache_bytes - tokens * stage.cache_bytes_per_token for stage in self.stages)

    def problem(self, longest_tokens: int) -> str | None:
        """Why no request of that length can be served, and by how much; None if one can."""
        for index, stage in enumerate(self.stages):
            if stage.missing_bytes:
                return (
                    f"stage {index} needs {_gb(stage.weight_bytes + stage.buffer_bytes)} per device for weights and "
                    f"buffers, {_gb(stage.missing_bytes)} more than the {_gb(stage.usable_bytes)} it may use"
                )
        if self.cache_tokens < longest_tokens:
            index = min(range(len(self.stages)), key=lambda i: self.stages[i].cache_tokens)
            stage = self.stages[index]
            lacking = longest_tokens * stage.cache_bytes_per_token - stage.cache_bytes
            return (
                f"one request of {longest_tokens} tokens needs {_gb(lacking)} more KV cache on stage {index}, "
                f"which has room for {self.cache_tokens} tokens"
            )
        return None


def _gb(count_bytes: float) -> str:
    return f"{count_bytes / 1e9:.1f} GB"


def plan_memory(
    model: DecoderModel,
    stages: Sequence[Stage],
    engine: Engine,
    *,
    chunk_tokens: int,
    micro_batches_in_flight: int,
    max_sampled: int,
    typical_tokens: int,
    cache_bytes_per_element: float,
) -> MemoryPlan:
    """Divides every stage's memory.

    Args:
        chunk_tokens: most tokens in a micro-batch.
        max_sampled: most tokens that one micro-batch samples.
        typical_tokens: length of a request; sliding windows shorter than it save cache.
    """
    tensors = 2 if engine.residual_travels_apart else 1
    hidden_bytes = chunk_tokens * model.hidden_size * ACTIVATION_BYTES * tensors
    planned = []
    for stage in stages:
        layers = model.layers[stage.first_layer : stage.end_layer]
        weight_bytes = sum(stage.weight_bytes(layer) for layer in layers)
        has_table = stage.has_embedding or (stage.has_head and model.is_tied)
        weight_bytes += model.embedding.total_bytes / stage.weight_ranks(model.embedding) if has_table else 0.0
        has_own_head = stage.has_head and not model.is_tied
        weight_bytes += model.head.total_bytes / stage.weight_ranks(model.head) if has_own_head else 0.0
        alive = max(layer.norm_bytes_per_token + layer.inner_bytes_per_token / stage.tp for layer in layers)
        buffer_bytes = GPU_RUNTIME_BYTES if stage.devices[0].has_graphs else CPU_RUNTIME_BYTES
        buffer_bytes += chunk_tokens * alive * ALIVE_SHARE
        buffer_bytes += hidden_bytes * (micro_batches_in_flight if len(stages) > 1 else 0)
        if stage.has_head:
            buffer_bytes += max_sampled * model.vocab_size * (4 + ACTIVATION_BYTES) / stage.tp
        planned.append(
            StageMemory(
                usable_bytes=min(device.memory_bytes for device in stage.devices) * engine.memory_share,
                weight_bytes=weight_bytes,
                buffer_bytes=buffer_bytes,
                cache_bytes_per_token=cache_bytes_per_token(model, stage, typical_tokens, cache_bytes_per_element),
            )
        )
    return MemoryPlan(tuple(planned))


def cache_bytes_per_token(
    model: DecoderModel, stage: Stage, typical_tokens: int, cache_bytes_per_element: float
) -> float:
    """Bytes that one token of a request of `typical_tokens` occupies on a rank of a stage, on average over ranks."""
    elements = 0.0
    for layer in model.layers[stage.first_layer : stage.end_layer]:
        window = layer.attention.window_tokens
        kept = 1.0 if window is None else min(window / typical_tokens, 1.0)
        elements += stage.cache_elements_per_token(layer.attention) * kept
    return elements * cache_bytes_per_element

"""Fills a stage's modules from a checkpoint, tensor by tensor, reading nothing that belongs to another stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING

import torch

from fullbore.model.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint

if TYPE_CHECKING:
    from fullbore.model.transformers_stage import TransformersStage

# Hugging Face's modules hold the experts of a layer in two tensors, [experts, …]; files hold three per expert.
_FUSED_EXPERTS = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")

Part = EllipsisType | tuple[int, slice]  # which part of a parameter a tensor of the file fills: all, or of one expert


def load_weights(
    stage: TransformersStage,
    checkpoint: Checkpoint,
    tied_embeddings: bool,
    device: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Gives every parameter of `stage` (on the meta device) its values, in the parameter's own number type.

    No tensor of the file is in memory besides the weights. `on_progress(loaded_bytes, total_bytes)` counts
    bytes of the files and is called after each of them.

    Raises:
        ModelError: a tensor is missing, or its shape does not fit the config.
    """
    parameters = stage.state_dict()  # saved buffers too, such as the bias of DeepSeek's router
    one_embedding = tied_embeddings and stage.is_first and stage.is_last
    if one_embedding:
        del parameters[HEAD_NAME]
    sources = {name: _sources(name, tensor, checkpoint, tied_embeddings) for name, tensor in parameters.items()}
    total_bytes = sum(checkpoint.nbytes(source) for parts in sources.values() for source in parts)
    loaded_bytes = 0
    for name, parts in sources.items():
        parameters[name] = torch.empty_like(parameters[name], device=device)
        for source, part in parts.items():
            checkpoint.load_into(source, parameters[name][part])
            loaded_bytes += checkpoint.nbytes(source)
            if on_progress is not None:
                on_progress(loaded_bytes, total_bytes)
    if one_embedding:
        parameters[HEAD_NAME] = parameters[EMBEDDING_NAME]
    stage.load_state_dict(parameters, assign=True)
    if one_embedding:
        stage.tie_head()


def _sources(name: str, tensor: torch.Tensor, checkpoint: Checkpoint, tied_embeddings: bool) -> dict[str, Part]:
    """The tensors of the file that make up a parameter, and the part of it that each fills."""
    if name == HEAD_NAME:
        return {checkpoint.head_name(tied_embeddings): ...}
    mixtral_name = name.replace(".mlp.", ".block_sparse_moe.")
    if mixtral_name in checkpoint:
        return {mixtral_name: ...}
    fused = _FUSED_EXPERTS.fullmatch(name)
    if name in checkpoint or fused is None:
        return {name: ...}
    layer, projection = fused.groups()
    is_mixtral = f"{layer}.block_sparse_moe.gate.weight" in checkpoint
    experts = f"{layer}.block_sparse_moe.experts" if is_mixtral else f"{layer}.mlp.experts"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    num_experts, num_rows = tensor.shape[:2]
    parts: dict[str, Part] = {}
    for expert in range(num_experts):
        if projection == "down_proj":
            parts[f"{experts}.{expert}.{down}.weight"] = (expert, slice(None))
        else:
            parts[f"{experts}.{expert}.{gate}.weight"] = (expert, slice(0, num_rows // 2))
            parts[f"{experts}.{expert}.{up}.weight"] = (expert, slice(num_rows // 2, None))
    return parts

"""One stage made of Hugging Face's own modules, with our attention in the place of theirs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from fullbore.errors import ModelError
from fullbore.model.attention import AttentionMetadata, paged_attention
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.kv_cache import KVCache
from fullbore.model.loading import load_weights
from fullbore.model.spec import ModelSpec
from fullbore.scheduler.micro_batch import MicroBatch

_ATTENTION = "fullbore_paged"

# Architecture -> folder in transformers.models and prefix of the class names in it.
_FAMILIES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3Moe"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepseekV3"),
}


class _Decoder(nn.Module):
    """Only there so that parameters are called `model.…`. What the stage lacks is None."""

    def __init__(self, layers: nn.ModuleDict, embed_tokens: nn.Embedding | None, norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = layers
        self.embed_tokens = embed_tokens
        self.norm = norm


class Prepared(NamedTuple):
    """A micro-batch made ready for all layers."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    attention: AttentionMetadata


class TransformersStage(nn.Module):
    """Layers `first_layer` … `end_layer-1` of a model; the first stage has the embedding too, the last norm and head.

    Parameters have the names that Hugging Face's whole model gives them, `model.layers.17.…` with the global index, and
    are on the meta device until they are loaded.
    """

    def __init__(
        self, folder: Path, spec: ModelSpec, first_layer: int, end_layer: int, dtype: torch.dtype, device: str
    ) -> None:
        """Reads `config.json` only; `spec` is what ModelSpec made of it.

        Raises:
            ModelError: Hugging Face does not accept the config.
        """
        super().__init__()
        architecture = spec.architecture
        self._tied_embeddings = spec.tied_embeddings
        self._device = device
        with _blaming_config(folder, architecture):
            config, modeling, prefix = _read_config(folder, architecture)
            is_first, is_last = first_layer == 0, end_layer == config.num_hidden_layers
            layer_class, norm_class, rotary_class = (
                getattr(modeling, prefix + name) for name in ("DecoderLayer", "RMSNorm", "RotaryEmbedding")
            )
            self.first_layer = first_layer
            self.num_layers = end_layer - first_layer
            self.is_first = is_first
            self.is_last = is_last
            with torch.device("meta"), _default_dtype(dtype):
                # A dictionary, since layers keep their global index: names, layer types and dense layers go by it.
                layers = nn.ModuleDict(
                    {str(index): layer_class(config, index) for index in range(first_layer, end_layer)}
                )
                embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if is_first else None
                norm = norm_class(config.hidden_size, eps=config.rms_norm_eps) if is_last else None
                self.model = _Decoder(layers, embed_tokens, norm)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if is_last else None
            # Its frequencies are computed, not loaded, so it is built where it runs.
            with torch.device(device):
                self.rotary_emb = rotary_class(config)
        self.eval().requires_grad_(False)

    def load(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None = None) -> None:
        """See `StageModule`."""
        load_weights(self, checkpoint, self._tied_embeddings, self._device, on_progress)

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Prepared:
        """Token ids and positions on the stage's device, and what attention needs."""
        token_ids = [token_id for run in micro_batch.runs for token_id in run.token_ids]
        positions = [p for run in micro_batch.runs for p in range(run.start, run.start + len(run.token_ids))]
        return Prepared(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            AttentionMetadata.build(micro_batch, cache),
        )

    def forward(self, prepared: Prepared, hidden: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of the stage before, None on the first -> hidden states."""
        if self.model.embed_tokens is not None:
            hidden = self.model.embed_tokens(prepared.token_ids)
        assert hidden is not None
        hidden = hidden[None]
        position_ids = prepared.positions[None]
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for layer in self.model.layers.values():
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                paged_metadata=prepared.attention,
                paged_cache=cache,
            )
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden_size] after the last layer -> float32 [rows, vocab_size]."""
        assert self.lm_head is not None
        assert self.model.norm is not None
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden))
        return logits.float()

    def tie_head(self) -> None:
        """Makes the head use the embedding's weights; for a stage that has both."""
        assert self.lm_head is not None
        assert self.model.embed_tokens is not None
        self.lm_head.weight = self.model.embed_tokens.weight

    def weight_bytes(self) -> int:
        """Bytes of all parameters and saved buffers; a shared one counts once."""
        tensors = {id(tensor): tensor for tensor in self.state_dict(keep_vars=True).values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_metadata: AttentionMetadata,
    paged_cache: KVCache,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What Hugging Face's attention modules call. query, key, value: [1, heads, tokens, head_dim]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged_attention(query, key, value, module.layer_idx, paged_cache, paged_metadata, scaling)[None], None


AttentionInterface.register(_ATTENTION, _paged_attention_forward)


@contextmanager
def _blaming_config(folder: Path, architecture: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the config classes and the modules check values in many ways, or not at all
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{folder / 'config.json'} is not a valid {architecture} config ({reason}).") from error


def _read_config(folder: Path, architecture: str) -> tuple[PreTrainedConfig, Any, str]:
    """The config of this stage, the module with the model's classes, and the prefix of their names.

    The config class comes from the architecture, not from `model_type`: Kimi K2 is DeepSeek-V3 by another name.
    """
    family, prefix = _FAMILIES[architecture]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("model_type", "auto_map"):
        values.pop(key, None)
    config = getattr(modeling, f"{prefix}Config").from_dict(values)
    config._attn_implementation = _ATTENTION
    # Sorts tokens by expert; the default loops over experts with several small operations each.
    config._experts_implementation = "grouped_mm"
    return config, modeling, prefix


class _default_dtype:  # noqa: N801 (used like a function)
    """Modules that name no type are built in this one; those that Hugging Face keeps in float32 name it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._previous)

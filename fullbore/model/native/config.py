"""What the native decoder needs to know of a config.json, and which models it can run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbore.model.spec import ModelSpec

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class UnsupportedError(Exception):
    """The native decoder cannot run this model; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `rope_parameters` of the config (`rope_scaling` and `rope_theta` in older files)."""

    theta: float
    kind: str  # one of _ROPE_TYPES
    parameters: dict[str, Any]
    context_length: int  # of the model, after scaling


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder with grouped-query attention. Sizes in elements."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float  # of the norms
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool  # queries and keys are normed per head
    tied_embeddings: bool
    rope: RopeConfig

    @classmethod
    def from_folder(cls, folder: Path, spec: ModelSpec) -> DecoderConfig:
        """Reads `config.json`; `spec` is what ModelSpec made of it.

        Raises:
            UnsupportedError: the model needs something that this decoder lacks, or its config is odd.
        """
        if spec.architecture not in _ARCHITECTURES:
            raise UnsupportedError(f"it has no {spec.architecture}")
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if values.get("hidden_act", "silu") != "silu":
            raise UnsupportedError(f"it has no activation {values['hidden_act']}")
        if spec.num_heads % spec.num_kv_heads or spec.k_head_dim % 2:
            raise UnsupportedError("the sizes of its attention heads do not fit each other")
        has_bias = bool(values.get("attention_bias", False)) and spec.architecture in (
            "LlamaForCausalLM",
            "Qwen3ForCausalLM",
        )
        try:
            return cls(
                num_layers=spec.num_layers,
                hidden_size=spec.hidden_size,
                intermediate_size=int(values["intermediate_size"]),
                vocab_size=spec.vocab_size,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.k_head_dim,
                epsilon=float(values.get("rms_norm_eps", 1e-6)),
                qkv_bias=has_bias or spec.architecture == "Qwen2ForCausalLM",
                output_bias=has_bias,
                mlp_bias=bool(values.get("mlp_bias", False)) and spec.architecture == "LlamaForCausalLM",
                qk_norm=spec.architecture == "Qwen3ForCausalLM",
                tied_embeddings=spec.tied_embeddings,
                rope=_rope(values),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise UnsupportedError(f"its config.json is odd ({type(error).__name__}: {error})") from None


def _rope(values: dict[str, Any]) -> RopeConfig:
    if values.get("rope_parameters") and values.get("rope_scaling"):
        raise UnsupportedError("its config.json has both rope_parameters and rope_scaling")
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise UnsupportedError(f"it has no rotary embedding of type {kind}")
    if parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError("it cannot rotate only a part of a head")
    theta = float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    return RopeConfig(theta, kind, parameters, int(values["max_position_embeddings"]))

"""What a model is, read from its config.json: sizes, architecture, end tokens, weights per layer. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from fullbore.errors import ModelError

# Architectures whose outputs are tested against Hugging Face, and the `model_type`s under which they appear.
SUPPORTED_ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3_moe",),
    "MixtralForCausalLM": ("mixtral",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),  # Kimi K2 is DeepSeek-V3 with other sizes
}

# Rotary variants whose frequencies do not depend on what else is in the batch (longrope's do).
_SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

_MOST_LAYERS = 10_000

_DTYPES = ("float32", "bfloat16", "float16")


class LayerSpec(Struct, frozen=True):
    """How many weights one decoder layer has, by how often they are read."""

    dense_params: int  # read in every step: attention, norms, dense MLP or router and shared experts
    expert_params: int = 0  # one routed expert
    num_experts: int = 0
    num_active_experts: int = 0  # routed experts per token

    @property
    def num_params(self) -> int:
        """All weights of the layer."""
        return self.dense_params + self.expert_params * self.num_experts

    def params_read(self, num_tokens: int) -> float:
        """Weights read in one step over `num_tokens` tokens, with routing spread evenly over the experts."""
        if not self.num_experts:
            return float(self.dense_params)
        share_missed = (1 - self.num_active_experts / self.num_experts) ** num_tokens
        return self.dense_params + self.expert_params * self.num_experts * (1 - share_missed)


class ModelSpec(Struct, frozen=True):
    """A model as its config.json describes it. Sizes in elements, lengths in tokens."""

    architecture: str  # class name, e.g. "LlamaForCausalLM"
    model_type: str  # as in the file, e.g. "kimi_k2"
    hidden_size: int
    vocab_size: int
    context_length: int  # longest sequence that is computed as Hugging Face computes it
    num_heads: int
    num_kv_heads: int  # heads in the KV cache
    k_head_dim: int
    v_head_dim: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    layers: tuple[LayerSpec, ...]
    notes: tuple[str, ...] = ()  # sentences that the user should read at start-up

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_params(self) -> int:
        """Weights of the token embedding; the LM head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the KV cache of one layer."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Reads `config.json` and, if there, `generation_config.json` of a Hugging Face folder.

        Raises:
            ModelError: missing or broken file, or a model that is not supported.
        """
        config = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation_config = _read_json(generation_path) if generation_path.exists() else {}
        return cls.from_config(config, generation_config)

    @classmethod
    def from_config(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelSpec:
        """The same from the parsed files.

        Raises:
            ModelError: a key is missing or senseless, or the model is not supported.
        """
        architecture = _architecture(config)
        _refuse_quantized(config)
        _refuse_unknown_rope(config)
        num_heads = _size(config, "num_attention_heads")
        if architecture == "DeepseekV3ForCausalLM":
            # Hugging Face's attention sees the latent expanded: one key and one value per query head.
            num_kv_heads = num_heads
            k_head_dim = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
            v_head_dim = _size(config, "v_head_dim")
        else:
            num_kv_heads = _size(config, "num_key_value_heads", num_heads)
            k_head_dim = v_head_dim = _head_dim(config, architecture)
        context_length, notes = _context_length(config, architecture)
        return cls(
            architecture=architecture,
            model_type=str(config.get("model_type", "")),
            hidden_size=_size(config, "hidden_size"),
            vocab_size=_size(config, "vocab_size"),
            context_length=context_length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            k_head_dim=k_head_dim,
            v_head_dim=v_head_dim,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            dtype=_dtype(config),
            layers=tuple(_layer(config, architecture, index) for index in range(_num_layers(config))),
            notes=notes,
        )


# ------------------------------------------------------------------------------------------- reading and refusing


def _num_layers(config: dict[str, Any]) -> int:
    """Refuses a number that could only be a broken file's, before anything is made for each layer."""
    num_layers = _size(config, "num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers must be at most {_MOST_LAYERS}, got {num_layers}.")
    return num_layers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; give a Hugging Face model folder, a hub id or a GGUF file.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download the model again.")
    return content


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the config; a missing or null one is the default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json has no {key}; it does not describe a complete model.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}.")
    return value


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        name = next((known for known, types in SUPPORTED_ARCHITECTURES.items() if model_type in types), None)
    types = SUPPORTED_ARCHITECTURES.get(str(name), ())
    if model_type == "kimi_k2":
        return "DeepseekV3ForCausalLM"
    # A custom model may borrow a known class name; its model_type gives it away.
    if types and (model_type is None or model_type in types):
        return str(name)
    found = name if not types else f"{name} with model_type {model_type}"
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    raise ModelError(
        f"Architecture {found or model_type or '(none named in config.json)'} is not supported; "
        f"supported are {supported} (also as model_type kimi_k2)."
    )


def _refuse_quantized(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"This checkpoint is quantised ({method}), which fullbore cannot read yet; "
            "use the model's bfloat16 version or a GGUF file of it."
        )


def _refuse_unknown_rope(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope_scaling must be an object or null, got {rope!r}.")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in _SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"Rotary embedding type {rope_type} is not supported; supported are {', '.join(_SUPPORTED_ROPE_TYPES)}."
        )


# ------------------------------------------------------------------------------------------------------- values


def _head_dim(config: dict[str, Any], architecture: str) -> int:
    # Hugging Face's own default for Qwen3 does not follow from the other sizes.
    default = 128 if architecture == "Qwen3ForCausalLM" else None
    return _size(config, "head_dim", default or _size(config, "hidden_size") // _size(config, "num_attention_heads"))


def _context_length(config: dict[str, Any], architecture: str) -> tuple[int, tuple[str, ...]]:
    """`max_position_embeddings`, which in Hugging Face's configs is the length *after* rotary scaling.

    Sliding windows are not implemented. A sequence no longer than the window never slides, so the context is cut to it.
    """
    context_length = _size(config, "max_position_embeddings")
    window = _sliding_window(config, architecture)
    if window is None or window >= context_length:
        return context_length, ()
    note = (
        f"The model uses sliding-window attention, which fullbore does not have yet: "
        f"the context length is limited to the window, {window} of {context_length} tokens."
    )
    return window, (note,)


def _sliding_window(config: dict[str, Any], architecture: str) -> int | None:
    """The window in tokens if any layer slides, by Hugging Face's rules for each architecture."""
    if architecture in ("LlamaForCausalLM", "DeepseekV3ForCausalLM"):
        return None
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        default = 4096 if architecture == "MistralForCausalLM" else None
        return None if config.get("sliding_window", default) is None else _size(config, "sliding_window", default)
    if not config.get("use_sliding_window", False):
        return None
    if architecture != "Qwen3MoeForCausalLM":  # Qwen2 and Qwen3 slide in some layers only
        layer_types = config.get("layer_types")
        first_sliding_layer = config.get("max_window_layers", 28)
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        if layer_types is None and first_sliding_layer >= _size(config, "num_hidden_layers"):
            return None
    return None if config.get("sliding_window", 4096) is None else _size(config, "sliding_window", 4096)


def _eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of both files: either alone is incomplete in some published models."""
    found: set[int] = set()
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(token for token in values if isinstance(token, int) and not isinstance(token, bool) and token >= 0)
    return tuple(sorted(found))


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


# ---------------------------------------------------------------------------------------------- weights per layer


def _layer(config: dict[str, Any], architecture: str, index: int) -> LayerSpec:
    hidden = _size(config, "hidden_size")
    attention = _mla_params(config) if architecture == "DeepseekV3ForCausalLM" else _gqa_params(config, architecture)
    common = attention + 2 * hidden  # two norms
    if not _is_moe_layer(config, architecture, index):
        intermediate = _size(config, "intermediate_size")
        has_bias = architecture == "LlamaForCausalLM" and config.get("mlp_bias", False)
        bias = 2 * intermediate + hidden if has_bias else 0
        return LayerSpec(common + 3 * hidden * intermediate + bias)
    num_experts = _num_experts(config, architecture)
    intermediate = _size(
        config, "intermediate_size" if architecture == "MixtralForCausalLM" else "moe_intermediate_size"
    )
    expert = 3 * hidden * intermediate
    router = num_experts * hidden
    shared = 0
    if architecture == "DeepseekV3ForCausalLM":
        router += num_experts  # the correction of the scores
        shared = expert * _size(config, "n_shared_experts", 1)
    default_active = 2 if architecture == "MixtralForCausalLM" else 8
    num_active = min(_size(config, "num_experts_per_tok", default_active), num_experts)
    return LayerSpec(common + router + shared, expert, num_experts, num_active)


def _gqa_params(config: dict[str, Any], architecture: str) -> int:
    """Weights of attention with grouped queries: q, k, v, o, their biases and (Qwen3) norms of q and k."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = _head_dim(config, architecture)
    q = heads * head_dim
    kv = 2 * _size(config, "num_key_value_heads", heads) * head_dim
    params = hidden * (q + kv) + q * hidden
    is_qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    if architecture == "Qwen2ForCausalLM":
        params += q + kv
    elif (is_qwen3 or architecture == "LlamaForCausalLM") and config.get("attention_bias", False):
        params += q + kv + hidden
    return params + (2 * head_dim if is_qwen3 else 0)


def _mla_params(config: dict[str, Any]) -> int:
    """Weights of multi-head latent attention (DeepSeek-V3)."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    nope, rope = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim")
    v_head_dim, kv_rank = _size(config, "v_head_dim"), _size(config, "kv_lora_rank")
    q = heads * (nope + rope)
    bias = bool(config.get("attention_bias", False))
    params = hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + v_head_dim) + heads * v_head_dim * hidden
    params += bias * (kv_rank + rope + hidden)
    if config.get("q_lora_rank") is None:
        return params + hidden * q
    q_rank = _size(config, "q_lora_rank")
    return params + hidden * q_rank + bias * q_rank + q_rank + q_rank * q


def _num_experts(config: dict[str, Any], architecture: str) -> int:
    key = "n_routed_experts" if architecture == "DeepseekV3ForCausalLM" else "num_local_experts"
    return _size(config, key, config.get("num_experts"))


def _is_moe_layer(config: dict[str, Any], architecture: str, index: int) -> bool:
    if architecture == "MixtralForCausalLM":
        return True
    if architecture == "DeepseekV3ForCausalLM":
        first_dense = config.get("first_k_dense_replace")
        return index >= (3 if first_dense is None else first_dense)
    if architecture == "Qwen3MoeForCausalLM":
        step = _size(config, "decoder_sparse_step", 1)
        return index not in (config.get("mlp_only_layers") or []) and (index + 1) % step == 0
    return False

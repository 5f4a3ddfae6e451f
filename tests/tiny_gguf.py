"""Writes tiny GGUF files as llama.cpp's converter does, from the models of tiny_models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_models import CHAT_TEMPLATE, EOS_TOKEN_ID, SPECIAL_TOKENS, make_byte_tokenizer
from transformers import AutoModelForCausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}

_NAMES = [
    (r"^model\.embed_tokens", "token_embd"),
    (r"^model\.norm", "output_norm"),
    (r"^lm_head", "output"),
    (r"^model\.layers\.", "blk."),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
]


def write_gguf(
    model_folder: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    leave_out: str | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Writes the Hugging Face model in `model_folder` as a GGUF file; matrices as `kind`, the rest as float32.

    `leave_out` names a GGUF tensor that is not written; `metadata` holds further integer, float or string keys.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = model.config
    arch = ARCHITECTURES[config.architectures[0]]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    _write_tokenizer(writer, pre)
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    for name, values in (_gguf_tensors(model, arch) | (extra_tensors or {})).items():
        if name == leave_out:
            continue
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
    if "Moe" in config.architectures[0] or "Mixtral" in config.architectures[0]:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    vocabulary = make_byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    # A GGUF file cannot hold an empty list of merges. The byte 0xFF is in no UTF-8 text, so its token may be another.
    tokens[tokens.index("ÿ")] = "he"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_tensors(model: torch.nn.Module, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    tensors = {}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[1]
            gate, up = np.split(values, 2, axis=1)
            tensors |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            tensors[f"blk.{name.split('.')[1]}.ffn_down_exps.weight"] = values
        else:
            tensors[name] = values
    return {name: np.ascontiguousarray(values) for name, values in tensors.items()}

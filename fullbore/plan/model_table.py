"""Models that `fullbore plan` knows by name: the sizes in their published config.json files."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from fullbore.errors import ModelError
from fullbore.plan.models import DecoderModel, from_config

_HUB = "https://huggingface.co/"
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
# Only the routed experts are int4 (32 weights to a bf16 scale); the rest stays bf16.
_KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
}


def _deepseek_v3(heads: int, experts: int, first_dense: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": first_dense,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "dtype": "bfloat16",
    }


def _gqa(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    context: int = 131072,
    model_type: str = "llama",
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "dtype": "bfloat16",
        **more,
    }


def _qwen3_moe(layers: int, hidden: int, heads: int, kv_heads: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _gqa(layers, hidden, heads, kv_heads, 3 * hidden, 151936, 40960, "qwen3_moe", head_dim=128, **experts)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _gqa(
        layers,
        2880,
        64,
        8,
        2880,
        201088,
        model_type="gpt_oss",
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        quantization_config=_MXFP4,
    )


_KIMI = _deepseek_v3(64, 384, 1, 163840, 131072)
_DEEPSEEK = {**_deepseek_v3(128, 256, 3, 129280, 163840), "quantization_config": _FP8}

# name: (config, hub page that publishes it)
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "kimi-k2": ({**_KIMI, "quantization_config": _FP8}, "moonshotai/Kimi-K2-Instruct"),
    "kimi-k2.5": (
        {**_KIMI, "max_position_embeddings": 262144, "quantization_config": _KIMI_INT4},
        "moonshotai/Kimi-K2.5",
    ),
    "kimi-k2.6": (
        {**_KIMI, "max_position_embeddings": 262144, "quantization_config": _KIMI_INT4},
        "moonshotai/Kimi-K2.6",
    ),
    "deepseek-v3": (_DEEPSEEK, "deepseek-ai/DeepSeek-V3"),
    "deepseek-r1": (_DEEPSEEK, "deepseek-ai/DeepSeek-R1"),
    "qwen3-235b-a22b": (_qwen3_moe(94, 4096, 64, 4, 1536), "Qwen/Qwen3-235B-A22B"),
    "qwen3-30b-a3b": (_qwen3_moe(48, 2048, 32, 4, 768), "Qwen/Qwen3-30B-A3B"),
    "qwen3-coder-480b-a35b": (
        {**_qwen3_moe(62, 6144, 96, 8, 2560), "num_experts": 160, "max_position_embeddings": 262144},
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    ),
    "glm-4.6": (
        _gqa(
            92,
            5120,
            96,
            8,
            12288,
            151552,
            202752,
            "glm4_moe",
            head_dim=128,
            use_qk_norm=True,
            n_routed_experts=160,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
        ),
        "zai-org/GLM-4.6",
    ),
    "minimax-m2": (
        _gqa(
            62,
            3072,
            48,
            8,
            1536,
            200064,
            196608,
            "minimax_m2",
            head_dim=128,
            use_qk_norm=True,
            num_local_experts=256,
            num_experts_per_tok=8,
            quantization_config=_FP8,
        ),
        "MiniMaxAI/MiniMax-M2",
    ),
    "qwen3-32b": (_gqa(64, 5120, 64, 8, 25600, 151936, 40960, "qwen3", head_dim=128), "Qwen/Qwen3-32B"),
    "qwen2.5-32b": (_gqa(64, 5120, 40, 8, 27648, 152064, 32768, "qwen2"), "Qwen/Qwen2.5-32B-Instruct"),
    "qwen2.5-72b": (_gqa(80, 8192, 64, 8, 29568, 152064, 32768, "qwen2"), "Qwen/Qwen2.5-72B-Instruct"),
    "mistral-large": (_gqa(88, 12288, 96, 8, 28672, 32768, 131072, "mistral"), "mistralai/Mistral-Large-Instruct-2407"),
    "llama-2-7b": (_gqa(32, 4096, 32, 32, 11008, 32000, 4096), "meta-llama/Llama-2-7b-chat-hf"),
    "llama-2-13b": (_gqa(40, 5120, 40, 40, 13824, 32000, 4096), "meta-llama/Llama-2-13b-chat-hf"),
    "llama-3.1-8b": (_gqa(32, 4096, 32, 8, 14336, 128256), "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.1-70b": (_gqa(80, 8192, 64, 8, 28672, 128256), "meta-llama/Llama-3.1-70B-Instruct"),
    "llama-3.3-70b": (_gqa(80, 8192, 64, 8, 28672, 128256), "meta-llama/Llama-3.3-70B-Instruct"),
    "llama-3.1-405b": (_gqa(126, 16384, 128, 8, 53248, 128256), "meta-llama/Llama-3.1-405B-Instruct"),
    "llama-4-scout": (
        _gqa(
            48,
            5120,
            40,
            8,
            8192,
            202048,
            10485760,
            "llama4_text",
            head_dim=128,
            num_local_experts=16,
            num_experts_per_tok=1,
            intermediate_size_mlp=16384,
            attention_chunk_size=8192,
            no_rope_layer_interval=4,
        ),
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    "gpt-oss-120b": (_gpt_oss(36, 128), "openai/gpt-oss-120b"),
    "gpt-oss-20b": (_gpt_oss(24, 32), "openai/gpt-oss-20b"),
    "mixtral-8x7b": (
        _gqa(32, 4096, 32, 8, 14336, 32000, 32768, "mixtral", num_local_experts=8, num_experts_per_tok=2),
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
    ),
    "mixtral-8x22b": (
        _gqa(56, 6144, 48, 8, 16384, 32768, 65536, "mixtral", num_local_experts=8, num_experts_per_tok=2),
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
    ),
    "smollm2-135m": (
        _gqa(30, 576, 9, 3, 1536, 49152, 8192, tie_word_embeddings=True),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}

_SUFFIXES = re.compile(r"-(instruct|chat|base|it|thinking|hf|bf16|int4|fp8|nvfp4|v0\.1|0905|0528|2507|17b-16e)$")


def find_model(name: str, weights: str | None = None) -> DecoderModel | None:
    """The built-in model of that name; case, an owner in front and endings such as -Instruct do not matter."""
    key = name.lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-")
    if key not in MODELS:
        while (shorter := _SUFFIXES.sub("", key)) != key:
            key = shorter
    if key not in MODELS:
        return None
    config, page = MODELS[key]
    return from_config(config, key, weights, _HUB + page)


def unknown_model(name: str) -> ModelError:
    """The error for a name that is neither built in nor a folder."""
    close = get_close_matches(name.lower().rsplit("/", 1)[-1], MODELS, 1, 0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return ModelError(
        f"{name} is neither a folder with a config.json nor a known model.{hint} Known are {', '.join(MODELS)}."
    )

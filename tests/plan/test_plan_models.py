"""Reading decoder configs, and the built-in table."""

from __future__ import annotations

from typing import Any

import pytest

from fullbore.errors import ConfigError, ModelError
from fullbore.plan.formats import role_formats
from fullbore.plan.model_table import MODELS, find_model, unknown_model
from fullbore.plan.models import DecoderModel, distinct_experts, from_config

# Parameters in total, as their authors state them, in billions.
PUBLISHED = {
    "kimi-k2": 1026,
    "deepseek-v3": 671,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "llama-4-scout": 107.8,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "qwen3-coder-480b-a35b": 480.2,
    "qwen2.5-72b": 72.7,
    "mistral-large": 122.6,
    "minimax-m2": 228.7,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "mixtral-8x22b": 140.6,
    "mixtral-8x7b": 46.7,
    "smollm2-135m": 0.1345,
}


def config(**more: Any) -> dict[str, Any]:
    base = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 1000}
    return {**base, "intermediate_size": 256, **more}


def known(name: str, weights: str | None = None) -> DecoderModel:
    found = find_model(name, weights)
    assert found is not None
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_built_in_model_can_be_read(name: str) -> None:
    assert known(name).weight_bytes > 0
    assert known(name).source.startswith("https://")


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_that_the_authors_state(name: str, billions: float) -> None:
    assert known(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


def test_kimi_k26_is_594_gb_and_reads_33_gb_a_token() -> None:
    model = known("kimi-k2.6")
    assert model.weight_bytes / 1e9 == pytest.approx(594, rel=1e-3)
    assert model.bytes_read(1) / 1e9 == pytest.approx(33.0, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["Kimi-K2.6", "moonshotai/Kimi-K2.6", "meta-llama/Llama-3.1-8B-Instruct", "QWEN3_32B", "deepseek-v3"]
)
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert find_model(name) is not None


def test_unknown_names_get_a_hint() -> None:
    assert find_model("kimi-k3") is None
    assert "Did you mean qwen3-32b?" in str(unknown_model("qwen3-33b"))


def test_first_layers_are_dense_and_the_others_have_shared_experts() -> None:
    layers = known("deepseek-v3").layers
    assert [bool(sum(m.num_experts for m in layer.matrices)) for layer in layers[:4]] == [False] * 3 + [True]
    assert {matrix.role for matrix in layers[3].matrices} == {"attention", "router", "experts", "shared"}


def test_latent_attention_caches_one_latent_whatever_the_ranks() -> None:
    attention = known("kimi-k2").layers[0].attention
    assert attention.cache_elements_per_token(1) == attention.cache_elements_per_token(8) == 576


def test_grouped_queries_divide_the_cache_among_ranks_down_to_one_head() -> None:
    attention = known("llama-3.1-70b").layers[0].attention
    assert [attention.cache_elements_per_token(tp) for tp in (1, 2, 8, 16)] == [2048, 1024, 256, 256]


def test_every_second_layer_of_gpt_oss_has_a_window() -> None:
    assert [layer.attention.window_tokens for layer in known("gpt-oss-120b").layers[:4]] == [128, None, 128, None]


def test_only_experts_of_kimi_are_quantised() -> None:
    formats = role_formats(MODELS["kimi-k2.6"][0])
    assert {role: fmt.name for role, fmt in formats.items() if fmt.name != "bf16"} == {"experts": "int4"}


@pytest.mark.parametrize(
    ("quantization", "name", "bytes_per_param"),
    [
        ({"quant_method": "fp8"}, "fp8", 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4-g128", 0.53125),
        ({"quant_method": "gptq", "bits": 8}, "int8", 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.53125),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4-g128", 0.53125),
    ],
)
def test_quantised_checkpoints(quantization: dict[str, Any], name: str, bytes_per_param: float) -> None:
    fmt = role_formats(config(quantization_config=quantization))["mlp"]
    assert (fmt.name, fmt.bytes_per_param) == (name, bytes_per_param)


def test_another_weight_format_can_be_asked_for() -> None:
    assert known("llama-3.1-70b", "nvfp4").weight_bytes < 0.35 * known("llama-3.1-70b").weight_bytes
    with pytest.raises(ConfigError, match="known are fp32, bf16"):
        find_model("llama-3.1-70b", "int3")


def test_tied_heads_are_counted_once() -> None:
    tied, untied = (from_config(config(tie_word_embeddings=flag)) for flag in (True, False))
    assert untied.num_params - tied.num_params == 64 * 1000
    assert tied.bytes_read(1) == untied.bytes_read(1)


def test_nested_text_configs_are_found() -> None:
    nested = {"model_type": "kimi_k25", "text_config": config(), "vision_config": {"hidden_size": 9}}
    assert from_config(nested).num_layers == 4


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"hidden_size": 64}, "no vocab_size"),
        ({**config(), "num_hidden_layers": None}, "no num_hidden_layers"),
        ({**config(), "num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({**config(), "hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({**config(), "num_attention_heads": True}, "num_attention_heads must be a positive integer"),
        ({**config(), "num_key_value_heads": 9}, "9 KV heads do not fit"),
        ({**config(), "num_experts": 4, "num_experts_per_tok": 8}, "8 experts per token, but there are only 4"),
    ],
)
def test_senseless_configs_get_one_helpful_line(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_config(broken)


def test_distinct_experts_are_between_one_tokens_and_all() -> None:
    counts = [distinct_experts(tokens, 384, 8) for tokens in (1, 2, 8, 64, 100000)]
    assert counts == sorted(counts)
    assert counts[0] == pytest.approx(8)
    assert counts[-1] == pytest.approx(384)

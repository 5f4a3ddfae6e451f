"""ModelSpec: what it reads from config.json, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, EOS_TOKEN_ID, VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from fullbore.errors import ModelError
from fullbore.model.spec import SUPPORTED_ARCHITECTURES, LayerSpec, ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}


def config_of(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model, as transformers writes it."""
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_TOKEN_ID,
        **ARCHITECTURES[architecture],
        **overrides,
    }
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    name = architecture if architecture in SUPPORTED_ARCHITECTURES else "DeepseekV3ForCausalLM"
    model_type = "kimi_k2" if architecture == "kimi_k2" else config.model_type
    return json.loads(config.to_json_string()) | {"architectures": [name], "model_type": model_type}


VARIANTS = [
    *((name, {}) for name in ARCHITECTURES),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("Qwen3ForCausalLM", {"attention_bias": True}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}),
    ("DeepseekV3ForCausalLM", {"q_lora_rank": None, "first_k_dense_replace": 3}),
    ("DeepseekV3ForCausalLM", {"attention_bias": True, "n_shared_experts": 2}),
]


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_weights_per_layer_are_those_of_the_hugging_face_model(architecture: str, overrides: dict[str, Any]) -> None:
    config = config_of(architecture, **overrides)
    hf_type = "deepseek_v3" if architecture == "kimi_k2" else config["model_type"]
    with torch.device("meta"):
        hf_config = AutoConfig.for_model(hf_type, **{k: v for k, v in config.items() if k != "model_type"})
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = [
        sum(tensor.numel() for tensor in [*layer.parameters(), *layer.buffers()]) for layer in model.model.layers
    ]
    spec = ModelSpec.from_config(config)
    assert [layer.num_params for layer in spec.layers] == expected
    assert spec.embedding_params == model.lm_head.weight.numel()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes(architecture: str) -> None:
    spec = ModelSpec.from_config(config_of(architecture))
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (5, 64, VOCAB_SIZE)
    assert spec.eos_token_ids == (EOS_TOKEN_ID,)
    if spec.architecture == "DeepseekV3ForCausalLM":  # the latent expanded: one key and value per query head
        assert (spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.kv_elements_per_token) == (4, 24, 12, 144)
    else:
        assert spec.num_kv_heads == 2
        assert spec.k_head_dim == spec.v_head_dim == ARCHITECTURES[architecture].get("head_dim", 16)


def test_kimi_k2_is_deepseek_v3() -> None:
    spec = ModelSpec.from_config(config_of("kimi_k2"))
    assert (spec.architecture, spec.model_type) == ("DeepseekV3ForCausalLM", "kimi_k2")
    assert [layer.num_experts for layer in spec.layers] == [0, 8, 8, 8, 8]


def test_qwen3_without_head_dim_has_hugging_faces_default() -> None:
    config = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert ModelSpec.from_config(config).k_head_dim == 128


def test_model_type_alone_is_enough() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert ModelSpec.from_config(config).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("names", "model_type"),
    [
        (["GptOssForCausalLM"], "gpt_oss"),
        (["KimiK25ForConditionalGeneration"], "kimi_k25"),
        (["LlamaForCausalLM"], "my_llama"),  # custom code behind a known name
        (["LlamaForSequenceClassification"], "llama"),
        (None, "gemma3"),
        (None, None),
    ],
)
def test_other_architectures_are_refused_by_name_with_the_list(names: list[str] | None, model_type: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(LLAMA | {"architectures": names, "model_type": model_type})
    for name in [*SUPPORTED_ARCHITECTURES, "kimi_k2", *(names or []), model_type if not names else ""]:
        assert (name or "") in str(caught.value)


def test_quantized_checkpoints_are_refused() -> None:
    with pytest.raises(ModelError, match=r"quantised \(fp8\).*GGUF"):
        ModelSpec.from_config(LLAMA | {"quantization_config": {"quant_method": "fp8"}})


def test_longrope_is_refused() -> None:
    with pytest.raises(ModelError, match="longrope"):
        ModelSpec.from_config(LLAMA | {"rope_scaling": {"type": "longrope", "factor": 4.0}})


@pytest.mark.parametrize(
    ("config", "context_length"),
    [
        (MISTRAL | {"sliding_window": 4096}, 4096),
        (MISTRAL | {"sliding_window": None}, 32768),
        (MISTRAL, 4096),  # Hugging Face's default for a missing key
        (MISTRAL | {"sliding_window": 65536}, 32768),
        (QWEN2 | {"sliding_window": 4096}, 32768),  # not in use
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}, 4096),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3}, 32768),
        (QWEN2 | {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, 32768),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),  # already the length after scaling
    ],
)
def test_context_length_is_cut_to_a_window_that_slides(config: dict[str, Any], context_length: int) -> None:
    spec = ModelSpec.from_config(config)
    assert spec.context_length == context_length
    is_cut = context_length < config["max_position_embeddings"]
    assert len(spec.notes) == is_cut
    assert all(str(context_length) in note for note in spec.notes)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, (2,)), ([7, 2], 3, (2, 3, 7)), (None, [5], (5,)), (None, None, ()), (2, [2, -1, "x"], (2,))],
)
def test_end_tokens_of_both_files(config_eos: Any, generation_eos: Any, expected: tuple[int, ...]) -> None:
    spec = ModelSpec.from_config(LLAMA | {"eos_token_id": config_eos}, {"eos_token_id": generation_eos})
    assert spec.eos_token_ids == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({}, "float32")],
)
def test_dtype(entry: dict[str, str], expected: str) -> None:
    assert ModelSpec.from_config(LLAMA | entry).dtype == expected


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", 1.5, True])
def test_senseless_sizes_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        ModelSpec.from_config(LLAMA | {key: value})


def test_a_senseless_number_of_layers_takes_neither_memory_nor_time() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers must be at most"):
        ModelSpec.from_config(LLAMA | {"num_hidden_layers": 4 * 10**9})


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        ModelSpec.from_folder(tmp_path)
    for broken in ("{", "[]", '"\ud800"'.encode("utf-8", "surrogatepass").decode("latin-1")):
        (tmp_path / "config.json").write_text(broken, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_folder(tmp_path).num_layers == 3
    (tmp_path / "generation_config.json").write_text("{}}")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelSpec.from_folder(tmp_path)


@given(num_experts=st.integers(1, 400), data=st.data())
def test_experts_read_grow_from_the_active_ones_to_all(num_experts: int, data: st.DataObject) -> None:
    num_active = data.draw(st.integers(1, num_experts))
    layer = LayerSpec(dense_params=10, expert_params=7, num_experts=num_experts, num_active_experts=num_active)
    read = [layer.params_read(tokens) for tokens in (1, 2, 8, 100_000)]
    assert read[0] == pytest.approx(10 + 7 * num_active)
    assert read == sorted(read)
    assert read[-1] == pytest.approx(layer.num_params)


def test_needs_no_torch() -> None:
    code = "import sys, fullbore.model.spec, fullbore.model.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

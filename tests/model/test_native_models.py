"""Which models the native backend takes, and that it reads their configs as Hugging Face does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fullbore.errors import ModelError
from fullbore.model import runner as runner_module
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.native.backend import make_native_stage
from fullbore.model.native.config import DecoderConfig, UnsupportedError
from fullbore.model.native.cpu_layers import CpuLayers
from fullbore.model.native.decoder import NativeStage
from fullbore.model.native.kernels import LayerWeights, Linear
from fullbore.model.native.rope import RotaryTables, frequencies_and_factor
from fullbore.model.native.torch_kernels import TorchLayers
from fullbore.model.runner import StageRunner
from fullbore.model.spec import ModelSpec
from fullbore.model.transformers_stage import TransformersStage

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.5}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_scaling": YARN},
    {"rope_theta": 1e5, "rope_scaling": {**YARN, "beta_fast": 20, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": {**YARN, "attention_factor": 0.9}},
    {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}},
    {"rope_parameters": {**LLAMA3, "rope_theta": 9999.0}},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), tied=True)


def rewritten(llama: Path, folder: Path, **changes: Any) -> Path:
    """The model with another config; None removes a key. Weights are shared."""
    values = json.loads((llama / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    (folder / "model.safetensors").symlink_to(llama / "model.safetensors")
    return folder


def read(folder: Path) -> DecoderConfig:
    return DecoderConfig.from_folder(folder, ModelSpec.from_folder(folder))


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_frequencies_are_hugging_faces(llama: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = rewritten(llama, tmp_path, **{"rope_parameters": None, "rope_theta": None, **rope})
    values = json.loads((folder / "config.json").read_text())
    config = read(folder)
    frequencies, factor = frequencies_and_factor(config.rope, config.head_dim)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(values))
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_tables_grow_and_keep_what_they_had(llama: Path) -> None:
    tables = RotaryTables(read(llama).rope, 16, "cpu")
    before = tables.cosines.clone()
    tables.require(5000)
    assert len(tables.cosines) == len(tables.sines) == 8192
    assert torch.equal(tables.cosines[: len(before)], before)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "no activation gelu"),
    ({"partial_rotary_factor": 0.5}, "only a part of a head"),
    ({"rms_norm_eps": "small"}, "odd"),
    ({"num_key_value_heads": 3}, "do not fit"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rotary embedding in its config.json is odd"),
]


@pytest.mark.parametrize(("changes", "reason"), UNSUPPORTED, ids=str)
def test_what_the_decoder_cannot_run(llama: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = rewritten(llama, tmp_path, **changes)
    spec = ModelSpec.from_folder(folder)
    with pytest.raises(UnsupportedError, match=reason):
        make_native_stage(folder, spec, 0, 4, torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"native backend cannot run this model: .*--backend auto or transformers"):
        StageRunner.load(folder, 0, (4,), "cpu", "float32", 16, backend="native")


def make_module(folder: Path, backend: Any) -> Any:
    spec = ModelSpec.from_folder(folder)
    return runner_module._make_module(backend, folder, spec, 0, spec.num_layers, torch.float32, "cpu")


def test_auto_takes_the_native_backend_where_it_can(llama: Path, tmp_path: Path) -> None:
    assert isinstance(make_module(llama, "auto"), NativeStage)
    assert isinstance(make_module(llama, "transformers"), TransformersStage)
    assert isinstance(make_module(rewritten(llama, tmp_path, hidden_act="gelu"), "auto"), TransformersStage)
    mixtral = make_tiny_model("MixtralForCausalLM", tmp_path / "mixtral")
    assert isinstance(make_module(mixtral, "auto"), TransformersStage)
    with pytest.raises(ModelError, match="it has no MixtralForCausalLM"):
        make_module(mixtral, "native")


@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [(0, 4), (0, 2), (2, 4)], ids=str)
def test_memory_is_known_before_loading(
    llama: Path, layers: tuple[int, int], dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr("fullbore.model.native.backend.load_library", lambda: None)
    stage = make_native_stage(llama, ModelSpec.from_folder(llama), *layers, dtype, "cpu")
    announced_bytes = stage.weight_bytes()
    stage.load(Checkpoint.open(llama))
    assert announced_bytes == stage.weight_bytes() == sum(map(tensor_bytes, tensors_of(stage, set())))


def tensors_of(thing: object, seen: set[int]) -> list[torch.Tensor]:
    """All weights below an object of the decoder; each once."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in tensors_of(part, seen)]
    if isinstance(thing, Linear):
        return [*tensors_of(thing.weight, seen), *tensors_of(thing.bias, seen)]
    if isinstance(thing, NativeStage | CpuLayers | TorchLayers | LayerWeights):
        return [tensor for part in vars(thing).values() for tensor in tensors_of(part, seen)]
    return []


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model

from fullbore.config import EngineConfig
from fullbore.engine import placement
from fullbore.engine.placement import place_model, stage_weight_bytes
from fullbore.errors import ConfigError
from fullbore.model import device
from fullbore.model.native.build import find_compiler
from fullbore.model.runner import StageRunner
from fullbore.model.spec import ModelSpec


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"), tied=request.param)


def test_model_is_placed(folder: Path) -> None:
    placement = place_model(EngineConfig(model=str(folder), pp_size=3, device="cpu", dtype="float32"))
    assert placement.path == str(folder)
    assert sum(placement.partition) == 4
    assert placement.layer_ranges[0][0] == 0
    assert placement.layer_ranges[-1][1] == 4
    assert placement.devices == ("cpu",) * 3
    assert placement.dtype == "float32"
    assert placement.context_length == 512


def test_estimated_weights_are_what_is_loaded(folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    for partition in ((4,), (1, 3), (1, 1, 2)):
        estimates = stage_weight_bytes(spec, partition, 4)
        for stage, estimate in enumerate(estimates):
            runner = StageRunner.load(folder, stage, partition, "cpu", "float32", 16)
            assert estimate == pytest.approx(runner.weight_bytes, rel=0.02)


def test_settings_override_and_are_checked(folder: Path) -> None:
    config = EngineConfig(model=str(folder), pp_size=2, pp_layer_partition=(1, 3), context_length=100, device="cpu")
    placement = place_model(config)
    assert placement.partition == (1, 3)
    assert placement.context_length == 100
    with pytest.raises(ConfigError, match="adds up to 5"):
        place_model(EngineConfig(model=str(folder), pp_size=2, pp_layer_partition=(2, 3), device="cpu"))
    with pytest.raises(ConfigError, match="--pp-size 5 is more than the model's 4 layers"):
        place_model(EngineConfig(model=str(folder), pp_size=5, device="cpu"))
    with pytest.raises(ConfigError, match="--context-length 513"):
        place_model(EngineConfig(model=str(folder), context_length=513, device="cpu"))


def test_gpus_are_placed_without_touching_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("opens a context"))
    place = place_model(EngineConfig(model=str(folder), pp_size=2))
    assert place.devices == ("cuda:0", "cuda:1")
    assert place.dtype == "float32", "as the checkpoint"
    shared = place_model(EngineConfig(model=str(folder), pp_size=2, devices=("cuda:1", "cuda:1"), dtype="float16"))
    assert (shared.devices, shared.dtype) == (("cuda:1", "cuda:1"), "float16")


def test_own_kernels_compute_in_float32_and_keep_16_bits(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that is fast at bfloat16, too; the other backend computes in bfloat16 there."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(device, "has_native_bfloat16", lambda: True)
    checked: list[list[int]] = []
    monkeypatch.setattr(placement, "check_weights_fit", lambda needed, free, devices: checked.append(needed))
    dtypes = [
        place_model(EngineConfig(model=str(tmp_path), device="cpu", backend=backend, dtype=dtype)).dtype
        for backend, dtype in [("auto", "auto"), ("transformers", "auto"), ("native", "bfloat16")]
    ]
    assert dtypes == ["float32", "bfloat16", "bfloat16"]
    assert checked[0] == checked[1] == checked[2]

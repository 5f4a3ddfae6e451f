"""A stage reads its own tensors, all of them, and no others."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from fullbore.errors import ModelError
from fullbore.model.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint
from fullbore.model.runner import StageRunner

NORM_NAME = "model.norm.weight"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def loaded_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that the test reads, in order."""
    names: list[str] = []
    load_into = Checkpoint.load_into

    def record(self: Checkpoint, name: str, out: torch.Tensor) -> None:
        names.append(name)
        load_into(self, name, out)

    monkeypatch.setattr(Checkpoint, "load_into", record)
    return names


def layer_names(checkpoint: Checkpoint, first: int, end: int) -> list[str]:
    return [name for name in checkpoint.names() if name.startswith("model.layers.") and first <= _layer(name) < end]


def _layer(name: str) -> int:
    return int(name.split(".")[2])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_each_stage_reads_exactly_its_tensors(
    architecture: str, tied: bool, tmp_path: Path, loaded_names: list[str]
) -> None:
    folder = make_tiny_model(architecture, tmp_path, tied=tied, max_shard_size="200KB")
    checkpoint = Checkpoint.open(folder)
    assert len({checkpoint.info(name).file for name in checkpoint.names()}) > 2, "the case must have shards"
    head_name = EMBEDDING_NAME if tied else HEAD_NAME
    expected = [
        [EMBEDDING_NAME, *layer_names(checkpoint, 0, 1)],
        layer_names(checkpoint, 1, 3),
        [*layer_names(checkpoint, 3, 4), NORM_NAME, head_name],
    ]
    for stage in range(3):
        loaded_names.clear()
        progress: list[tuple[int, ...]] = []

        def on_progress(*step: int, progress: list[tuple[int, ...]] = progress) -> None:
            progress.append(step)

        StageRunner.load(folder, stage, (1, 2, 1), "cpu", "float32", 16, on_progress)
        assert sorted(loaded_names) == sorted(expected[stage])
        total_bytes = sum(checkpoint.nbytes(name) for name in expected[stage])
        assert progress == sorted(progress)
        assert progress[-1] == (total_bytes, total_bytes)
        assert {total for _, total in progress} == {total_bytes}


def test_a_tied_stage_alone_reads_the_embedding_once(tmp_path: Path, loaded_names: list[str]) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, tied=True)
    StageRunner.load(folder, 0, (4,), "cpu", "float32", 16)
    assert sorted(loaded_names) == sorted(Checkpoint.open(folder).names())


def test_fused_experts_in_the_file_are_read_as_they_are(tmp_path: Path, loaded_names: list[str]) -> None:
    folder = make_tiny_model("Qwen3MoeForCausalLM", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in Checkpoint.open(tmp_path / "fused")
    StageRunner.load(tmp_path / "fused", 0, (4,), "cpu", "float32", 16)
    assert "model.layers.1.mlp.experts.gate_up_proj" in loaded_names


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a safetensors file, or drops them (None)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    rewrite(folder / "model.safetensors", {"model.layers.2.mlp.up_proj.weight": None})
    StageRunner.load(folder, 0, (2, 2), "cpu", "float32", 16)  # the other stage does not miss them
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        StageRunner.load(folder, 1, (2, 2), "cpu", "float32", 16)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    rewrite(folder / "model.safetensors", {"model.layers.2.mlp.up_proj.weight": torch.zeros(3, 64)})
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \[3, 64\] where config.json asks for \[128, 64\]"):
        StageRunner.load(folder, 1, (2, 2), "cpu", "float32", 16)


# ---------------------------------------------------------------------------------------------------------- memory

_MEASURE = """
import sys
from pathlib import Path
from fullbore.model.runner import StageRunner
runner = StageRunner.load(Path(sys.argv[1]), 1, (6, 2), "cpu", sys.argv[2], 16)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(runner.weight_bytes, int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_little_more_memory_than_the_stages_weights(tmp_path: Path, dtype: str) -> None:
    folder = make_sparse_llama(tmp_path, num_layers=8, hidden_size=2048, intermediate_size=5632)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    output = subprocess.run(
        [sys.executable, "-c", _MEASURE, folder, dtype], check=True, capture_output=True, text=True, env=environment
    ).stdout
    weight_bytes, peak_bytes = map(int, output.split())
    limit_bytes = 1.3 * weight_bytes + 400e6
    assert weight_bytes < peak_bytes <= limit_bytes
    assert 4 * weight_bytes > limit_bytes, "reading all layers would have shown"


def make_sparse_llama(folder: Path, num_layers: int, hidden_size: int, intermediate_size: int) -> Path:
    """A bfloat16 checkpoint of zeros that takes no disk space."""
    make_tiny_model("LlamaForCausalLM", folder, tied=True, num_layers=num_layers, max_shard_size="1GB")
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=hidden_size, intermediate_size=intermediate_size, head_dim=hidden_size // 4)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {64: hidden_size, 128: intermediate_size, 32: hidden_size // 2}
    old = Checkpoint.open(folder)
    header, offset = {}, 0
    for name in old.names():
        shape = [sizes.get(size, size) for size in old.shape(name)]
        end = offset + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + offset)
    return folder

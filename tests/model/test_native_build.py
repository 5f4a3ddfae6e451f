"""Building the C++ kernels: once, also for several processes at once, and never a reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model

from fullbore.model.native import backend, build
from fullbore.model.native.build import find_compiler, load_library
from fullbore.model.native.cpu_kernels import CpuKernels
from fullbore.model.native.kernels import HeadShape
from fullbore.model.native.torch_kernels import TorchKernels

SHAPE = HeadShape(4, 2, 16)
REPOSITORY = Path(__file__).parents[2]
TRIVIAL = 'extern "C" int fb_lanes() { return 4; }\n'


@pytest.fixture(autouse=True)
def forget_the_library() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that builds fast in the place of the kernels, and a cache that is empty."""
    folder = tmp_path / "cpp"
    folder.mkdir()
    (folder / "kernels.cpp").write_text(TRIVIAL)
    monkeypatch.setattr(build, "_SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def libraries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache/fullbore/kernels").iterdir() if path.suffix == ".so")


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@needs_compiler
def test_built_once_and_again_when_the_source_changes(
    sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = load_library()
    assert library is not None
    assert library.fb_lanes() == 4
    assert "Building the CPU kernels" in capfd.readouterr().err
    load_library.cache_clear()
    assert load_library() is not None
    assert capfd.readouterr().err == ""
    (sources / "kernels.cpp").write_text(TRIVIAL.replace("4", "5"))
    load_library.cache_clear()
    library = load_library()
    assert library is not None
    assert library.fb_lanes() == 5
    assert len(libraries(tmp_path)) == 2


@needs_compiler
def test_a_build_that_fails_is_said_and_leaves_nothing(
    sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (sources / "kernels.cpp").write_text("nonsense")
    assert load_library() is None
    assert "could not be built" in capfd.readouterr().err
    assert libraries(tmp_path) == []
    assert isinstance(backend.choose_kernels(torch.float32, "cpu", SHAPE), TorchKernels)


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert isinstance(backend.choose_kernels(torch.float32, "cpu", SHAPE), TorchKernels)
    assert capfd.readouterr().err == ""


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_failure(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_library() is None


@needs_compiler
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """With the real sources; both get the library, and only one builds."""
    program = "from fullbore.model.native.build import load_library; print(load_library().fb_lanes())"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("Building" in errors for _, errors in outputs) == 1
    assert len(libraries(tmp_path)) == 1


@needs_compiler
def test_the_kernels_are_chosen_where_they_can_compute() -> None:
    assert isinstance(backend.choose_kernels(torch.float32, "cpu", SHAPE), CpuKernels)
    assert isinstance(backend.choose_kernels(torch.float16, "cpu", SHAPE), TorchKernels)


def test_no_stage_of_the_native_backend_imports_transformers(tmp_path: Path) -> None:
    """It takes seconds."""
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    program = (
        "import sys; from pathlib import Path; from fullbore.model.runner import StageRunner; "
        "StageRunner.load(Path(sys.argv[1]), 0, (2, 2), 'cpu', 'float32', 16); print('transformers' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", program, folder], check=True, capture_output=True, text=True, env=environment
    )
    assert result.stdout.strip() == "False"

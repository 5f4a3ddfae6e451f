"""The same evidence in the forms that other tools give it: the same verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fullbore.explain.run import explain

CASES = Path(__file__).parent.parent / "data" / "cases"
CASE = CASES / "02-eight-requests-pp8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(CASE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected.json"))
    return tmp_path


def rewrite(folder: Path, name: str, text: str | bytes) -> None:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def used(folder: Path, name: str) -> bool:
    answer = explain([folder]).answer
    assert answer["primary"] == "packed-slot"
    return next(file["used"] for file in answer["recognised"] if file["file"] == name)


@pytest.mark.parametrize("key", ["log", "message", "MESSAGE", "line"])
def test_log_lines_wrapped_into_json(folder: Path, key: str) -> None:
    lines = (folder / "server.log").read_text().splitlines()
    rewrite(folder, "server.log", "\n".join(json.dumps({"time": "x", key: line + "\n"}) for line in lines))
    assert used(folder, "server.log")


def test_a_log_with_a_hole(folder: Path) -> None:
    """Rotated by copying and truncating while it was written to."""
    log = (folder / "server.log").read_bytes()
    rewrite(folder, "server.log", b"\0" * 20_000 + log)
    assert used(folder, "server.log")


def test_quoted_words_of_a_yaml_list(folder: Path) -> None:
    words = (folder / "launch.txt").read_text().replace("\\\n", " ").split()
    items = "".join(f'      - "{word}"\n' for word in words if not word.startswith("CUDA"))
    rewrite(folder, "launch.txt", f"services:\n  one:\n    image: vllm/vllm-openai\n    command:\n{items}")
    assert used(folder, "launch.txt")


def test_renamed_columns(folder: Path) -> None:
    text = (folder / "nvidia-smi.csv").read_text()
    for name, other in (
        ("utilization.gpu [%]", "gpu_util"),
        ("power.draw [W]", "power_watts"),
        ("memory.used [MiB]", "mem_used"),
        ("clocks.current.sm [MHz]", "sm_clock"),
    ):
        assert name in text
        text = text.replace(name, other)
    rewrite(folder, "nvidia-smi.csv", text)
    facts = " ".join(fact["text"] for fact in explain([folder]).answer["facts"])
    assert "GPU 0 (NVIDIA RTX PRO 6000 Blackwell Server Edition) under load: " in facts
    assert "% utilised" in facts
    assert used(folder, "nvidia-smi.csv")


def test_two_engines_in_one_folder_are_never_near_certain(tmp_path: Path) -> None:
    for name in ("02-eight-requests-pp8", "03-burst-on-two-stages"):
        shutil.copytree(CASES / name, tmp_path / name, ignore=shutil.ignore_patterns("expected.json"))
    answer = explain([tmp_path]).answer
    assert answer["verdicts"][0]["confidence"] == "likely"
    assert any("sglang and vllm together" in problem for problem in answer["problems"])

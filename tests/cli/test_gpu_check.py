"""benchmarks/gpu_check.sh where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From another folder, with GPUs hidden if there are any."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "TMPDIR": str(folder)}
    return subprocess.run(
        [str(SCRIPT), *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def test_without_a_gpu_it_says_so_and_ends(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "no CUDA device: torch sees none, so there is nothing to check; see `nvidia-smi`.\n"


@pytest.mark.slow
def test_what_there_was_no_time_for_is_not_called_right(tmp_path: Path) -> None:
    result = run(tmp_path, "--rehearse", "--limit-s", "0")
    assert result.returncode == 1, result.stderr
    lines = [line for line in result.stdout.splitlines() if "not run" in line]
    assert len(lines) == 12
    assert all(line.startswith("WRONG ") for line in lines)
    assert "12 wrong" in result.stdout
    assert list(tmp_path.glob("fullbore*")) == [], "the model that it made is gone"

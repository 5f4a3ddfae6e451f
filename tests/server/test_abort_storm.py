"""Clients that leave at random moments, a thousand of them; benchmarks/abort_storm.py sends ten thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import VOCAB_SIZE, make_byte_tokenizer

STORM = Path(__file__).parents[2] / "benchmarks" / "abort_storm.py"


@pytest.mark.slow
def test_nothing_is_left_and_nothing_is_wrong(tmp_path: Path) -> None:
    """Nobody's text changes, gauges are 0, memory is flat, and stages agree about what they ran."""
    make_byte_tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, STORM, "--requests", "1000", "--tokenizer-path", tmp_path, "--vocab", str(VOCAB_SIZE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing is wrong." in result.stdout

"""docs/scheduling.md shows what its commands print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "refresh.py"
NUMBER = re.compile(r"\d+\.?\d*")
KEPT = ("output tokens/s", "TTFT", "ITL", "stages busy", "Whole run")


def numbers(page: str) -> list[tuple[str, list[float]]]:
    """The figures below each command."""
    lines = [line for line in page.splitlines() if line.strip().startswith(KEPT)]
    return [(line, [float(number) for number in NUMBER.findall(line)]) for line in lines]


def test_the_page_is_up_to_date() -> None:
    """Within 3 %: the last digit may depend on the Python version. `python docs/refresh.py` brings it up to date."""
    spec = importlib.util.spec_from_file_location("refresh", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    refresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(refresh)
    page = refresh.PAGE.read_text(encoding="utf-8")
    shown, fresh = numbers(page), numbers(refresh.refreshed(page))
    assert len(shown) == len(fresh) > 40
    for (line, old), (fresh_line, new) in zip(shown, fresh, strict=True):
        assert new == pytest.approx(old, rel=0.03, abs=0.5), f"python docs/refresh.py: {line!r} is now {fresh_line!r}"

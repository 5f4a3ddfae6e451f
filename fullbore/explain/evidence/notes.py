"""Facts that a user typed in: free-form JSON, flattened to paths."""

from __future__ import annotations

import re
from typing import Any

from fullbore.explain.facts import Reading, Source

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
_MAX_NOTES = 500
_LARGEST = 1e18  # larger ones are typing errors


def read(tree: dict[str, Any], file: str, text: str) -> dict[str, Reading]:
    """Path (`last_week.tok_s`) -> value. Lists of numbers stay lists."""
    notes: dict[str, Reading] = {}
    lines = text.splitlines()
    _flatten(tree, "", file, lines, notes)
    return notes


def _flatten(tree: dict[str, Any], prefix: str, file: str, lines: list[str], notes: dict[str, Reading]) -> None:
    for key, value in tree.items():
        if len(notes) >= _MAX_NOTES:
            return
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            _flatten(value, f"{path}.", file, lines, notes)
        elif value is not None and not (isinstance(value, int | float) and abs(value) >= _LARGEST):
            notes[path] = Reading(path, value, Source(file, _line_of(f'"{key}"', lines)))


def _line_of(needle: str, lines: list[str]) -> int | None:
    return next((number for number, line in enumerate(lines, 1) if needle in line), None)


def numbers_in(value: Any) -> list[float]:
    """The numbers in a note: 40.0 -> [40], "24 to 28" -> [24, 28], [291, 290] -> [291, 290]."""
    found: list[float] = []
    if isinstance(value, str):
        found = [float(n.replace(",", "")) for n in _NUMBER.findall(value)]
    else:
        for v in value if isinstance(value, list) else [value]:
            if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _LARGEST:
                found.append(float(v))
    return [n for n in found if n < _LARGEST]

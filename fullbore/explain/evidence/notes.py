"""Facts that a user typed in: free-form JSON, flattened to paths."""

from __future__ import annotations

import re
from typing import Any

from fullbore.explain.facts import Reading, Source

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
_TEXT_NOTE = re.compile(r"^\s*(?:[-*]\s+)?([A-Za-z][\w /().-]{1,40}?)\s*[:=]\s+(\S.*)$")
_MAX_NOTES = 500
_LARGEST = 1e18  # larger ones are typing errors


def read(tree: dict[str, Any], file: str, text: str) -> dict[str, Reading]:
    """Path (`last_week.tok_s`) -> value. Lists of numbers stay lists."""
    notes: dict[str, Reading] = {}
    lines = text.splitlines()
    _flatten(tree, "", file, lines, notes)
    return notes


def read_lines(lines: list[str], file: str) -> dict[str, Reading]:
    """Notes as text, a `key: value` or `key = value` on a line; {} when most lines are something else."""
    found: dict[str, Reading] = {}
    others = 0
    for number, line in enumerate(lines[:_MAX_NOTES], 1):
        match = _TEXT_NOTE.match(line)
        if match is None:
            others += bool(line.strip())
            continue
        key = re.sub(r"\W+", "_", match[1].strip().lower())
        numbers = numbers_in(match[2]) if re.fullmatch(r"-?[\d,.]+", match[2].strip()) else []
        found[key] = Reading(key, numbers[0] if len(numbers) == 1 else match[2].strip(), Source(file, number))
    return found if len(found) > others else {}


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

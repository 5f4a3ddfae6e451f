"""Timestamps of log lines, as seconds on a scale that only differences are taken of."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)")
_NO_YEAR = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_SEARCHED_CHARS = 90
_EPOCH = datetime(2000, 1, 1)  # any: no time zones, only differences


def log_time_s(line: str) -> float | None:
    """Seconds of the first timestamp near the start of a line; lines without a year are taken to be of one year."""
    if line.startswith("[20"):  # SGLang's lines, of which there can be millions
        return _seconds_of(line[:21])
    start = line.find("[20", 0, _SEARCHED_CHARS)
    if start > 0 and _ISO.match(line, start + 1):  # the engine's own time, not a container runtime's before it
        return _seconds_of(line[start : start + 21])
    return _seconds_of(line[:_SEARCHED_CHARS])


@lru_cache(maxsize=1024)
def _seconds_of(text: str) -> float | None:
    match = _ISO.search(text)
    if match is not None:
        return _seconds(match.groups())
    match = _NO_YEAR.search(text)
    return _seconds(("2000", *match.groups())) if match is not None else None


def _seconds(parts: tuple[str, ...]) -> float | None:
    try:
        year, month, day, hour, minute, second = (int(part) for part in parts)
        return (datetime(year, month, day, hour, minute, min(second, 59)) - _EPOCH).total_seconds()
    except ValueError:
        return None

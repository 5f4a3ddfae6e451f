"""Who was on which stage when, drawn as text: one row per stage, one column per slice of time.

Each micro-batch has a letter, in order of launch: lower case for decodes alone, upper case with prompt tokens in it;
a dot is an idle stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from string import ascii_lowercase

from fullbore.telemetry.spans import DriverRecord, StageRecord

IDLE = "."
_COLUMNS_PER_TICK = 12


@dataclass(frozen=True)
class Bar:
    """One micro-batch on one stage; `letter` is upper case if it carries prompt tokens."""

    stage: int
    start_s: float
    end_s: float
    letter: str


def bars(spans: Sequence[StageRecord], driver_records: Sequence[DriverRecord]) -> list[Bar]:
    """What stages did, as bars of a chart."""
    with_prompt = {r.micro_batch_id for r in driver_records if r.event == "launch" and r.prefill_tokens > 0}
    found = []
    for record in spans:
        letter = ascii_lowercase[record.micro_batch_id % len(ascii_lowercase)]
        letter = letter.upper() if record.micro_batch_id in with_prompt else letter
        found.append(Bar(record.stage, record.compute_start_ns * 1e-9, record.sample_end_ns * 1e-9, letter))
    return found


def draw(chart: Sequence[Bar], num_stages: int, start_s: float, end_s: float, columns: int) -> list[str]:
    """One line of `columns` characters per stage: in each slice of time whoever had most of it, if it was half busy."""
    slice_s = (end_s - start_s) / columns
    shares: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(num_stages)]
    for bar in chart:
        first = max(int((bar.start_s - start_s) / slice_s), 0)
        last = min(int((bar.end_s - start_s) / slice_s), columns - 1)
        for column in range(first, last + 1):
            slice_start_s = start_s + column * slice_s
            overlap_s = min(bar.end_s, slice_start_s + slice_s) - max(bar.start_s, slice_start_s)
            if overlap_s > 0:
                share = shares[bar.stage][column]
                share[bar.letter] = share.get(bar.letter, 0.0) + overlap_s
    return ["".join(_cell(share, slice_s) for share in row) for row in shares]


def _cell(share: dict[str, float], slice_s: float) -> str:
    if sum(share.values()) < slice_s * 0.4999:
        return IDLE
    return max(share, key=lambda letter: share[letter])


def ruler(start_s: float, end_s: float, columns: int) -> str:
    """Round times in ms above the columns that they belong to."""
    column_ms = (end_s - start_s) * 1e3 / columns
    tick_ms = _round_up(_COLUMNS_PER_TICK * column_ms)
    line = [" "] * columns
    tick = ceil(start_s * 1e3 / tick_ms)
    while (column := round((tick * tick_ms - start_s * 1e3) / column_ms)) < columns:
        text = f"|{tick * tick_ms:g} ms"
        if column + len(text) <= columns:
            line[column : column + len(text)] = text
        tick += 1
    return "".join(line)


def _round_up(value: float) -> float:
    """The next of …, 1, 2, 5, 10, 20, 50, …"""
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))

"""The timeline of a simulation as a picture. Needs matplotlib, an optional dependency."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fullbore.plan.measure import SimulationResult
from fullbore.plan.timeline import bars

_COLOURS = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb"]  # told apart by everyone


def write_timeline(path: Path, result: SimulationResult, start_s: float, end_s: float) -> None:
    """One row per stage; each micro-batch keeps its colour; those with prompt tokens are hatched.

    Raises:
        OSError: the file cannot be written.
        ValueError: its name's ending is no picture format.
    """
    num_stages = len(result.steady.stage_busy)
    figure = Figure(figsize=(14, 1.5 + 0.4 * num_stages), layout="constrained")
    axes = figure.add_subplot()
    for bar in bars(result.spans, result.driver_records):
        if bar.end_s <= start_s or bar.start_s >= end_s:
            continue
        colour = _COLOURS[(ord(bar.letter.lower()) - ord("a")) % len(_COLOURS)]
        left_ms, width_ms = bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3
        hatch = "///" if bar.letter.isupper() else None
        axes.barh(bar.stage, width_ms, left=left_ms, height=0.8, color=colour, edgecolor="white", hatch=hatch)
    axes.set_xlim(start_s * 1e3, end_s * 1e3)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {i}" for i in range(num_stages)])
    axes.set_xlabel("ms (hatched: with prompt tokens)")
    busy = result.steady.stage_busy
    axes.set_title(
        f"{result.steady.output_tokens_per_s:.1f} output tokens/s, "
        f"stages {100 * min(busy):.1f} to {100 * max(busy):.1f} % busy in the steady state"
    )
    figure.savefig(path, dpi=120)

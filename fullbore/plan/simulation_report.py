"""The answer of `fullbore simulate`, as text and as JSON."""

from __future__ import annotations

from typing import Any

from fullbore.plan.measure import Figures, Latency, SimulationResult
from fullbore.plan.timeline import bars, draw, ruler

WIDTH = 80
_LEGEND = "a-z: decodes, A-Z: with prompt tokens, .: idle; right: steady state"


def drawing(result: SimulationResult, start_s: float, end_s: float) -> str:
    """The first part of the run, a row per stage; needs a result with records up to `end_s`."""
    busy = result.steady.stage_busy
    label = len(str(len(busy) - 1)) + len("stage ")
    columns = WIDTH - label - len(" || 100.0%")
    rows = draw(bars(result.spans, result.driver_records), len(busy), start_s, end_s, columns)
    lines = [" " * (label + 2) + ruler(start_s, end_s, columns)]
    for stage, row in enumerate(rows):
        lines.append(f"{f'stage {stage}':>{label}} |{row}| {100 * busy[stage]:5.1f}%")
    return "\n".join([*(line.rstrip() for line in lines), " " * (label + 2) + _LEGEND])


def summary(result: SimulationResult) -> str:
    """Figures of the steady state, and of the whole run in one line."""
    steady, whole = result.steady, result.whole
    sizes = ", ".join(f"{number}×{size}" for size, number in _most_used(steady.sizes))
    return "\n".join(
        [
            f"Steady state ({steady.start_s:.3f} s to {steady.end_s:.3f} s of {whole.end_s:.3f} s)",
            f"  output tokens/s  {steady.output_tokens_per_s:.1f}   (with prompts: {steady.total_tokens_per_s:.1f})",
            f"  TTFT             {_latency(steady.ttft)}",
            f"  ITL              {_latency(steady.itl)}",
            f"  stages busy      {_range(steady.stage_busy)}",
            f"  micro-batches    {steady.micro_batches_in_flight_mean:.2f} in flight, "
            f"{steady.requests_per_micro_batch:.2f} requests each: {sizes}",
            f"Whole run, fill and drain included: {whole.output_tokens_per_s:.1f} output tokens/s, "
            f"stages busy {_range(whole.stage_busy)}"
            + (f", {result.preemptions} preemptions" if result.preemptions else ""),
        ]
    )


def to_json(result: SimulationResult) -> dict[str, Any]:
    """Plain types; times in seconds. The steady state on top, the same of the whole run under `whole_run`."""
    whole = _figures_json(result.whole)
    return {**_figures_json(result.steady), "preemptions": result.preemptions, "whole_run": whole}


def _figures_json(figures: Figures) -> dict[str, Any]:
    return {
        "output_tokens_per_s": figures.output_tokens_per_s,
        "total_tokens_per_s": figures.total_tokens_per_s,
        **_latency_json("ttft", figures.ttft),
        **_latency_json("itl", figures.itl),
        "stage_busy": figures.stage_busy,
        "micro_batches_in_flight_mean": figures.micro_batches_in_flight_mean,
        "requests_per_micro_batch": figures.requests_per_micro_batch,
        "micro_batch_sizes": {str(size): number for size, number in figures.sizes.items()},
        "window_s": [figures.start_s, figures.end_s],
    }


def _latency_json(name: str, latency: Latency) -> dict[str, float]:
    return {f"{name}_s": latency.mean_s, f"{name}_p50_s": latency.p50_s, f"{name}_p99_s": latency.p99_s}


def _latency(latency: Latency) -> str:
    mean, p50, p99 = (f"{seconds * 1e3:.4g}" for seconds in (latency.mean_s, latency.p50_s, latency.p99_s))
    return f"{mean} ms mean, {p50} p50, {p99} p99"


def _range(busy: list[float]) -> str:
    low, high = (f"{100 * value:.1f}" for value in (min(busy), max(busy)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _most_used(sizes: dict[int, int], most: int = 4) -> list[tuple[int, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])[:most]

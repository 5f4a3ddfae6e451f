"""`fullbore simulate`: the scheduler over simulated stages, tried by hand."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullbore.cli_options import takes_settings
from fullbore.errors import ConfigError, RequestError
from fullbore.plan.simulation_settings import SimulationSettings

if TYPE_CHECKING:
    from fullbore.plan.measure import SimulationResult

DRAWN_STAGE_TIMES = 30
# Of drawings: between them, a column is more than what floating-point numbers of seconds can tell apart.
SHORTEST_DRAWN_S = 1e-6
LATEST_DRAWN_S = 1e6


@takes_settings(SimulationSettings)
def simulate(
    settings: SimulationSettings,
    draw_ms: Annotated[
        float | None, typer.Option(help="How much to draw; default: 30 stage times. 0: nothing.", show_default=False)
    ] = None,
    draw_from_ms: Annotated[float, typer.Option(help="Where the drawing begins.")] = 0.0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a picture too (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Run the scheduler over simulated stages on a virtual clock: tokens/s, latencies, what each stage did when."""
    from fullbore.plan.simulation_report import drawing, summary, to_json

    settings.validate()
    times_s = settings.stage_times_s()
    span_s = DRAWN_STAGE_TIMES * sum(times_s) / len(times_s) if draw_ms is None else draw_ms * 1e-3
    start_s = draw_from_ms * 1e-3
    if not (0 <= start_s <= LATEST_DRAWN_S and (span_s == 0 or SHORTEST_DRAWN_S <= span_s <= LATEST_DRAWN_S)):
        raise ConfigError(
            f"--draw-from-ms must be at least 0, --draw-ms 0 or at least {SHORTEST_DRAWN_S * 1e3:g}, and both at most "
            f"{LATEST_DRAWN_S * 1e3:g}."
        )
    if png is not None:
        _check_png(span_s)
    result = _run(settings, start_s + span_s if span_s else -1.0)
    if png is not None:
        _write_png(png, result, start_s, start_s + span_s)
    if as_json:
        print(json.dumps(to_json(result), indent=1))
        return
    if span_s:
        print(drawing(result, start_s, start_s + span_s), end="\n\n")
    print(summary(result))


def _run(settings: SimulationSettings, record_until_s: float) -> SimulationResult:
    from fullbore.plan.simulate import simulate as run
    from fullbore.progress import WorkProgress

    with WorkProgress("Requests") as progress:
        try:
            return run(
                settings.pipeline(),
                settings.scheduler(),
                settings.workload(),
                is_probed=not settings.no_probe,
                learns=not settings.no_learning,
                record_until_s=record_until_s,
                on_progress=progress.update,
            )
        except RequestError as error:
            raise ConfigError(f"{error} Give more --kv-blocks, or shorter requests.") from None


def _check_png(span_s: float) -> None:
    if span_s == 0:
        raise ConfigError("--png needs something to draw; leave out --draw-ms 0.")
    if find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib; install it with: pip install matplotlib")


def _write_png(path: Path, result: SimulationResult, start_s: float, end_s: float) -> None:
    from fullbore.cli_figure import write_timeline

    try:
        write_timeline(path, result, start_s, end_s)
    except (OSError, ValueError) as error:  # ValueError: no picture format
        raise ConfigError(f"--png {path} cannot be written: {error}") from None

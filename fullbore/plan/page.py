"""Predictions as one HTML page with charts: self-contained, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fullbore.plan.chart import Series, chart
from fullbore.plan.commands import commands
from fullbore.plan.predict import Prediction
from fullbore.plan.report import memory_text, prediction_cells, scenario_text
from fullbore.plan.scenario import Scenario
from fullbore.plan.search import pareto

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #212529; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #dee2e6; }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
tr.pick { background: #e7f5ff; font-weight: 600; }
pre { background: #f1f3f5; padding: 10px; overflow-x: auto; }
svg { max-width: 720px; width: 100%; height: auto; display: block; margin: 1em 0; }
"""


def page(scenario: Scenario, predictions: Sequence[Prediction], pick: Prediction | None, remarks: Sequence[str]) -> str:
    """The whole page."""
    title = f"fullbore plan: {scenario.model.name} on {scenario.hardware.describe()}"
    parts = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(scenario_text(scenario))}</pre>", *charts(predictions)]
    parts.append(_table(predictions, pick))
    if pick is not None:
        name = f"{pick.deployment.layout.name} at concurrency {pick.concurrency}"
        parts.append(f"<h2>{escape(name)}</h2><pre>{escape(memory_text(pick.deployment))}</pre>")
        parts += [
            f"<h3>{escape(engine)}</h3><pre>{escape(command)}</pre>" for engine, command in commands(pick).items()
        ]
    notes = dict.fromkeys([*remarks, *(note for each in predictions for note in each.notes)])
    if notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def charts(predictions: Sequence[Prediction]) -> list[str]:
    """Throughput by concurrency with its range, time between tokens, and users against devices."""
    by_layout: dict[str, list[Prediction]] = {}
    for each in predictions:
        by_layout.setdefault(each.deployment.layout.name, []).append(each)
    lines = {name: sorted(group, key=lambda each: each.concurrency) for name, group in by_layout.items()}
    throughput = [
        Series(
            name,
            [(each.concurrency, each.output_tok_s) for each in group],
            band=[each.range for each in group] if len(lines) <= 3 else (),
        )
        for name, group in lines.items()
    ]
    token_time = [
        Series(name, [(each.concurrency, 1e3 * each.itl_s) for each in group]) for name, group in lines.items()
    ]
    spots = [
        Series(name, [(each.tok_s_per_user, each.tok_s_per_device) for each in group], is_line=False)
        for name, group in lines.items()
    ]
    front = [(each.tok_s_per_user, each.tok_s_per_device) for each in pareto(predictions)]
    return [
        chart("Output tokens/s", "concurrency", "tokens/s", throughput, log_x=True, log_y=True),
        chart("Time between tokens", "concurrency", "ms", token_time, log_x=True, log_y=True),
        chart(
            "Per user against per device",
            "tokens/s per user",
            "tokens/s per device",
            [*spots, Series("not beaten", front)],
            log_x=True,
            log_y=True,
        ),
    ]


def _table(predictions: Sequence[Prediction], pick: Prediction | None) -> str:
    header, rows = prediction_cells(predictions)
    lines = ["<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    for each, row in zip(predictions, rows, strict=True):
        mark = ' class="pick"' if each is pick else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table>"])

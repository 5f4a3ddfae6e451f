"""Predictions as text: what was given, a table, what is left over, the commands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fullbore.plan.commands import commands
from fullbore.plan.predict import Prediction
from fullbore.plan.scenario import Deployment, Scenario
from fullbore.plan.search import SearchResult, Slo

GB = 1e9
WIDTH = 80
MOST_UNFIT = 6  # shown one by one


def table(header: Sequence[str], rows: Sequence[Sequence[str]], gap: str = "  ") -> str:
    """Columns aligned to the right, the first to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)


def scenario_text(scenario: Scenario) -> str:
    """The model and the hardware in two lines."""
    model, demand = scenario.model, scenario.demand
    cache_bytes = model.cache_elements_per_token() * scenario.cache_bytes_per_element
    devices = {device.name: device for device in scenario.hardware.devices}
    cards = ", ".join(
        f"{each.name}: {each.memory_bytes / GB:.0f} GB, {each.bandwidth_bytes_s / GB:.0f} GB/s"
        for each in devices.values()
    )
    asked = f"{demand.input_tokens} tokens in, {demand.output_tokens} out"
    if demand.rate_per_s is not None:
        asked += f", {demand.rate_per_s:g} requests/s"
    if demand.prefix_hit_rate:
        asked += f", {demand.prefix_hit_rate:.0%} of each prompt cached"
    return "\n".join(
        [
            f"{model.name}: {model.weight_bytes / GB:.1f} GB of weights, "
            f"{model.bytes_read(1) / GB:.1f} GB read for one token,",
            f"  {cache_bytes / 1024:.1f} KiB of cache per token",
            _wrapped(f"{scenario.hardware.describe()} ({cards})", "", "  "),
            f"{asked}; scheduled as {scenario.engine.name} does",
        ]
    )


_HEADER = (
    "layout", "C", "tok/s", "90 % range", "per user", "per GPU", "TTFT s", "ITL ms", "busy %", "in flight", "bound by",
)  # fmt: skip


_SHORT_HEADER = ("layout", "C", "tok/s", "90 %", "/user", "/dev", "TTFT s", "ITL ms", "busy", "m x b", "time in")
LEGEND = (
    "C: clients; tok/s: output tokens/s in all, with the range in which it lies nine\n"
    "times in ten, for one user, and per device; busy: % of its time that a stage\n"
    "computes, * where there are fewer requests than stages, ! where it idles for\n"
    "another cause (see --json); m x b: micro-batches in flight x requests in each;\n"
    "time in: what most of the computing goes to. PP: pipeline stages, TP: tensor-\n"
    "parallel ranks per stage, DEP: ranks that divide only the experts."
)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """One line per prediction, within 80 columns."""
    return table(_SHORT_HEADER, [_short_row(each) for each in predictions], gap=" ")


def _short_row(each: Prediction) -> list[str]:
    *idle, work = each.bound_by.split(", ")
    mark = "" if not idle else "*" if idle == ["few-requests"] else "!"
    return [
        each.deployment.layout.name,
        str(each.concurrency),
        _number(each.output_tok_s),
        "-".join(f"{end:.0f}" for end in each.range),
        _number(each.tok_s_per_user),
        _number(each.tok_s_per_device),
        f"{each.ttft_s:.2f}",
        f"{1e3 * each.itl_s:.1f}",
        f"{min(each.stage_busy):.0%}"[:-1] + mark,
        f"{each.micro_batches:.1f}x{each.micro_batch_size:.1f}",
        work,
    ]


def prediction_cells(predictions: Sequence[Prediction]) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows."""
    return _HEADER, [_row(each) for each in predictions]


def _row(each: Prediction) -> list[str]:
    busy = [f"{share:.0%}"[:-1] for share in (min(each.stage_busy), max(each.stage_busy))]
    return [
        each.deployment.layout.name,
        str(each.concurrency),
        _number(each.output_tok_s),
        "-".join(_number(end) for end in each.range),
        _number(each.tok_s_per_user),
        _number(each.tok_s_per_device),
        f"{each.ttft_s:.3g}",
        f"{1e3 * each.itl_s:.3g}",
        busy[0] if busy[0] == busy[1] else "-".join(busy),
        f"{each.micro_batches:.1f} x {each.micro_batch_size:.1f}",
        each.bound_by,
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def memory_text(deployment: Deployment) -> str:
    """Where the memory goes, and what no request can use."""
    rows = []
    for stage, planned, stranded in zip(
        deployment.stages, deployment.memory.stages, deployment.memory.stranded_bytes, strict=True
    ):
        rows.append(
            [
                f"{stage.index}: layers {stage.first_layer}-{stage.end_layer - 1}",
                " + ".join(dict.fromkeys(device.name for device in stage.devices)) + f" x{stage.tp}",
                f"{planned.weight_bytes / GB:.1f}",
                f"{planned.buffer_bytes / GB:.1f}",
                f"{planned.cache_bytes / GB:.1f}",
                f"{stranded / GB:.1f}",
            ]
        )
    text = table(("stage (GB)", "device", "weights", "buffers", "cache", "stranded"), rows)
    cache_tokens = deployment.memory.cache_tokens
    return f"{text}\nKV cache: {cache_tokens} tokens per replica, as many as the smallest stage holds"


def notes_text(predictions: Sequence[Prediction]) -> str:
    """Every note once."""
    notes = dict.fromkeys(note for each in predictions for note in each.notes)
    return "\n".join(_wrapped(f"note: {note}", "") for note in notes)


def commands_text(prediction: Prediction) -> str:
    """One command a line, however long, so that it can be copied; remarks above it."""
    lines = []
    for engine, command in commands(prediction).items():
        words, _, remark = command.partition("  # ")
        lines.append(_wrapped(f"# {engine}" + (f": {remark}" if remark else ""), "", "# "))
        lines.append(words)
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "  ", hanging: str = "    ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=hanging)


def evaluation_text(scenario: Scenario, predictions: Sequence[Prediction]) -> str:
    """One layout."""
    deployment = predictions[0].deployment
    parts = [
        scenario_text(scenario),
        f"{prediction_table(predictions)}\n{LEGEND}",
        memory_text(deployment),
        notes_text(predictions),
        commands_text(predictions[-1]),
    ]
    return "\n\n".join(part for part in parts if part)


def search_text(scenario: Scenario, result: SearchResult, slo: Slo) -> str:
    """All layouts: the Pareto front, what was left out and why, the pick."""
    parts = [scenario_text(scenario)]
    parts.append(f"Every layout and concurrency:\n{prediction_table(result.predictions)}\n{LEGEND}")
    parts.append("Not beaten in both tokens/s per user and per GPU:\n" + prediction_table(result.pareto))
    if result.unfit:
        lines = [_wrapped(f"{each.layout.name}: {each.problem}") for each in result.unfit[:MOST_UNFIT]]
        more = len(result.unfit) - len(lines)
        parts.append("\n".join(["Does not fit:", *lines] + ([f"  … and {more} more"] if more > 0 else [])))
    if result.dropped:
        names = ", ".join(each.layout.name for each in result.dropped)
        parts.append(_wrapped(f"Not simulated, since a formula puts them far behind at every concurrency: {names}", ""))
    if result.pick is not None:
        parts.append(f"{_reason(result, slo)}\n{prediction_table([result.pick])}")
        parts.append(memory_text(result.pick.deployment))
        parts.append(notes_text([result.pick]))
        parts.append(commands_text(result.pick))
    return "\n\n".join(part for part in parts if part)


def _reason(result: SearchResult, slo: Slo) -> str:
    bounds = []
    if slo.ttft_s is not None:
        bounds.append(f"TTFT {slo.ttft_s:g} s")
    if slo.itl_s is not None:
        bounds.append(f"ITL {1e3 * slo.itl_s:g} ms")
    if not bounds:
        return "The pick (no SLO was given: the most tokens/s):"
    if result.is_slo_met:
        return f"The pick (the most tokens/s within {' and '.join(bounds)}):"
    return f"Nothing meets {' and '.join(bounds)}; this comes nearest:"

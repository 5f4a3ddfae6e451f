"""A benchmark's result as a table for terminals and as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from rich.console import Console
from rich.table import Table

from fullbore.bench.measure import Level
from fullbore.errors import ConfigError

WIDTH = 80


def print_table(levels: Sequence[Level], console: Console) -> None:
    """Throughput and latencies of each level, then stages and GPUs where they are known; at most 80 columns."""
    is_open_loop = any(level.request_rate is not None for level in levels)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("req/s" if is_open_loop else "C", "out tok/s", "all tok/s"):
        table.add_column(name, justify="right")
    for name in ("TTFT ms", "p50", "p99", "ITL ms", "p99", "failed"):
        table.add_column(name, justify="right")
    for level in levels:
        load = f"{level.request_rate:g}" if level.request_rate is not None else str(level.concurrency)
        table.add_row(
            load + ("*" if level.interrupted else ""),
            *(_number(x) for x in (level.output_tok_s, level.total_tok_s)),
            *(_number(x) for x in (level.ttft_ms_mean, level.ttft_ms_p50, level.ttft_ms_p99)),
            *(_number(x) for x in (level.itl_ms_mean, level.itl_ms_p99)),
            f"{level.errors}/{level.requests}",
        )
    console.print(table)
    if any(level.interrupted for level in levels):
        console.print("* interrupted: what was complete by then")
    for level in levels:
        _print_stages(level, console)
        _print_errors(level, console)


def _print_stages(level: Level, console: Console) -> None:
    load = _load_name(level)
    if level.stages is not UNSET:
        busy = "  ".join(f"{use.stage}: {use.busy:.0%}" for use in level.stages)
        console.print(f"{load}: stages busy  {busy}", soft_wrap=False)
        idle: dict[str, float] = {}
        for use in level.stages:
            for cause, share in use.idle.items():
                idle[cause] = idle.get(cause, 0.0) + share / len(level.stages)
        causes = sorted(idle.items(), key=lambda pair: -pair[1])[:4]
        if causes:
            console.print(f"{' ' * len(load)}  idle for      " + ", ".join(f"{c} {share:.0%}" for c, share in causes))
    if level.gpus is not UNSET:
        gpus = "  ".join(f"{use.gpu}: {use.utilisation:.0%} {use.power_w:.0f} W" for use in level.gpus)
        console.print(f"{load}: GPUs  {gpus}")


def _print_errors(level: Level, console: Console) -> None:
    for message, count in level.error_messages.items():
        console.print(f"{_load_name(level)}: {count} failed: {message}")


def _load_name(level: Level) -> str:
    return f"{level.request_rate:g} req/s" if level.request_rate is not None else f"C={level.concurrency}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def html_report(levels: Sequence[Level], title: str) -> str:
    """One self-contained page: throughput, latencies, and each stage's time by cause.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as graph
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ConfigError("--html needs plotly; install it with: pip install plotly") from error
    is_open_loop = any(level.request_rate is not None for level in levels)
    loads = [level.request_rate if is_open_loop else level.concurrency for level in levels]
    names = [f"{load:g}" for load in loads if load is not None]
    figure = make_subplots(
        rows=3,
        cols=1,
        subplot_titles=("Output tokens per second", "Latency, ms", "Time of each stage by cause"),
        vertical_spacing=0.09,
    )
    figure.add_scatter(
        x=names, y=[level.output_tok_s for level in levels], name="output tok/s", row=1, col=1, legend="legend"
    )
    for name, field in (
        ("TTFT mean", "ttft_ms_mean"),
        ("TTFT p99", "ttft_ms_p99"),
        ("ITL mean", "itl_ms_mean"),
        ("ITL p99", "itl_ms_p99"),
    ):
        values = [getattr(level, field) for level in levels]
        figure.add_scatter(x=names, y=values, name=name, row=2, col=1, legend="legend2")
    for trace in _stage_bars(levels, names, graph):
        figure.add_trace(trace, row=3, col=1)
    figure.update_yaxes(type="log", row=2, col=1)
    figure.update_yaxes(tickformat=".0%", range=[0, 1], row=3, col=1)
    figure.update_xaxes(type="category", title="requests/s" if is_open_loop else "concurrency")
    legends = {
        "legend": {"y": 1.0},
        "legend2": {"y": 0.64},
        "legend3": {"y": 0.28, "traceorder": "normal"},
    }  # beside each
    figure.update_layout(title=title, barmode="stack", height=1200, template="plotly_white", **legends)
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def _stage_bars(levels: Sequence[Level], names: Sequence[str], graph: object) -> list[object]:
    rows = [
        (f"{name}: stage {use.stage}", {"busy": use.busy, **use.idle})
        for level, name in zip(levels, names, strict=True)
        if level.stages is not UNSET
        for use in level.stages
    ]
    causes = sorted({cause for _, shares in rows for cause in shares}, key=lambda cause: (cause != "busy", cause))
    axis = [name for name, _ in rows]
    bar = graph.Bar  # type: ignore[attr-defined]
    return [
        bar(x=axis, y=[shares.get(cause, 0.0) for _, shares in rows], name=cause, legend="legend3") for cause in causes
    ]

"""`fullbore bench`: how fast is a server, and how busy is each of its stages."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fullbore.errors import ConfigError
from fullbore.telemetry.recording import write_whole

if TYPE_CHECKING:
    from fullbore.bench.measure import Level
    from fullbore.bench.sweep import Sweep


def bench(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[str, typer.Option(metavar="LIST", help="Clients at once, one level each.")] = "1,8,32",
    request_rate: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Instead: random arrivals of so many requests per second.", show_default=False
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 64,
    dataset: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: JSON lines with `prompt`.", show_default=False)
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Requests of each level; default: 4 per client, or 30 s.", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before measuring.")] = 2,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat endpoint.")] = False,
    model: Annotated[str | None, typer.Option(help="Default: the server's first model.", show_default=False)] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FULLBORE_API_KEY", show_envvar=False, help="The server's API key.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest silence of the server within a request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures; - for standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots (needs plotly).")] = None,
) -> None:
    """Put load on a server and measure tokens/s, latencies and, for fullbore, what each stage did."""
    from fullbore.bench.prompts import RandomPrompts, read_dataset
    from fullbore.bench.sweep import Sweep

    for name, value, least in (("input-len", input_len, 1), ("output-len", output_len, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}.")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"--num-requests must be at least 1, got {num_requests}.")
    if not timeout_s > 0:
        raise ConfigError(f"--timeout-s must be more than 0, got {timeout_s:g}.")
    for option, path in (("--json", json_file), ("--html", html)):
        if path is not None and str(path) != "-":
            _require_writable(option, path)
    rates = _numbers("request-rate", request_rate, float) if request_rate else ()
    sweep = Sweep(
        prompts=RandomPrompts(input_len, output_len, seed=seed)
        if dataset is None
        else read_dataset(dataset, output_len),
        concurrencies=() if rates else _numbers("concurrency", concurrency, int),
        request_rates=rates,
        num_requests=num_requests,
        warmup_requests=warmup,
        request_timeout_s=timeout_s,
        seed=seed,
    )
    levels: list[Level] = []
    try:
        asyncio.run(_measure(sweep, url, model, api_key, chat, levels, lambda: _write_json(levels, json_file)))
    finally:
        _show(levels, json_file, html, url)
    if any(level.interrupted for level in levels):
        raise typer.Exit(130)
    if any(level.errors for level in levels):
        raise typer.Exit(1)


async def _measure(
    sweep: Sweep,
    url: str,
    model: str | None,
    api_key: str | None,
    is_chat: bool,
    levels: list[Level],
    on_level: Callable[[], None],
) -> None:
    from fullbore.bench.sweep import calibrate, run
    from fullbore.bench.target import find_target
    from fullbore.progress import WorkProgress

    target = await find_target(url, model, api_key, is_chat=is_chat, timeout_s=sweep.request_timeout_s)
    if not target.knows_ignore_eos:
        print("The server does not know ignore_eos: outputs may end early.", file=sys.stderr)
    sweep = await calibrate(sweep, target)
    with WorkProgress("warming up") as progress:

        def on_progress(ended: int, total: int, errors: int) -> None:
            failed = f", {errors} failed" if errors else ""
            progress.update(ended, total, f"level {len(levels) + 1} of {len(sweep.levels)}{failed}")

        async for level in run(sweep, target, on_progress):
            levels.append(level)
            on_level()


def _show(levels: list[Level], json_file: Path | None, html: Path | None, url: str) -> None:
    from rich.console import Console

    from fullbore.bench.report import WIDTH, html_report, print_table

    if not levels:
        return
    to_stderr = str(json_file) == "-"
    print_table(levels, Console(width=WIDTH, stderr=to_stderr, highlight=False, markup=False, emoji=False))
    if to_stderr:
        sys.stdout.write(_to_json(levels).decode())
    if html is not None:
        write_whole(html, html_report(levels, f"fullbore bench {url}").encode())


def _write_json(levels: list[Level], path: Path | None) -> None:
    """Called after every level, so that a broken-off benchmark leaves what it has."""
    if path is not None and str(path) != "-":
        write_whole(path, _to_json(levels))


def _require_writable(option: str, path: Path) -> None:
    """Raises ConfigError before anything is measured for nothing."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: its folder does not exist.")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: name a file in a folder that you may write to.")


def _to_json(levels: list[Level]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(levels), indent=1) + b"\n"


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> tuple:  # type: ignore[type-arg]
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"--{name} must be positive numbers such as 1,8,32, got {text!r}.")
    return values

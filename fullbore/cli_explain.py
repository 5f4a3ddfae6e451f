"""`fullbore explain`: why is my pipeline idle, and what would fix it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fullbore.errors import ConfigError


def explain(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Folders or files: nvidia-smi CSV or dmon, launch commands, engine logs, /metrics dumps, "
            "/server_info, profiler traces, bench results, notes.json. Each is recognised by its content.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one self-contained page with plots.")
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="The engine's package, a wheel or a folder: lines that prove a fix are cited. Default: if installed.",
        ),
    ] = None,
) -> None:
    """Say from logs, metrics, samples and traces why a pipeline is idle, and what would fix it by how much.

    Exit code: 0 nothing is wrong, 1 something to fix, 3 not enough evidence, 4 unreadable evidence.
    """
    from rich.console import Console
    from rich.progress import TextColumn

    from fullbore.explain.report.html import page
    from fullbore.explain.report.text import WIDTH, print_answer
    from fullbore.explain.run import explain as run
    from fullbore.progress import WorkProgress

    with WorkProgress("Reading evidence", count=TextColumn("")) as progress:
        explanation = run(paths, lambda name: progress.update(0, what=f"Reading {name}"), package)
    if html is not None:
        try:
            html.write_text(page(explanation.situation, explanation.answer), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html} cannot be written: {error.strerror}.") from None
    if as_json:
        print(json.dumps(explanation.answer, indent=1))
    else:
        print_answer(explanation.answer, Console(width=WIDTH, highlight=False, markup=False, emoji=False))
    raise typer.Exit(explanation.exit_code)

"""`fullbore record` and `fullbore account`: what the stages did, and where their idle time went."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from fullbore.errors import ConfigError, RecordingError


def record(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")],
    url: Annotated[str, typer.Option(help="A running fullbore server.")] = "http://127.0.0.1:8000",
    seconds: Annotated[float, typer.Option(help="For how long; Ctrl-C ends it earlier and keeps what there is.")] = 10,
    file_format: Annotated[
        Literal["fbr", "perfetto"],
        typer.Option("--format", help="fbr for `fullbore account`; perfetto for ui.perfetto.dev."),
    ] = "fbr",
    api_key: Annotated[
        str | None, typer.Option(envvar="FULLBORE_API_KEY", show_envvar=False, help="The server's API key.")
    ] = None,
) -> None:
    """Record what driver and stages of a running server do, each micro-batch and each wait."""
    from rich.progress import TextColumn

    from fullbore.collect.timeline import TimelineRecorder, TimelineSource
    from fullbore.progress import WorkProgress
    from fullbore.telemetry.perfetto import chrome_trace
    from fullbore.telemetry.recording import write_timeline, write_whole

    if not seconds > 0:
        raise ConfigError(f"--seconds must be more than 0, got {seconds:g}.")
    if not output.absolute().parent.is_dir():  # before recording for nothing
        raise ConfigError(f"-o {output} cannot be written: its folder does not exist.")
    source = TimelineSource(url, api_key)
    recorder = TimelineRecorder(source)
    failure: RecordingError | None = None
    try:
        count = TextColumn("{task.completed:.1f} of {task.total:g} s")
        plain = f"Recording for {seconds:g} s; Ctrl-C ends it earlier."
        bar = WorkProgress("Recording", total=seconds, count=count, plain=plain)
        with bar as progress, suppress(KeyboardInterrupt):
            recorder.record(seconds, progress.update)
    except RecordingError as error:
        failure = error
    source.close()
    timeline = recorder.timeline
    if timeline is not None:
        if file_format == "fbr":
            write_timeline(output, timeline)
        else:
            write_whole(output, json.dumps(chrome_trace(timeline)).encode())
        steps = sum(r.sample_end_ns > timeline.recording.start_ns for r in timeline.recording.stage_records)
        print(f"{output}: {timeline.window_s:.2f} s, {len(timeline.stages)} stages, {steps} steps")
    elif failure is None:
        failure = RecordingError("Interrupted before the server had answered; nothing was recorded.")
    if failure is not None:
        raise failure


def account(
    path: Annotated[Path, typer.Argument(metavar="FILE.fbr", help="A recording made by `fullbore record`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print seconds by cause as JSON.")] = False,
) -> None:
    """Say how many seconds each stage computed, and for how many it waited for what."""
    from rich.console import Console

    from fullbore.telemetry.recording import read_timeline
    from fullbore.telemetry.report import WIDTH, account_document, print_account

    timeline = read_timeline(path)
    document = account_document(timeline.recording)
    if as_json:
        print(json.dumps(document))
    else:
        title = f"{path.name}: {timeline.model or 'unnamed model'}, "
        print_account(document, title, Console(width=WIDTH, highlight=False, markup=False, emoji=False))

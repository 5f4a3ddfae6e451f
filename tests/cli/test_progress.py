"""Progress while the engine starts: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from fullbore.engine.messages import LoadProgress
from fullbore.progress import RequestProgress, StartProgress, WorkProgress
from fullbore.server import command

STEPS = [
    LoadProgress(-1, "downloading Model.gguf", 0, 90_000_000),
    LoadProgress(-1, "downloading Model.gguf", 90_000_000, 90_000_000),
    LoadProgress(0, "loading", 10, 150_000_000),
    LoadProgress(1, "loading", 10, 120_000_000),
    LoadProgress(0, "loading", 150_000_000, 150_000_000),
    LoadProgress(0, "loading", 150_000_000, 150_000_000),
    LoadProgress(1, "loading", 120_000_000, 120_000_000),
    LoadProgress(-1, "measuring the stages", 0, 0),
]


def shown(is_terminal: bool) -> str:
    file = io.StringIO()
    with StartProgress(Console(file=file, force_terminal=is_terminal, width=100)) as progress:
        for step in STEPS:
            progress.update(step)
    return file.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert shown(is_terminal=False).splitlines() == [
        "Downloading Model.gguf ... 90 MB",
        "Downloading Model.gguf done",
        "Stage 0: loading ... 150 MB",
        "Stage 1: loading ... 120 MB",
        "Stage 0: loading done",
        "Stage 1: loading done",
        "Measuring the stages ...",
    ]


def test_one_bar_each_on_a_terminal() -> None:
    last = shown(is_terminal=True).split("\x1b[?25h")[0].split("\x1b[2K")
    text = "".join(last[-5:])
    for name in ("Starting", "Downloading Model.gguf", "Stage 0: loading", "Stage 1: loading", "Measuring the stages"):
        assert name in text
    assert "150 MB" in text


def test_requests_done(capsys) -> None:  # type: ignore[no-untyped-def]
    with RequestProgress(2, is_shown=True) as progress:
        progress.advance(10)
        progress.advance(20)
    assert "2/2" in capsys.readouterr().err
    with RequestProgress(2, is_shown=False) as progress:
        progress.advance(10)
    assert capsys.readouterr().err == ""


def test_work_on_a_terminal(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: as if standard error were a terminal
    with WorkProgress("level 1") as progress:
        progress.update(7, 7)
        progress.update(3, 7, "level 2")  # the next piece of work
    shown = capsys.readouterr().err
    assert "level 2" in shown
    assert "3/7" in shown
    with WorkProgress("level 1", plain="measuring", is_shown=False) as progress:
        progress.update(1, 2)
    assert capsys.readouterr().err == ""


def test_work_elsewhere_is_one_line(capsys) -> None:  # type: ignore[no-untyped-def]
    with WorkProgress("Recording", total=10, plain="Recording for 10 s.") as progress:
        assert capsys.readouterr().err == "", "nothing has begun"
        progress.update(1)
        progress.update(2)
    assert capsys.readouterr().err == "Recording for 10 s.\n"


def test_a_full_disk_stops_nobody() -> None:
    with open("/dev/full", "wb", buffering=0) as device:  # what is written to it fails as on a full disk
        full = io.TextIOWrapper(device, write_through=True)
        with StartProgress(Console(file=full)) as progress:
            progress.update(LoadProgress(0, "loading", 1, 2))
            progress.update(LoadProgress(0, "loading", 2, 2))
        command._say("text", full)

"""The answer for a terminal: 80 columns, colours only where they show."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

WIDTH = 80
_TITLES = {
    "at-roofline": "nothing is wrong",
    "pp-latency-expected": "nothing is wrong",
    "insufficient-evidence": "the evidence does not say",
}


class _Line(NamedTuple):
    text: str
    style: str = ""


def print_answer(answer: dict[str, Any], console: Console) -> None:
    """Writes the answer; control characters from the evidence are shown, not obeyed."""
    for line in _lines(answer):
        clean = "".join(char if char.isprintable() else "�" for char in line.text)
        console.print(Text(clean, style=line.style), soft_wrap=True)


def _lines(answer: dict[str, Any]) -> Iterator[_Line]:
    if not any(file["used"] for file in answer["recognised"]):
        yield from _unreadable(answer)
        return
    for number, verdict in enumerate(answer["verdicts"]):
        yield from _verdict(verdict, is_primary=number == 0)
    yield from _facts("Found, but not the bottleneck", answer["not_the_bottleneck"], "-")
    if answer["hypotheses"]:
        yield _Line("Possible, not shown by this evidence", "bold")
        for one in answer["hypotheses"]:
            yield from _wrapped(f"{one['id']}: {one['summary']}", "- ", 2)
        yield _Line("")
    if answer["missing"]:
        name = "Next" if answer["primary"] == "insufficient-evidence" else "Missing"
        yield _Line(f"{name}: run this, send that", "bold")
        for item in answer["missing"]:
            yield from _wrapped(item["what"], "- ", 2)
            yield from _wrapped(item["how"], "  ", 4, "dim")
        yield _Line("")
    yield from _facts("What the evidence says", answer["facts"], "-")
    yield from _files(answer)


def _unreadable(answer: dict[str, Any]) -> Iterator[_Line]:
    """Nothing was evidence: why, and what would be."""
    for problem in answer["problems"]:
        yield from _wrapped(problem, "", 0, "yellow")
    for file in answer["recognised"]:
        remark = f" ({file['remark']})" if file["remark"] else ""
        yield from _wrapped(f"{file['file']}: NOT USED: {file['kind']}{remark}", "", 0, "yellow")
    advice = "give a folder or files with engine logs, launch commands, /metrics, traces, bench results or nvidia-smi"
    yield from _wrapped(f"Nothing to explain: {advice} samples (see `fullbore explain --help`).", "", 0)


def _verdict(verdict: dict[str, Any], *, is_primary: bool) -> Iterator[_Line]:
    title = _TITLES.get(verdict["id"])
    head = f"{'Verdict' if is_primary else 'Also'}: {verdict['id']}" + (f" ({title})" if title else "")
    sure = "" if verdict["id"] == "insufficient-evidence" else f", {verdict['confidence']}"
    yield _Line(head + sure, "bold green" if title else "bold red" if is_primary else "bold yellow")
    yield from _wrapped(verdict["summary"], "", 2)
    yield _Line("")
    yield from _facts("Evidence for", verdict["evidence"], "+", 2)
    yield from _facts("Evidence against", verdict["against"], "-", 2, none="  Evidence against: none in what was given")
    if verdict["unexplained"]:
        yield _Line("  Unexplained", "bold")
        yield from _wrapped(verdict["unexplained"], "", 4)
        yield _Line("")
    if verdict["id"] == "insufficient-evidence":
        return  # what to do next is what is missing
    yield _Line("  Fix", "bold")
    for line in verdict["fix"]:
        yield from _wrapped(line, "> ", 4, "cyan")
    yield _Line("")
    yield from _facts("In the engine's source", verdict["proof"], "=", 2)
    gain = verdict["gain"]
    assumes = f" (assumes: {gain['assumes']})" if gain["assumes"] else ""
    yield from _wrapped(f"Gain: {gain['text']}{assumes}", "", 2)
    if verdict["verify"]:
        yield from _wrapped(f"Verify: {verdict['verify']}", "", 2)
    if verdict["source"]:
        yield from _wrapped(f"Known from: {verdict['source']}", "", 2, "dim")
    yield _Line("")


def _facts(
    title: str, facts: list[dict[str, Any]], mark: str, indent: int = 0, none: str | None = None
) -> Iterator[_Line]:
    if not facts:
        if none is not None:
            yield _Line(none, "dim")
            yield _Line("")
        return
    yield _Line(" " * indent + title, "bold")
    for fact in facts:
        where = "" if fact["file"] is None else f" [{fact['file']}" + (f":{fact['line']}]" if fact["line"] else "]")
        yield from _wrapped(fact["text"] + where, f"{mark} ", indent + 2)
    yield _Line("")


def _files(answer: dict[str, Any]) -> Iterator[_Line]:
    yield _Line("What was read", "bold")
    for file in answer["recognised"]:
        used = "" if file["used"] else "NOT USED: "
        remark = f" ({file['remark']})" if file["remark"] else ""
        yield from _wrapped(f"{file['file']}: {used}{file['kind']}{remark}", "- ", 2, "" if file["used"] else "yellow")
    for problem in answer["problems"]:
        yield from _wrapped(problem, "- ", 2, "yellow")


def _wrapped(text: str, mark: str, indent: int, style: str = "") -> Iterator[_Line]:
    """Paragraph lines within the width; a word longer than that (a command) stays whole."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent + mark,
        subsequent_indent=" " * (indent + len(mark)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        yield _Line(line, style)

"""An account for people and for programs: the JSON of /account, and a page of text with one bar per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from fullbore.telemetry.accounting import BUSY, CAUSES, Recording, account

WIDTH = 80
_BAR = 64
_SMALL_LOSS = 0.03  # of all stage time: not worth a sentence of its own


class Look(NamedTuple):
    """How a cause is shown, and what it means."""

    letter: str
    colour: str  # in a terminal
    page_colour: str  # on white
    meaning: str


LOOKS: Mapping[str, Look] = {
    "compute": Look("#", "green", "#2a9d4a", "computing"),
    "host": Look("h", "cyan", "#3cc4c4", "preparing, sampling, sending"),
    "transfer": Look("t", "magenta", "#b04cc8", "hidden states on their way"),
    "control": Look("c", "bright_magenta", "#e583e0", "driver: result back, decide, next plan"),
    "no-requests": Look(".", "bright_black", "#c8c8c8", "no request at all"),
    "memory": Look("m", "red", "#d62f2f", "requests waiting for KV cache"),
    "few-requests": Look("f", "blue", "#3566d4", "fewer requests running than stages"),
    "packed": Look("p", "yellow", "#e0b000", "requests in too few micro-batches"),
    "depth": Look("d", "bright_red", "#ff6b5e", "in-flight limit held back runnable work"),
    "uneven": Look("u", "bright_yellow", "#f2dc4c", "some micro-batches cost more than others"),
    "imbalance": Look("i", "bright_blue", "#7aa6ff", "a slower stage set the pace"),
    "fill-drain": Look("/", "bright_cyan", "#8ee0ea", "pipeline filling or running dry"),
}


def account_document(recording: Recording, totals: Sequence[Mapping[str, int]] | None = None) -> dict[str, Any]:
    """Seconds by cause of each stage, as GET /account and `fullbore account --json` give them.

    Args:
        totals: the recording's account where it is known already.
    """
    totals = account(recording) if totals is None else totals
    return {
        "window_s": (recording.end_ns - recording.start_ns) * 1e-9,
        "stages": [
            {"stage": stage, "seconds": {cause: ns * 1e-9 for cause, ns in total.items()}}
            for stage, total in enumerate(totals)
        ],
    }


def print_account(document: Mapping[str, Any], title: str, console: Console) -> None:
    """Prints title, bars, totals and one sentence, at most WIDTH columns wide."""
    window_s = document["window_s"]
    stages = [stage["seconds"] for stage in document["stages"]]
    console.print(Text(f"{title}{window_s:.2f} s, {len(stages)} {'stage' if len(stages) == 1 else 'stages'}"))
    if window_s <= 0:
        console.print(Text("Nothing is known about any time in it: no step had ended yet. Record for longer."))
        return
    console.print()
    console.print(Text(f"{'stage  busy':11}  0 %{'100 %':>{_BAR - 3}}"))
    for stage, seconds in enumerate(stages):
        console.print(bar(stage, seconds, window_s))
    console.print()
    console.print(Text(f"{'stage-seconds':>31}  share"))
    totals = {cause: sum(seconds.get(cause, 0.0) for seconds in stages) for cause in CAUSES}
    for cause in sorted(CAUSES, key=lambda cause: (cause not in BUSY, -totals[cause])):
        if totals[cause] > 0:
            console.print(_total_line(cause, totals[cause], window_s * len(stages)))
    console.print()
    console.print(Text(largest_loss(totals, window_s * len(stages))), soft_wrap=False)


def bar(stage: int, seconds: Mapping[str, float], window_s: float) -> Text:
    """One stage's window as a bar of letters, a cause after the other (not in the order of time)."""
    busy = sum(seconds.get(cause, 0.0) for cause in BUSY) / window_s
    text = Text(f"{stage:5}  {busy:4.0%}  ")
    end_s = 0.0
    cells = 0
    for cause in CAUSES:
        end_s += seconds.get(cause, 0.0)
        upto = min(round(end_s / window_s * _BAR), _BAR)
        look = LOOKS[cause]
        text.append(look.letter * (upto - cells), style=look.colour)
        cells = upto
    return text


def largest_loss(totals: Mapping[str, float], all_s: float) -> str:
    """One sentence about where most of the idle time went."""
    cause = max((cause for cause in CAUSES if cause not in BUSY), key=lambda cause: totals.get(cause, 0.0))
    lost_s = totals.get(cause, 0.0)
    if lost_s < _SMALL_LOSS * all_s:
        busy = sum(totals.get(cause, 0.0) for cause in BUSY) / all_s
        return f"Nothing much is lost: the stages are busy {busy:.0%} of the time."
    return f"Largest loss: {cause}, {lost_s / all_s:.0%} of all stage time: {LOOKS[cause].meaning}."


def _total_line(cause: str, total_s: float, all_s: float) -> Text:
    look = LOOKS[cause]
    text = Text("  ")
    text.append(look.letter, style=look.colour)
    text.append(f" {cause:14}{total_s:13.3f} {total_s / all_s:6.1%}  ")
    text.append(look.meaning, style="bright_black")
    return text

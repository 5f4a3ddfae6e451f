from __future__ import annotations

import io
from typing import Any

import pytest
from recordings import simulated_recording
from rich.console import Console

from fullbore.telemetry.accounting import CAUSES, Recording
from fullbore.telemetry.report import LOOKS, WIDTH, account_document, largest_loss, print_account


def printed(document: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    print_account(document, "run.fbr: tiny, ", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def document_of(*stages: dict[str, float]) -> dict[str, Any]:
    window_s = sum(stages[0].values())
    return {"window_s": window_s, "stages": [{"stage": n, "seconds": seconds} for n, seconds in enumerate(stages)]}


def test_every_cause_has_a_letter_of_its_own() -> None:
    assert set(LOOKS) == set(CAUSES)
    assert len({look.letter for look in LOOKS.values()}) == len({look.colour for look in LOOKS.values()}) == len(CAUSES)


def test_document() -> None:
    recording = simulated_recording()
    document = account_document(recording)
    assert document["window_s"] == (recording.end_ns - recording.start_ns) * 1e-9
    assert [stage["stage"] for stage in document["stages"]] == [0, 1, 2]
    for stage in document["stages"]:
        assert set(stage["seconds"]) == set(CAUSES)
        assert sum(stage["seconds"].values()) == pytest.approx(document["window_s"])


def test_page() -> None:
    lines = printed(document_of({"compute": 2.5, "few-requests": 7.5}, {"compute": 5.0, "host": 2.5, "packed": 2.5}))
    assert lines[0] == "run.fbr: tiny, 10.00 s, 2 stages"
    bars = [line.split()[-1] for line in lines if "%  #" in line and len(line.split()) == 3]
    assert bars == ["#" * 16 + "f" * 48, "#" * 32 + "h" * 16 + "p" * 16]
    assert any(line.split()[:4] == ["#", "compute", "7.500", "37.5%"] for line in lines)
    assert "".join(lines[-2:]) == (
        "Largest loss: few-requests, 38% of all stage time: fewer requests running than stages."
    )


def test_bars_are_full_whatever_the_shares() -> None:
    shares = {cause: 0.013 * (number + 1) for number, cause in enumerate(CAUSES)}
    lines = printed(document_of(shares))
    assert len(next(line for line in lines if "#" in line).split()[-1]) == 64


def test_page_is_narrow_even_with_all_causes_and_many_stages() -> None:
    seconds = dict.fromkeys(CAUSES, 12345.678)
    lines = printed(document_of(*[seconds] * 64))
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) == 64 + len(CAUSES) + 7, "nothing is wrapped"


def test_a_busy_pipeline_is_not_scolded() -> None:
    assert "Nothing much is lost" in largest_loss({"compute": 98.0, "imbalance": 2.0}, 100.0)


def test_a_window_of_which_nothing_is_known() -> None:
    lines = printed(account_document(Recording(2, 4, 7, 7, [], [])))
    assert "Record for longer" in " ".join(lines)

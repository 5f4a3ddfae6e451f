"""docs/accounting.md and docs/recording-format.md say what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from fullbore.telemetry.accounting import CAUSES, Recording
from fullbore.telemetry.recording import FORMAT_VERSION, Timeline
from fullbore.telemetry.report import LOOKS
from fullbore.telemetry.spans import DriverRecord, StageRecord

DOCS = Path(__file__).parents[2] / "docs"
VERDICTS = set(re.findall(r"^### ([a-z-]+)", (DOCS / "verdicts.md").read_text(), re.MULTILINE))


def test_pictures_are_what_the_accounting_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    pictures = importlib.import_module("accounting_pictures")
    page = pictures.PAGE.read_text()
    assert page.count("```text picture") == len(pictures.EXAMPLES)
    assert pictures.refreshed(page) == page


def test_every_cause_is_in_the_table_with_its_letter_and_verdicts_that_exist() -> None:
    rows = re.findall(r"^\| `(.)` \| ([a-z-]+) \| (.*) \| (.*) \|$", (DOCS / "accounting.md").read_text(), re.MULTILINE)
    assert [cause for _, cause, _, _ in rows] == list(CAUSES)
    for letter, cause, _, verdicts in rows:
        assert letter == LOOKS[cause].letter
        assert set(re.findall(r"`([a-z-]+)`", verdicts)) <= VERDICTS


def test_every_field_is_described() -> None:
    page = (DOCS / "recording-format.md").read_text()
    for struct in (Timeline, Recording, StageRecord, DriverRecord):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in page, name
    assert f"unsigned, big-endian: {FORMAT_VERSION}" in page

"""All labelled cases: the primary verdict, what the answer must mention, and what it must not say."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullbore.explain.report.text import WIDTH, print_answer
from fullbore.explain.run import Explanation, explain

CASES = Path(__file__).parent.parent / "data" / "cases"
NAMES = sorted(path.parent.name for path in CASES.glob("*/expected.json"))


def as_text(explanation: Explanation) -> str:
    stream = io.StringIO()
    print_answer(explanation.answer, Console(file=stream, width=WIDTH))
    return stream.getvalue()


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Explanation]:
    folder = CASES / request.param
    evidence = tmp_path_factory.mktemp("case") / "evidence"
    shutil.copytree(folder, evidence, ignore=shutil.ignore_patterns("expected.json"))
    return json.loads((folder / "expected.json").read_text()), explain([evidence])


def test_there_are_cases() -> None:
    assert len(NAMES) == 21


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_verdict(case: tuple[dict[str, Any], Explanation]) -> None:
    expected, explanation = case
    assert explanation.answer["primary"] in [expected["verdict"], *expected.get("also", [])]


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_nothing_wrong_is_reported(case: tuple[dict[str, Any], Explanation]) -> None:
    expected, explanation = case
    reported = {verdict["id"] for verdict in explanation.answer["verdicts"]}
    assert not reported & set(expected.get("not", []))


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_text_mentions_what_matters(case: tuple[dict[str, Any], Explanation]) -> None:
    expected, explanation = case
    text = re.sub(r"\s+", " ", as_text(explanation))
    for fact in expected.get("must_mention", []):
        if fact.startswith("re:"):
            assert re.search(fact[3:], text, re.I), fact
        else:
            assert any(choice.lower() in text.lower() for choice in fact.split("|")), fact
    for pattern in expected.get("must_not_match", []):
        assert not re.search(pattern, text, re.I), pattern


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_every_verdict_is_complete(case: tuple[dict[str, Any], Explanation]) -> None:
    _, explanation = case
    for verdict in explanation.answer["verdicts"]:
        assert verdict["summary"]
        assert verdict["fix"]
        assert verdict["verify"]
        assert verdict["gain"]["text"]
        if verdict["id"] != "insufficient-evidence":
            assert verdict["evidence"]
            assert any(fact["file"] for fact in verdict["evidence"]), "no evidence names its place"


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_text_fits_80_columns(case: tuple[dict[str, Any], Explanation]) -> None:
    _, explanation = case
    for line in as_text(explanation).splitlines():
        assert len(line) <= WIDTH or " " not in line.strip(), line


def test_exit_codes(tmp_path: Path) -> None:
    codes = {name: explain([CASES / name]).exit_code for name in NAMES}
    assert codes["16-seventy-b-four-tok"] == 0
    assert codes["02-eight-requests-pp8"] == 1
    assert codes["20-one-quiet-snapshot"] == 3
    (tmp_path / "junk.bin").write_bytes(bytes(range(256)) * 8)
    assert explain([tmp_path]).exit_code == 4
    assert explain([tmp_path / "missing"]).exit_code == 4


def test_expected_answers_are_no_evidence() -> None:
    """expected.json lies beside the evidence here: read as notes, it must not change the verdict."""
    for name in NAMES:
        expected = json.loads((CASES / name / "expected.json").read_text())
        assert explain([CASES / name]).answer["primary"] in [expected["verdict"], *expected.get("also", [])]


def _without_one_kind() -> list[tuple[str, str]]:
    kinds = {name: {_kind(path.name) for path in (CASES / name).iterdir()} - {"expected"} for name in NAMES}
    return [(name, kind) for name in NAMES for kind in sorted(kinds[name]) if len(kinds[name]) > 1]


def _kind(file_name: str) -> str:
    """rank-PP3.log and rank-PP4.log are of one kind, as are the dumps of several machines or moments."""
    return re.split(r"[.\d]|-PP|-node|-\d", file_name)[0]


@pytest.mark.parametrize(("name", "kind"), _without_one_kind())
def test_less_evidence_gives_the_same_verdict_or_none(name: str, kind: str) -> None:
    expected = json.loads((CASES / name / "expected.json").read_text())
    kept = [path for path in sorted((CASES / name).iterdir()) if _kind(path.name) not in (kind, "expected")]
    answer = explain(kept).answer
    assert answer["primary"] in [expected["verdict"], *expected.get("also", []), "insufficient-evidence"]
    wrong = set(expected.get("not", [])) - {"insufficient-evidence"}
    assert not wrong & {verdict["id"] for verdict in answer["verdicts"]}

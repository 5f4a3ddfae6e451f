"""The renderings: text in a pipe and on a terminal, JSON of the documented shape, one page with plots, exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from evidence_maker import EvidenceMaker
from rich.console import Console
from typer.testing import CliRunner

from fullbore.cli import app
from fullbore.explain.report.text import print_answer
from fullbore.explain.run import explain
from fullbore.explain.verdicts import IDS

CASES = Path(__file__).parent.parent / "data" / "cases"
runner = CliRunner()


def test_json_has_the_documented_shape() -> None:
    result = runner.invoke(app, ["explain", str(CASES / "02-eight-requests-pp8"), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert {"primary", "verdicts", "not_the_bottleneck", "missing"} <= set(answer)
    verdict = answer["verdicts"][0]
    assert verdict["id"] == answer["primary"] == "packed-slot"
    assert {"id", "confidence", "evidence", "against", "fix", "gain"} <= set(verdict)
    fact = next(fact for fact in verdict["evidence"] if fact["line"])
    assert (CASES / "02-eight-requests-pp8" / fact["file"]).exists()
    assert all(verdict["id"] in IDS for verdict in answer["verdicts"])


def test_cited_lines_say_what_is_cited() -> None:
    """A cited number stands in the line that is cited."""
    folder = CASES / "07-sixty-one-layers-pp8"
    answer = explain([folder]).answer
    cited = [fact for fact in answer["verdicts"][0]["evidence"] if "loaded" in fact["text"]]
    assert len(cited) == 8
    for fact in cited:
        line = (folder / fact["file"]).read_text().splitlines()[fact["line"] - 1]
        assert f"mem usage={fact['value']:.2f} GB" in line


@pytest.mark.parametrize(
    ("case", "code"), [("16-seventy-b-four-tok", 0), ("00-kimi-pp8", 1), ("18-one-versus-eight", 3)]
)
def test_exit_code(case: str, code: int) -> None:
    assert runner.invoke(app, ["explain", str(CASES / case)]).exit_code == code


def test_unreadable_evidence(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500))
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 4
    assert "NOT USED: binary data" in result.stdout
    assert "Traceback" not in result.output


def test_a_path_that_is_not_there_gets_a_sentence() -> None:
    result = runner.invoke(app, ["explain", "/no/such/folder"])
    assert result.exit_code == 4
    assert "/no/such/folder: no such file or folder" in result.stdout
    assert len(result.stdout.splitlines()) <= 5


def test_what_to_do_next_is_said_once() -> None:
    result = runner.invoke(app, ["explain", str(CASES / "18-one-versus-eight")])
    missing = json.loads(runner.invoke(app, ["explain", str(CASES / "18-one-versus-eight"), "--json"]).stdout)[
        "missing"
    ]
    text = " ".join(result.stdout.split())
    assert missing
    assert all(text.count(" ".join(item["what"].split())) == 1 for item in missing)


def test_single_files_can_be_given() -> None:
    folder = CASES / "16-seventy-b-four-tok"
    result = runner.invoke(
        app, ["explain", *(str(folder / name) for name in ("bench.json", "notes.json", "launch.txt"))]
    )
    assert result.exit_code == 0
    assert "at-roofline" in result.stdout


def test_piped_text_is_plain() -> None:
    code = "import sys; from fullbore.cli import main; sys.argv = ['fullbore', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", code, "explain", str(CASES / "01-two-cards-one-chat")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("Verdict: few-requests")
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_colours_on_a_terminal() -> None:
    stream = io.StringIO()
    answer = explain([CASES / "01-two-cards-one-chat"]).answer
    print_answer(answer, Console(file=stream, force_terminal=True, color_system="standard", width=80))
    assert "\x1b[" in stream.getvalue()


def test_control_characters_of_the_evidence_are_not_obeyed(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).notes(model="\x1b[31mred\x1b]0;title\x07", clients=2).launch("vllm serve m -pp 4")
    stream = io.StringIO()
    print_answer(explain([tmp_path]).answer, Console(file=stream, width=80))
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_markup_in_the_evidence_is_text(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).notes(model="[bold]70B[/bold] <script>alert(1)</script>", clients=2).launch(
        "vllm serve m -pp 4"
    )
    explanation = explain([tmp_path])
    stream = io.StringIO()
    print_answer(explanation.answer, Console(file=stream, width=80))
    assert "[bold]70B[/bold]" in stream.getvalue()


class PageChecker(HTMLParser):
    """Balance of tags, and everything that would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "line", "rect", "polyline", "circle"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("case", "plots"), [("04-trace-four-ranks-a", 2), ("00-kimi-pp8", 3), ("17-three-layouts-one-model", 0)]
)
def test_page_is_self_contained(case: str, plots: int, tmp_path: Path) -> None:
    target = tmp_path / "answer.html"
    runner.invoke(app, ["explain", str(CASES / case), "--html", str(target)])
    html = target.read_text()
    checker = PageChecker()
    checker.feed(html)
    assert checker.open == []
    assert checker.loaded == []
    assert "<script" not in html
    assert html.count("<svg") == plots
    assert not re.search(r"\bnan\b|\binf\b", html)


def test_page_escapes_the_evidence(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path / "in").notes(model="<script>alert(1)</script>", clients=2).launch("vllm serve m -pp 4")
    target = tmp_path / "answer.html"
    runner.invoke(app, ["explain", str(tmp_path / "in"), "--html", str(target)])
    assert "<script" not in target.read_text()
    assert "&lt;script&gt;" in target.read_text()


def test_page_that_cannot_be_written(tmp_path: Path) -> None:
    result = runner.invoke(app, ["explain", str(CASES / "00-kimi-pp8"), "--html", str(tmp_path / "no" / "x.html")])
    assert result.exit_code != 0
    assert "cannot be written" in str(result.exception)

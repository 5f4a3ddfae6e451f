"""Verdicts cite the lines of the engine's source that their fix rests on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullbore.cli import app
from fullbore.explain.run import explain
from fullbore.explain.source import SourceError

CASE = Path(__file__).parent.parent / "data" / "cases" / "06-pp4-even-but-capped"

SERVER_ARGS = """
from dataclasses import dataclass

@dataclass
class ServerArgs:
    pp_size: int = 1
    pp_async_batch_depth: int = 0
"""
LOOP = """
from toy.server_args import ServerArgs

class Scheduler:
    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args
        self.slots = [None] * (server_args.pp_size + server_args.pp_async_batch_depth)

    def loop(self):
        if self.server_args.pp_async_batch_depth > 0:
            self.exchange()
        self.launch()
"""

OTHER = """
class Ring:
    def __init__(self):
        self.pp_async_batch_depth = 2

def wait(thing):
    if thing.pp_async_batch_depth > 3:
        pass
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, text in {"__init__.py": '__version__ = "1.2.3"', "server_args.py": SERVER_ARGS, "loop.py": LOOP}.items():
        (folder / name).write_text(text)
    return folder


def test_lines_are_cited(package: Path) -> None:
    proof = explain([CASE], package=str(package)).answer["verdicts"][0]["proof"]
    cited = {(fact["file"].rsplit("/")[-1], fact["line"], fact["value"]) for fact in proof}
    assert ("loop.py", 10, "guards") in cited
    assert ("loop.py", 7, "sizes") in cited


def test_only_what_serves_is_cited(package: Path) -> None:
    """Neither the package's own tests nor an object that merely has an attribute of the same name."""
    (package / "tests").mkdir()
    (package / "tests" / "test_loop.py").write_text(LOOP)
    (package / "other.py").write_text(OTHER)
    proof = explain([CASE], package=str(package)).answer["verdicts"][0]["proof"]
    assert {fact["file"].rsplit("/")[-1] for fact in proof} == {"loop.py"}


def test_cited_in_the_text(package: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(CASE), "--package", str(package)])
    assert "In the engine's source" in result.stdout
    assert "pp_async_batch_depth > 0" in result.stdout


def test_without_a_package_nothing_is_cited() -> None:
    assert explain([CASE]).answer["verdicts"][0]["proof"] == []


def test_a_named_package_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        explain([CASE], package=str(tmp_path / "nothing"))

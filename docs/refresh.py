"""Runs every `$ fullbore simulate ...` in docs/scheduling.md again and puts in what it prints.

    python docs/refresh.py [--check]

With --check nothing is written; the exit code is 1 if something would change.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

from fullbore.cli import app

PAGE = Path(__file__).parent / "scheduling.md"
_BLOCK = re.compile(r"```console\n\$ fullbore (.*)\n(?:.*\n)*?```")


def refreshed(page: str) -> str:
    """The page with every command's present output. Raises RuntimeError if a command fails."""
    return _BLOCK.sub(_run, page)


def _run(block: re.Match[str]) -> str:
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(app, shlex.split(block[1]))
    if result.exit_code != 0:
        raise RuntimeError(f"fullbore {block[1]}: {result.exception}")
    return f"```console\n$ fullbore {block[1]}\n{result.stdout}```"


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = refreshed(page)
    if "--check" in sys.argv[1:]:
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

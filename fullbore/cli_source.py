"""`fullbore source`: what a setting really does, read from the source of the installed version."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def source(
    flag: Annotated[
        str,
        typer.Argument(metavar="FLAG", help="Option, field or environment variable, e.g. --pp-async-batch-depth."),
    ],
    package: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="Installed package (sglang, vllm, fullbore), or the path of a wheel or an unpacked folder.",
        ),
    ] = "fullbore",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also tests, uses of the same name, and comments.")] = False,
) -> None:
    """Show every place where a setting is defined, checked and used in a package's source, through renames.

    The package is read, never imported or run.
    """
    from rich.console import Console

    from fullbore.explain.source import open_package, study
    from fullbore.explain.source.report import print_study

    found = study(open_package(package), flag)
    if as_json:
        json.dump(found.as_dict(), sys.stdout, indent=1)
        print()
        return
    print_study(found, Console(width=None if sys.stdout.isatty() else 80, highlight=False), show_all)

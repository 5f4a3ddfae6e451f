"""The architecture, enforced: imports point only downwards, and the pure packages stay pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullbore

PACKAGE = Path(fullbore.__file__).parent
# From the top down. A module may import its own layer and those below; modules of one layer stand side by side.
LAYERS: list[set[str]] = [
    {"cli"},
    {"cli_*"},
    {"llm", "server", "progress"},
    {"bench"},
    {"collect"},
    {"explain"},
    {"plan"},
    {"text"},
    {"engine"},
    {"model"},
    {"telemetry"},
    {"scheduler"},
    {"config", "errors", "telemetry.spans"},  # spans: plain records that scheduler, stages and accounting share
    {"__init__"},  # the package itself: the version, and lazily what users import
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

PURE = ["scheduler", "telemetry/accounting.py", "telemetry/round.py", "telemetry/spans.py", "model/partition.py"]
PURE += ["model/native/buckets.py", "model/native/paged_metadata.py"]
PURE_BUT_FOR_FILES = ["plan", "explain"]  # they read the evidence and tables that they are given
# Tensors, clocks, networks, processes, the operating system, hidden state.
IMPURE_MODULES = {
    "asyncio",
    "datetime",
    "fastapi",
    "http",
    "httpx",
    "multiprocessing",
    "os",
    "psutil",
    "random",
    "requests",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "torch",
    "transformers",
    "urllib",
    "uvicorn",
    "zmq",
}
HARMLESS_IMPORTS = {"random.Random", "datetime.datetime", "datetime.timedelta", "datetime.timezone", "datetime.UTC"}
CLOCK_CALLS = {"now", "utcnow", "today"}
FILE_CALLS = {"open", "print", "input", "read_text", "read_bytes", "write_text", "write_bytes"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(name: str) -> int:
    """Rank of a module of the package, given its full name (`fullbore.server.app`); 0 is on top."""
    parts = name.split(".")[1:] or ["__init__"]
    if parts[0].startswith("cli_"):
        parts[0] = "cli_*"
    return RANK.get(".".join(parts[:2]), RANK.get(parts[0], -1))


def name_of(path: Path) -> str:
    return ".".join(["fullbore", *path.relative_to(PACKAGE).with_suffix("").parts])


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported anywhere in a module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def upward_imports(name: str, source: str) -> list[str]:
    """What the module `name` imports from above itself."""
    of_package = [
        (line, imported)
        for line, imported in imports(ast.parse(source))
        if imported.startswith("fullbore.") and layer_of(imported) >= 0  # not: names inside the package itself
    ]
    return [f"line {line}: {imported}" for line, imported in of_package if layer_of(imported) < layer_of(name)]


def impurities(source: str, bad_calls: set[str]) -> list[str]:
    """What a module uses beside its arguments."""
    tree = ast.parse(source)
    found = [
        f"line {line}: imports {name}"
        for line, name in imports(tree)
        if name.split(".")[0] in IMPURE_MODULES and name not in HARMLESS_IMPORTS
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in bad_calls:
                found.append(f"line {node.lineno}: calls {name}")
    return found


def test_every_module_has_a_layer() -> None:
    assert [name for name in map(name_of, modules()) if layer_of(name) < 0] == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    if path != PACKAGE / "__init__.py":
        assert upward_imports(name_of(path), path.read_text()) == []


@pytest.mark.parametrize("name", PURE + PURE_BUT_FOR_FILES)
def test_pure_modules_are_pure(name: str) -> None:
    bad_calls = CLOCK_CALLS if name in PURE_BUT_FOR_FILES else CLOCK_CALLS | FILE_CALLS
    paths = [PACKAGE / name] if name.endswith(".py") else sorted((PACKAGE / name).rglob("*.py"))
    assert paths
    found = {name_of(path): impurities(path.read_text(), bad_calls) for path in paths}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_text_needs_no_torch_of_its_own() -> None:
    for path in sorted((PACKAGE / "text").rglob("*.py")):
        assert "torch" not in {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()))}


def test_the_checks_can_fail() -> None:
    inside_a_function = "def f():\n    from fullbore.engine.client import EngineClient\n"
    assert upward_imports("fullbore.scheduler.x", inside_a_function)
    assert upward_imports("fullbore.engine.x", "from fullbore import llm\n")
    assert upward_imports("fullbore.telemetry.spans", "import fullbore.scheduler.request\n")
    assert not upward_imports("fullbore.server.x", inside_a_function)
    assert not upward_imports("fullbore.scheduler.x", "from fullbore.telemetry.spans import StageRecord\n")
    assert impurities("import torch.nn as nn", set())
    assert impurities("def f():\n    from time import monotonic\n", set())
    assert impurities("open('x')", FILE_CALLS)
    assert impurities("datetime.now()", CLOCK_CALLS)
    assert not impurities("from random import Random\nRandom(7).random()", CLOCK_CALLS)

"""One setting in one package: run the trace and put its results together."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fullbore.explain.source.carriers import Holder, Local, Reach
from fullbore.explain.source.findings import Findings
from fullbore.explain.source.index import Index
from fullbore.explain.source.leftovers import Leftovers, mentions
from fullbore.explain.source.module import Module
from fullbore.explain.source.package import Package
from fullbore.explain.source.pairs import find_pairs
from fullbore.explain.source.places import Certainty, Derived, Mention, Place, merged
from fullbore.explain.source.setting import Setting, find_setting
from fullbore.explain.source.summary import summarise
from fullbore.explain.source.trace import Trace


@dataclass
class Study:
    """The answer of `fullbore source`: places of the setting, values computed from it, and what was left aside."""

    package: str
    version: str
    flag: str
    places: list[Place]
    derived: list[Derived]
    mentions: list[Mention]
    unreadable: list[str]
    summary: list[str]

    def as_dict(self) -> dict[str, object]:
        return {
            "package": self.package,
            "version": self.version,
            "flag": self.flag,
            "places": [place.as_dict() for place in self.places],
            "derived": [derived.as_dict() for derived in self.derived],
            "mentions": [mention.as_dict() for mention in self.mentions],
            "unreadable": self.unreadable,
            "summary": self.summary,
        }


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees are millions of objects that stay; going over them again and again takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def study(package: Package, flag: str) -> Study:
    """Finds everything that `flag` (an option, a field or an environment variable) does in the package's source.

    Raises:
        SourceError: the package has no such setting.
    """
    with _no_garbage_collection():
        return _study(package, flag)


def _study(package: Package, flag: str) -> Study:
    index = Index(package)
    setting = find_setting(package, index, flag)
    trace = Trace(index, setting.name)
    _start(trace, setting)
    trace.run()
    Leftovers(trace, setting).collect()
    places, derived = merged(trace.findings.places), _used(trace.findings)
    summary = summarise(setting.name, places, derived, find_pairs(index, places))
    if index.narrowed:
        summary.append(index.narrowed)
    if trace.is_cut_short:
        summary.append(f"{setting.name} goes into very many names; only the first {len(trace.carriers)} were followed.")
    return Study(
        package=package.name,
        version=package.version,
        flag=setting.name,
        places=places,
        derived=derived,
        mentions=mentions(index, trace, setting.name),
        unreadable=sorted(index.unreadable),
        summary=summary,
    )


def _start(trace: Trace, setting: Setting) -> None:
    """Notes the declarations and queues the names that hold the setting from the beginning."""
    for module, node in setting.declarations:
        _declare(trace, setting, module, node)
    classes = setting.classes
    if not classes and not setting.declarations:
        classes = sorted(trace.types.owners(setting.name), key=lambda cls: (cls.module.path, cls.node.lineno))
    for cls in classes:
        trace.add(Holder(cls, setting.name), Reach(f"{cls.name}.{setting.name}"))


def _is_elsewhere(module: Module, setting: Setting) -> bool:
    """The option belongs to another program of the package: another part of it than the class of the setting."""
    parts = {tuple(cls.module.path.split("/")[:2]) for cls in setting.classes}
    return bool(parts) and tuple(module.path.split("/")[:2]) not in parts


def _declare(trace: Trace, setting: Setting, module: Module, node: ast.AST) -> None:
    scope = module.scope(node)
    if isinstance(node, ast.Constant):
        is_option = isinstance(module.parent[node], (ast.Call, ast.keyword))
        certainty = Certainty.LIKELY if is_option and _is_elsewhere(module, setting) else Certainty.CERTAIN
        into = "command-line option" if is_option else "entry in a table of variables"
        trace.findings.note(module, node, Reach("declaration", certainty), "defines", into)
        return
    statement = module.statement(node)
    place = trace.findings.note(module, node, Reach("declaration"), "defines", module.text(statement, 200))
    value = getattr(statement, "value", None)
    place.condition = ""
    place.runs = f"default {module.text(value, 80)}" if value is not None else ""
    if scope is None and isinstance(node, ast.Name):
        trace.add(Local(module, None, node.id), Reach(f"module variable {node.id}"))


def _used(findings: Findings) -> list[Derived]:
    """Computed values that something is done with; what allocates by them is what the setting sizes."""
    for derived in findings.derived:
        derived.uses = merged(derived.uses)
        if any(use.role == "sizes" for use in derived.uses):
            for place in findings.places:
                if place.file == derived.file and place.role == "derives" and place.into.endswith(derived.name):
                    place.role = "sizes"
    return sorted((each for each in findings.derived if each.uses), key=lambda each: (each.file, each.line))

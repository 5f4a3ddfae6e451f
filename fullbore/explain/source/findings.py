"""The record that a trace fills: places, values computed from the setting, and the nodes accounted for."""

from __future__ import annotations

import ast
from dataclasses import replace

from fullbore.explain.source.carriers import Reach
from fullbore.explain.source.module import Module
from fullbore.explain.source.places import Derived, Place
from fullbore.explain.source.scopes import name_line, statement_line
from fullbore.explain.source.uses import Role


class Findings:
    """`covered` holds every syntax node that a place or a computed value stands for."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.derived: list[Derived] = []
        self.covered: set[ast.AST] = set()

    def note(self, module: Module, node: ast.AST, reach: Reach, role: Role, into: str) -> Place:
        """Records a place: among the setting's own, or among the uses of the computed value that `reach` names."""
        self.covered.add(node)
        line = name_line(node)
        scope = module.scope(node)
        place = Place(
            file=module.path,
            line=line,
            function=scope.name if scope is not None else "<module>",
            qualname=module.qualname(node) or "<module>",
            role=role,
            text=_line_text(module, line),
            statement_line=statement_line(module, node),
            via=reach.via,
            certainty=reach.certainty,
            into=into,
        )
        self._list(reach).append(place)
        return place

    def note_target(self, module: Module, target: ast.AST, name: str, reach: Reach, place: Place) -> None:
        """The name that the value of `place` goes into; a place of its own when it stands on another line."""
        self.covered.add(target)
        line = name_line(target)
        if line != place.line:
            self._list(reach).append(replace(place, line=line, text=_line_text(module, line), into=name))

    def _list(self, reach: Reach) -> list[Place]:
        return self.places if reach.derived is None else self.derived[reach.derived].uses

    def computed(self, module: Module, node: ast.AST, name: str, expression: str) -> int:
        """Position in `derived` of the value that is computed from the setting into `name` at `node`."""
        key = (name, module.path, name_line(node))
        for position, known in enumerate(self.derived):
            if (known.name, known.file, known.line) == key:
                return position
        self.derived.append(Derived(*key, expression=expression))
        return len(self.derived) - 1


def _line_text(module: Module, line: int) -> str:
    return module.lines[line - 1].decode(errors="replace").strip()

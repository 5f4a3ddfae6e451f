"""Which classes hold the setting in which attribute, and whether `receiver.attribute` is one of those."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from fullbore.explain.source.carriers import Holder, Reach
from fullbore.explain.source.index import Definition, Index
from fullbore.explain.source.module import Module, is_store, terminal_name
from fullbore.explain.source.package import is_test
from fullbore.explain.source.types import Types, snake_case

MAX_FILES = 60  # an attribute name that occurs in more files is followed inside its own classes only
MAX_WIDENED = 12  # classes whose files are added for a setting named by a very common word


class Holders:
    """Registry of the attributes that hold the setting `name`."""

    def __init__(self, index: Index, types: Types, name: str) -> None:
        self._index = index
        self._types = types
        self._name = name
        self._known: dict[str, dict[Definition, Reach]] = defaultdict(dict)
        self._families: dict[Definition, set[Definition]] = {}

    def add(self, holder: Holder, reach: Reach) -> None:
        self._known[holder.name][holder.cls] = reach
        self._families[holder.cls] = self._index.family(holder.cls)
        if self._index.narrowed and holder.name == self._name and self._is_early(holder):
            self._index.narrow(self._name, {holder.cls.name, snake_case(holder.cls.name)})

    def classes(self, attribute: str) -> list[Definition]:
        return list(self._known[attribute])

    def family(self, cls: Definition) -> set[Definition]:
        return self._families[cls]

    def _is_early(self, holder: Holder) -> bool:
        return list(self._known[holder.name]).index(holder.cls) < MAX_WIDENED

    # ---- where to look

    def paths(self, holder: Holder) -> list[str]:
        """Files in which the attribute may be used: all that have the word, or the family's for a common word."""
        every = self._index.paths_with(holder.name)
        is_wide = holder.name == self._name and (not self._index.narrowed or self._is_early(holder))
        if is_wide or len(every) <= MAX_FILES:
            return every
        family = {cls.module.path for cls in self._families[holder.cls]}
        return [path for path in every if path in family]

    def attributes(self, name: str, paths: list[str]) -> Iterator[tuple[Module, ast.Attribute]]:
        """Every `x.name` in these files."""
        for path in paths:
            module = self._index.module(path)
            for node in module.named.get(name, ()) if module is not None else ():
                if isinstance(node, ast.Attribute) and module is not None:
                    yield module, node

    # ---- what an attribute is

    def reach_of(self, module: Module, receiver: ast.expr, attribute: str) -> Reach | None:
        """How `receiver.attribute` holds the setting, as far as the receiver's class tells; None if it does not."""
        known = self._known[attribute]
        cls = self._types.type_of(module, receiver)
        if cls is None:
            return self._by_convention(module, receiver, known) or self._by_only_owner(attribute)
        for holding, reach in known.items():
            if cls == holding or cls in self._families[holding]:
                return reach
        if attribute == self._name and self._types.is_dynamic(cls) and not self._types.owns(cls, attribute):
            return Reach(f"{module.text(receiver, 60)}.{attribute}")
        return None

    def _by_convention(self, module: Module, receiver: ast.expr, known: dict[Definition, Reach]) -> Reach | None:
        """An object named after its class: `server_args` is a ServerArgs."""
        named = [cls for cls in known if snake_case(cls.name) == terminal_name(receiver).strip("_")]
        namesakes = list(dict.fromkeys(other for cls in named for other in self._index.definitions(cls.name)))
        if len(namesakes) > 1:  # the nearest by folder
            nearest = max(namesakes, key=lambda cls: _shared_folders(cls.module.path, module.path))
            named = [cls for cls in named if cls == nearest]
        return known[named[0]] if named else None

    def _by_only_owner(self, attribute: str) -> Reach | None:
        """No other class has an attribute of this name. (Of the setting's own name, that is asked last of all.)"""
        if attribute == self._name or len(self._index.paths_with(attribute)) > MAX_FILES:
            return None
        if self.foreign_owners(attribute) or not self._known[attribute]:
            return None
        return next(iter(self._known[attribute].values())).doubted()

    def foreign_owners(self, attribute: str, near: str = "") -> set[Definition]:
        """Classes with an attribute of that name that no flow of the setting reaches.

        Those of test folders do not confuse what stands elsewhere (`near` is the file asked about).
        """
        ours = {relative for cls in self._known[attribute] for relative in self._families[cls]}
        others = self._types.owners(attribute) - ours
        return others if is_test(near) else {cls for cls in others if not is_test(cls.module.path)}

    def stores(self, cls: Definition, attribute: str) -> list[tuple[Module, ast.AST]]:
        """Assignments to the attribute in the modules of the class's family."""
        family = sorted(self._index.family(cls), key=_position)
        modules = dict.fromkeys(relative.module for relative in family)
        return [
            (module, node)
            for module in modules
            for node in module.named.get(attribute, ())
            if isinstance(node, ast.Attribute) and is_store(node)
        ]

    def fields(self, cls: Definition, attribute: str) -> list[tuple[Definition, ast.AST]]:
        """Declarations of the attribute in the bodies of the class, its bases and its subclasses."""
        return [
            (relative, node)
            for relative in sorted(self._families.get(cls) or self._index.family(cls), key=_position)
            for node in relative.module.named.get(attribute, ())
            if is_store(node) and relative.module.scope(node) is relative.node
        ]


def _shared_folders(one: str, other: str) -> int:
    pairs = zip(one.split("/")[:-1], other.split("/")[:-1], strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), min(one.count("/"), other.count("/")))


def _position(definition: Definition) -> tuple[str, int]:
    return definition.module.path, definition.node.lineno

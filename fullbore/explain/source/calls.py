"""Which function or class a call reaches, and which of its parameters an argument lands in."""

from __future__ import annotations

import ast
from typing import NamedTuple

from fullbore.explain.source.index import Definition, Index
from fullbore.explain.source.module import Function, Module, parameters, terminal_name
from fullbore.explain.source.types import Types

MAX_GUESSES = 2  # functions of one name that a call on an unknown object is followed into
MAX_NAMESAKES = 25  # files that define a name which is too common to guess by


# Methods of text and containers: a call on an unknown object is one of these before it is a namesake in the package.
COMMON_METHODS = {name for kind in (str, bytes, list, dict, set) for name in dir(kind)} | {
    "put",
    "send",
    "submit",
    "run",
}


class Landing(NamedTuple):
    """Where an argument arrives: a parameter of a function, or a field of a class without an `__init__`."""

    target: Definition
    name: str
    is_sure: bool


class Calls:
    """Answers `landings(module, call, argument)`."""

    def __init__(self, index: Index, types: Types) -> None:
        self._index = index
        self._types = types

    def landings(self, module: Module, call: ast.Call, argument: ast.AST) -> list[Landing]:
        """Everything that `argument` (an element of `call.args`, or one of its keywords) may become."""
        if terminal_name(call.func) == "partial" and call.args and argument is not call.args[0]:
            inner = ast.Call(func=call.args[0], args=call.args[1:], keywords=call.keywords)
            return self._landings(module, inner, argument)
        return self._landings(module, call, argument)

    def _landings(self, module: Module, call: ast.Call, argument: ast.AST) -> list[Landing]:
        found = []
        for target, is_sure in self.targets(module, call.func):
            landing = self._bind(target, call, argument, is_sure)
            if landing is not None:
                found.append(landing)
        sure = [landing for landing in found if landing.is_sure]
        return sure or (found if len(found) <= MAX_GUESSES else [])

    def targets(self, module: Module, func: ast.expr) -> list[tuple[Definition, bool]]:
        """Functions and classes that `func` may be, each with whether that is sure."""
        cls = self._index.named_class(module, func)
        if cls is not None:
            return [(cls, True)]
        function = self._types.called_function(module, func)
        if function is not None:
            return [(function, True)]
        if isinstance(func, ast.Name) and func.id == "cls" and (around := module.class_of(func)) is not None:
            return [(Definition(module, around), True)]
        return self._methods(module, func) if isinstance(func, ast.Attribute) else []

    def _methods(self, module: Module, func: ast.Attribute) -> list[tuple[Definition, bool]]:
        around = module.class_of(func)
        if terminal_name(func.value) == "super" and isinstance(func.value, ast.Call) and around is not None:
            bases = self._index.bases(Definition(module, around))
            methods = [self._index.method(base, func.attr) for base in bases]
            return [(method, True) for method in methods if method is not None]
        owner = self._index.named_class(module, func.value) or self._types.type_of(module, func.value)
        if owner is None:
            if func.attr in COMMON_METHODS or isinstance(func.value, (ast.Constant, ast.JoinedStr)):
                return []
            if len(self._index.paths_defining(func.attr)) > MAX_NAMESAKES:
                return []
            return [(each, False) for each in self._index.definitions(func.attr) if isinstance(each.node, Function)]
        method = self._index.method(owner, func.attr)
        if method is not None and not _is_stub(method):
            return [(method, True)]
        # A mixin calls what its sibling or a subclass provides.
        family = self._index.family(owner)
        relatives = [each for cls in sorted(family, key=_place) if (each := self._index.method(cls, func.attr))]
        return [(each, True) for each in dict.fromkeys(relatives) if not _is_stub(each)]

    def _bind(self, target: Definition, call: ast.Call, argument: ast.AST, is_sure: bool) -> Landing | None:
        if isinstance(target.node, ast.ClassDef):
            return self._bind_class(target, call, argument, is_sure)
        names = parameters(target.node)
        skipped = 1 if names and names[0] in ("self", "cls") and _is_bound(target, call) else 0
        name = _argument_name(names[skipped:], call, argument)
        return Landing(target, name, is_sure) if name in names else None

    def _bind_class(self, cls: Definition, call: ast.Call, argument: ast.AST, is_sure: bool) -> Landing | None:
        init = self._index.method(cls, "__init__")
        if init is not None and isinstance(init.node, Function):
            names = parameters(init.node)
            name = _argument_name(names[1:], call, argument)
            return Landing(init, name, is_sure) if name in names else None
        fields = [field for each in reversed(self._index.lineage(cls)) for field in _fields(each)]
        name = _argument_name(fields, call, argument)
        return Landing(cls, name, is_sure) if name in fields else None


def _argument_name(names: list[str], call: ast.Call, argument: ast.AST) -> str:
    """The parameter that an argument is bound to; empty when `*args` before it hide the position."""
    if isinstance(argument, ast.keyword):
        return argument.arg or ""
    for position, given in enumerate(call.args):
        if isinstance(given, ast.Starred):
            return ""
        if given is argument:
            return names[position] if position < len(names) else ""
    return ""


def _is_bound(target: Definition, call: ast.Call) -> bool:
    """`obj.method(x)` and `super().method(x)` fill `self`; `Class.method(obj, x)` does not."""
    func = call.func
    if not isinstance(func, ast.Attribute):
        return False
    around = target.module.class_of(target.node)
    is_class_method = any(terminal_name(each) == "classmethod" for each in target.node.decorator_list)
    return is_class_method or around is None or terminal_name(func.value) != around.name


def _fields(cls: Definition) -> list[str]:
    """Annotated fields of a dataclass-like class, in order."""
    body = cls.node.body
    return [each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]


def _is_stub(method: Definition) -> bool:
    """The body only raises NotImplementedError, passes or is `...`."""
    last = method.node.body[-1]
    if isinstance(last, ast.Raise):
        return last.exc is not None and terminal_name(last.exc) == "NotImplementedError"
    return isinstance(last, ast.Pass) or (isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant))


def _place(definition: Definition) -> tuple[str, int]:
    return definition.module.path, definition.node.lineno

"""What can hold the setting, and how it got there."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from fullbore.explain.source.index import Definition
from fullbore.explain.source.module import Function, Module
from fullbore.explain.source.places import Certainty


@dataclass(frozen=True)
class Holder:
    """The attribute `name` of instances of `cls` holds the setting."""

    cls: Definition
    name: str


@dataclass(frozen=True)
class Local:
    """A parameter or variable of `function`, or of the module itself (None)."""

    module: Module
    function: Function | None
    name: str
    line: int = 0  # assigned here; 0 for a parameter


@dataclass(frozen=True)
class Result:
    """What `function` returns, or one element of the tuple that it returns."""

    function: Definition
    element: int | None = None


Carrier = Holder | Local | Result


@dataclass(frozen=True)
class Reach:
    """How the value got here: `via` the names of the last steps, with what certainty.

    `derived` is the position in Findings.derived of the value computed from the setting (None: the setting itself),
    `hops` the functions and objects it went through, `entered` the function whose parameter brought it in, if one did,
    and `mixed` the condition that joins the setting with others, when it is only that condition that goes on.
    """

    via: str
    certainty: Certainty = Certainty.CERTAIN
    derived: int | None = None
    hops: int = 0
    entered: ast.AST | None = None
    mixed: str = ""

    def named(self, name: str) -> Reach:
        """The same value under one more name."""
        steps = [*self.via.split(" → "), name]
        return replace(self, via=" → ".join(dict.fromkeys(steps[-3:])))

    def doubted(self) -> Reach:
        """The same value, where following it took a guess."""
        return replace(self, certainty=max(self.certainty, Certainty.LIKELY))

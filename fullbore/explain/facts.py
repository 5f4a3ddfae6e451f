"""A fact is a value and where it was read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A place in the evidence."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fact:
    """`text` is what a reader sees; `value` is what rules compute with."""

    text: str
    value: Any = None
    source: Source | None = None

    def __str__(self) -> str:
        return self.text if self.source is None else f"{self.text} ({self.source})"

    @property
    def number(self) -> float:
        """The value as a number.

        Raises:
            TypeError, ValueError: if it is none.
        """
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Reading:
    """A setting or measurement, by the name it has in the evidence."""

    name: str
    value: Any
    source: Source

    def fact(self, text: str | None = None) -> Fact:
        return Fact(text or f"{self.name} = {show(self.value)}", self.value, self.source)


def show(value: Any, digits: int = 3) -> str:
    """Numbers short, with thousands separators and without a trailing .0; everything else as it is."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        if abs(value) >= 100:
            return f"{value:,.1f}"
        return f"{value:.{digits}g}"
    return str(value)


def first(facts: Iterable[Fact | None]) -> Fact | None:
    """The first one that is known."""
    return next((fact for fact in facts if fact is not None), None)

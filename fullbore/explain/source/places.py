"""What is found about a setting: places in the source, values computed from it, and mentions that do not count."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from fullbore.explain.source.uses import Role

# Of several things that one line does with a setting, the first in this list names it.
ROLE_ORDER: list[Role] = ["guards", "validates", "sizes", "defines", "defaults", "derives", "passes on"]


class Certainty(IntEnum):
    """How sure it is that a place is about this setting, from most to least."""

    CERTAIN = 0  # the type, the only owner of the name, or the flow of the value says so
    LIKELY = 1  # the type of the object is unknown and other classes have an attribute of this name
    SAME_NAME = 2  # a parameter or variable of this name; nothing seen that gives it the setting

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass
class Place:
    """One line that has to do with the setting.

    `condition` is the source of the fork (guards, validates) or of the branch around (derives, defaults); `runs` what
    the fork runs; `into` where the value goes; `via` the name it is known by here and how it got it.
    """

    file: str
    line: int
    function: str
    qualname: str
    role: Role
    text: str
    statement_line: int
    via: str
    certainty: Certainty
    condition: str = ""
    runs: str = ""
    into: str = ""

    def as_dict(self) -> dict[str, object]:
        return {
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "qualname": self.qualname,
            "role": self.role,
            "text": self.text,
            "condition": self.condition or None,
            "runs": self.runs[:300] or None,
            "into": self.into or None,
            "via": self.via,
            "certainty": self.certainty.word,
        }


@dataclass
class Derived:
    """A value computed from the setting, kept under a name of its own, and what that name is used for."""

    name: str
    file: str
    line: int
    expression: str
    uses: list[Place] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "file": self.file,
            "line": self.line,
            "expression": self.expression,
            "uses": [place.as_dict() for place in self.uses],
        }


@dataclass(frozen=True)
class Mention:
    """A line with the setting's name in it that is not a use of the setting, and why not."""

    file: str
    line: int
    why: str

    def as_dict(self) -> dict[str, object]:
        return {"file": self.file, "line": self.line, "why": self.why}


def merged(places: list[Place]) -> list[Place]:
    """One place per line, with its weightiest role, in the order of the source."""
    best: dict[tuple[str, int], Place] = {}
    for place in places:
        key = (place.file, place.line)
        if key not in best or _weight(place) < _weight(best[key]):
            best[key] = place
    return [best[key] for key in sorted(best)]


def _weight(place: Place) -> tuple[int, int]:
    return place.certainty, ROLE_ORDER.index(place.role)

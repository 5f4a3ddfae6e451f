"""The findings as text for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fullbore.explain.source.package import is_test
from fullbore.explain.source.places import Certainty, Derived, Place
from fullbore.explain.source.study import Study

MAX_WIDTH = 100
MAX_DERIVED = 6  # computed values shown without --all
MAX_USES = 8  # uses of each
ARROW = "-> "
ROLE_STYLE = {"guards": "bold yellow", "validates": "magenta", "sizes": "bold cyan", "defines": "green"}


def print_study(study: Study, console: Console, show_all: bool = False) -> None:
    """Prints summary, places by file, computed values, and what was left aside; everything with `show_all`."""
    _Printer(console, show_all).study(study)


class _Printer:
    def __init__(self, console: Console, show_all: bool) -> None:
        self._console = console
        self._show_all = show_all
        self._width = min(console.width, MAX_WIDTH)

    def study(self, study: Study) -> None:
        self._line(f"{study.flag} in {study.package} {study.version}", "bold")
        for sentence in study.summary:
            self._wrapped(sentence, "- ")
        shown = study.places if self._show_all else [place for place in study.places if _is_main(place)]
        self._places("Places", shown)
        hidden = len(study.places) - len(shown)
        if hidden:
            self._line("")
            self._wrapped(f"{hidden} more, in test folders or of the same name only: --all shows them.", "")
        self._derived(study.derived)
        self._aside(study)

    # ---- places

    def _places(self, title: str, places: list[Place]) -> None:
        self._line("")
        self._line(f"{title} ({len(places)})", "bold")
        for file, group in groupby(places, key=lambda place: place.file):
            self._line(file, "underline" if self._console.is_terminal else "")
            for statement in _by_statement(list(group)):
                self._place(statement)

    def _place(self, places: list[Place]) -> None:
        place = places[0]
        lines = f"{place.line}-{places[-1].line}" if places[-1].line != place.line else str(place.line)
        doubt = "" if place.certainty is Certainty.CERTAIN else f"  ({place.certainty.word})"
        head = Text(f"  {lines:>9}  ")
        head.append(f"{place.role:<9}", ROLE_STYLE.get(place.role, ""))
        head.append(f"  {place.qualname}{doubt}")
        self._console.print(head, no_wrap=True, overflow="ellipsis", crop=True)
        for detail in _details(places[-1]):
            self._detail(detail)
        if place.certainty is not Certainty.CERTAIN:
            self._wrapped(place.via, " " * 13, max_lines=2)

    # ---- computed values

    def _derived(self, derived: list[Derived]) -> None:
        chosen = derived if self._show_all else [each for each in derived if not is_test(each.file)][:MAX_DERIVED]
        if not chosen:
            return
        self._line("")
        self._line(f"Computed from it ({len(derived)})", "bold")
        for each in chosen:
            self._wrapped(f"{each.name} = {each.expression}  ({each.file}:{each.line})", "  ", max_lines=3)
            strong = [use for use in each.uses if self._show_all or use.role in ("guards", "sizes", "validates")]
            for use in strong if self._show_all else strong[:MAX_USES]:
                what = use.condition if use.role in ("guards", "validates") else use.into or use.text
                where = f"{use.file.rpartition('/')[2]}:{use.line}"
                self._line(self._cut(f"      {use.role:<9}  {where}  {use.function}: {what}"))
            if len(each.uses) > min(len(strong), MAX_USES) and not self._show_all:
                self._line(f"      {len(each.uses)} uses in all")
        if len(derived) > len(chosen):
            self._line(f"  {len(derived) - len(chosen)} more: --all shows them.")

    # ---- the rest

    def _aside(self, study: Study) -> None:
        reasons = Counter(mention.why for mention in study.mentions)
        if reasons:
            self._line("")
            self._line("Lines with the name that do not count", "bold")
            for why, number in reasons.most_common(None if self._show_all else 5):
                self._wrapped(f"{number} × {why}", "  ")
        if self._show_all:
            for mention in study.mentions:
                self._wrapped(f"{mention.file}:{mention.line}  {mention.why}", "    ")
        if study.unreadable:
            self._wrapped(f"Not valid Python, not read: {', '.join(study.unreadable[:5])}", "")

    def _detail(self, text: str) -> None:
        """A condition on as many lines as it takes, code on one."""
        if text.startswith(ARROW):
            self._line(self._cut(" " * 13 + text))
        else:
            self._wrapped(text, " " * 13, max_lines=8 if self._show_all else 3)

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._width else text[: self._width - 1] + "…"

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), no_wrap=True, overflow="ellipsis", crop=True)

    def _wrapped(self, text: str, indent: str, max_lines: int | None = None) -> None:
        lines = textwrap.wrap(
            text,
            self._width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            max_lines=max_lines,
            placeholder=" …",
            break_on_hyphens=False,
        )
        for line in lines:
            self._console.print(Text(line), no_wrap=True, overflow="ignore", crop=False)


def _is_main(place: Place) -> bool:
    return place.certainty is not Certainty.SAME_NAME and not is_test(place.file)


def _by_statement(places: list[Place]) -> list[list[Place]]:
    """Neighbouring lines of one statement in one role belong together."""
    groups: list[list[Place]] = []
    for place in places:
        last = groups[-1][-1] if groups else None
        if (
            last
            and (last.statement_line, last.role) == (place.statement_line, place.role)
            and place.line - last.line <= 3
        ):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _details(place: Place) -> list[str]:
    """What the line does, in one or two lines."""
    if place.role == "guards":
        return [f"if {place.condition}", f"{ARROW}{place.runs}"]
    if place.role == "validates":
        return [place.condition or place.text]
    if place.role == "passes on":
        return [f"{ARROW}{place.into}" if place.into else place.text]
    under = [f"when {place.condition}"] if place.condition else []
    if place.role in ("defines", "defaults") and "=" not in place.into:
        return [*under, place.text]
    if "=" in place.into:
        return [*under, place.into]
    is_whole = place.line == place.statement_line or not place.into
    return [*under, place.text if is_whole else f"{place.into} = … {place.text}"]

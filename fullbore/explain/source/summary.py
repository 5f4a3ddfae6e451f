"""The findings in sentences."""

from __future__ import annotations

import re

from fullbore.explain.source.package import is_test
from fullbore.explain.source.pairs import Pair
from fullbore.explain.source.places import Certainty, Derived, Place

MAX_LISTED = 8  # examples in one sentence; the places have them all
MAX_CODE = 100  # characters of code quoted


def summarise(name: str, places: list[Place], derived: list[Derived], pairs: list[Pair]) -> list[str]:
    """What `name` is, which functions fork on it and how, what it sizes, who checks and who changes it.

    Speaks of what is certain and outside test folders; the last sentences count the rest.
    """
    sure = [place for place in places if place.certainty is Certainty.CERTAIN and not is_test(place.file)]
    computed = [each for each in derived if not is_test(each.file)]
    sentences = [
        *_definition(name, sure),
        *_forks(name, sure, pairs),
        *_ordering(sure, [pair for pair in pairs if pair.first in sure]),
        *_sizes(name, sure, computed),
        *_computed_forks(computed),
        *_changes(name, sure),
        *_checks(sure),
    ]
    if not sure:
        sentences = [f"{name} occurs, but nothing here can be said to use it for certain."]
    return [*sentences, *_doubts(places)]


def _definition(name: str, places: list[Place]) -> list[str]:
    sentences = []
    for place in places:
        if place.role != "defines":
            continue
        if place.into == "command-line option":
            sentences.append(f"Its command-line option is declared in {_where(place)}.")
        elif place.via == "declaration":
            owner = place.qualname if place.qualname != "<module>" else "the module"
            default = f", {place.runs}" if place.runs else ""
            sentences.append(f"{name} is defined in {owner} ({_at(place)}){default}.")
        else:
            sentences.append(f"{name} is read from the environment in {_where(place)}.")
    return sentences


def _forks(name: str, places: list[Place], pairs: list[Pair]) -> list[str]:
    guards = [place for place in places if place.role == "guards"]
    if not guards:
        return [f"No function forks on {name} itself."] if places else []
    functions = list(dict.fromkeys(place.qualname for place in guards))
    verb = "functions fork" if len(functions) > 1 else "function forks"
    sentences = [f"{len(functions)} {verb} on {name}: {_list(functions)}."]
    paired = [place for pair in pairs for place in (pair.first, pair.second)]
    single = [place for place in guards if place not in paired]
    if len(single) <= MAX_LISTED:
        sentences += [
            f"{_where(place)}: if {_quote(place.condition)}{_asked(place)}, then {_quote(place.runs)}."
            for place in single
        ]
    return sentences


def _ordering(places: list[Place], pairs: list[Pair]) -> list[str]:
    """One sentence for all functions that move the same code by the same two conditions."""
    alike: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        alike.setdefault((pair.first.condition, pair.second.condition, pair.first.runs), []).append(pair)
    sentences = []
    for (first, second, code), group in alike.items():
        spots = [
            f"{pair.first.qualname} ({pair.first.file}:{pair.first.line} and {pair.second.line})" for pair in group
        ]
        shared = [name for name in group[0].between if all(name in pair.between for pair in group)]
        middle = _list(shared) or "the code in between"
        helper = _helper(group[0].first)
        asked = f" (the answer of {helper}{_called_at(group[0].first, places)})" if helper else ""
        sentences.append(
            f"It decides the order: {_quote(code)} runs before {middle} if {_quote(first)}{asked}, "
            f"after if {_quote(second)}, in {_list(spots)}."
        )
    return sentences


def _helper(place: Place) -> str:
    match = re.search(r"answer of (\w+)", place.via)
    return match.group(1) if match else ""


def _asked(place: Place) -> str:
    """The function that decides a condition which does not name the setting."""
    helper = _helper(place)
    return f" (the answer of {helper})" if helper else ""


def _called_at(place: Place, places: list[Place]) -> str:
    lines = [
        each.line
        for each in places
        if _helper(place) and each.qualname == place.qualname and each.into.startswith(f"{_helper(place)}(")
    ]
    return f", called with the setting at line {lines[0]}" if lines else ""


def _sizes(name: str, places: list[Place], derived: list[Derived]) -> list[str]:
    sentences = []
    for each in derived:
        sized = [use for use in each.uses if use.role == "sizes"]
        if sized:
            what = list(dict.fromkeys(use.into or use.runs or _short(use.text) for use in sized))
            sentences.append(
                f"{name} sizes {each.name} = {_quote(each.expression)} ({_spot(each)}), and with it: {_list(what)}."
            )
    computed = {(each.file, each.line) for each in derived}
    for place in places:
        if place.role == "sizes" and (place.file, place.statement_line) not in computed:
            computed.add((place.file, place.statement_line))
            sentences.append(f"{name} sizes {_quote(place.into or place.text)} ({_at(place)}).")
    more = f"It sizes {len(sentences) - MAX_LISTED} more."
    return sentences if len(sentences) <= MAX_LISTED else [*sentences[:MAX_LISTED], more]


def _computed_forks(derived: list[Derived]) -> list[str]:
    sentences = []
    for each in derived:
        guards = [use for use in each.uses if use.role == "guards"]
        if guards:
            spots = [f"{_where(use)} if {_quote(use.condition)}" for use in guards]
            sentences.append(
                f"{each.name} = {_quote(each.expression)} ({_spot(each)}) decides in {_list(spots, '; ', 3)}."
            )
    return sentences if len(sentences) <= MAX_LISTED else []


def _changes(name: str, places: list[Place]) -> list[str]:
    sentences = []
    defaults = [place for place in places if place.role == "defaults" and place.condition]
    if defaults:
        spots = [f"{_quote(place.into)} in {_where(place)}" for place in defaults]
        sentences.append(f"When unset: {_list(spots, '; ')}.")
    changes = [place for place in places if place.role == "derives" and _sets(place, name)]
    if changes:
        spots = [f"{_at(place)}" + (f" if {_quote(place.condition)}" if place.condition else "") for place in changes]
        sentences.append(f"The package changes {name} itself, {_times(len(changes))}: {_list(spots)}.")
    return sentences


def _sets(place: Place, name: str) -> bool:
    target = place.into.partition("=")[0].strip()
    return "=" in place.into and (target == name or target.endswith(f".{name}"))


def _checks(places: list[Place]) -> list[str]:
    checks = {
        (place.file, place.statement_line): place for place in places if place.role == "validates" and place.condition
    }
    spots = [f"{_where(place)}: {_quote(place.condition)}" for place in checks.values()]
    return [f"It is checked {_times(len(spots))}: {_list(spots, '; ')}."] if spots else []


def _doubts(places: list[Place]) -> list[str]:
    tests = sum(is_test(place.file) for place in places)
    doubtful = sum(place.certainty is not Certainty.CERTAIN and not is_test(place.file) for place in places)
    sentences = []
    if doubtful:
        sentences.append(f"Also of this name, without proof that it is this setting (marked): {_places(doubtful)}.")
    if tests:
        sentences.append(f"In test, benchmark and example folders, not spoken of here: {_places(tests)}.")
    return sentences


def _where(place: Place) -> str:
    return f"{place.qualname} ({_at(place)})"


def _at(place: Place) -> str:
    return f"{place.file}:{place.line}"


def _spot(derived: Derived) -> str:
    return f"{derived.file}:{derived.line}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _places(number: int) -> str:
    return "1 place" if number == 1 else f"{number} places"


def _list(items: list[str], separator: str = ", ", limit: int = MAX_LISTED) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def _short(code: str) -> str:
    return code if len(code) <= MAX_CODE else code[: MAX_CODE - 1] + "…"


def _quote(code: str) -> str:
    return f"`{_short(code)}`"

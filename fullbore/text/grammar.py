"""Grammars for outputs, in llguidance's serialised form: JSON schemas, regular expressions, choices, Lark grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from fullbore.errors import RequestError

MAX_GRAMMAR_CHARS = 512 * 1024
_MOST_REMAINDERS = 1000  # compiling `multipleOf` builds an automaton with a state for each remainder
# A model that hesitates could write spaces for ever; twenty are enough for indented JSON.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
# Otherwise llguidance works out, between two launches of others, how all the text that must come next is cut into
# tokens: about 1 us for each character, a second for /a{1000000}/. The last such line counts.
_NO_FORCING = '%llguidance {"no_forcing": true}'


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(schema: Any) -> str:
    """JSON that a schema allows. What is wrong with a schema beyond the obvious is found when it is compiled.

    Raises:
        RequestError: it is not a schema, or too large.
    """
    if schema is True:
        schema = {}
    check_schema(schema)
    rules = {"lark_grammar": f"start: @schema\n{_NO_FORCING}"}
    return _serialise(rules, {"name": "schema", "json_schema": {**schema, "x-guidance": JSON_OPTIONS}})


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references).

    Raises:
        RequestError: it ends in the middle; what else is wrong is found when it is compiled.
    """
    from llguidance import regex_to_lark

    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # the library drops it
        raise RequestError("The regular expression ends with a backslash that nothing follows.", "grammar")
    return lark_grammar(f"start: /{regex_to_lark(pattern)}/")


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises RequestError when there is none."""
    if not choices or "" in choices:
        raise RequestError("Give at least one choice, none of them empty.", "grammar")
    # In capitals it is one regular expression; as a rule, ten thousand choices would be too complex to follow.
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(text: str) -> str:
    """Text that a Lark grammar derives from `start`, in llguidance's dialect of Lark."""
    return _serialise({"lark_grammar": f"{text}\n{_NO_FORCING}"})


def check_schema(schema: Any) -> None:
    """Raises RequestError for what is no schema, or one that takes too long to compile."""
    if not isinstance(schema, dict):
        raise RequestError("The schema must be a JSON object.", "grammar")
    to_do: list[Any] = [schema]
    while to_do:
        value = to_do.pop()
        if isinstance(value, list):
            to_do += value
        elif isinstance(value, dict):
            to_do += value.values()
            _check_multiple(value.get("multipleOf"))


def _check_multiple(multiple: Any) -> None:
    if not isinstance(multiple, int | float):
        return
    _, digits, exponent = Decimal(str(multiple)).normalize().as_tuple()
    num_states = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    if num_states > _MOST_REMAINDERS:
        raise RequestError(f"multipleOf {multiple} is too hard to follow; use at most three digits.", "grammar")


def _serialise(*grammars: dict[str, Any]) -> str:
    text = json.dumps({"grammars": grammars})
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"The grammar or schema is longer than {MAX_GRAMMAR_CHARS} characters.", "grammar")
    return text

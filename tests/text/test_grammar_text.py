"""What becomes a grammar, and what is refused before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullbore.errors import RequestError
from fullbore.text.grammar import (
    MAX_GRAMMAR_CHARS,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from fullbore.text.tool_formats import HERMES, LLAMA3_JSON
from fullbore.text.tools import Tool, call_grammar


def rules_of(grammar: str) -> str:
    [grammars] = json.loads(grammar)["grammars"]
    rules, _, settings = grammars["lark_grammar"].rpartition("\n")
    assert settings == '%llguidance {"no_forcing": true}'
    return str(rules)


def test_a_schema_keeps_all_it_has_but_not_settings_of_the_library() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}}
    [_, grammar] = json.loads(json_schema_grammar({**schema, "x-guidance": {"whitespace_flexible": False}}))["grammars"]
    assert grammar["json_schema"].pop("x-guidance")["whitespace_flexible"] is True
    assert grammar["json_schema"] == schema
    assert json.loads(json_schema_grammar(True))["grammars"][1]["json_schema"].keys() == {"x-guidance"}
    assert json_object_grammar() == json_schema_grammar({"type": "object"})


@pytest.mark.parametrize("schema", [False, None, 5, "{}", []])
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(RequestError, match="JSON object") as error:
        json_schema_grammar(schema)
    assert error.value.param == "grammar"


@pytest.mark.parametrize("multiple", [1, 2.5, 0.001, 250, 100, 1e-9, "x"])
def test_multiples_that_can_be_followed(multiple: Any) -> None:
    json_schema_grammar({"items": [{"multipleOf": multiple}]})


@pytest.mark.parametrize("multiple", [999983, 99.999, 1e6, 2**200])
def test_multiples_that_take_too_long(multiple: float) -> None:
    with pytest.raises(RequestError, match="multipleOf"):
        json_schema_grammar({"properties": {"a": {"anyOf": [{"multipleOf": multiple}]}}})


def test_grammars_of_any_length_are_not_sent_around() -> None:
    with pytest.raises(RequestError, match=str(MAX_GRAMMAR_CHARS)):
        lark_grammar("x" * MAX_GRAMMAR_CHARS)


def test_choices_and_regular_expressions() -> None:
    assert rules_of(choice_grammar(["a", 'b"'])) == 'start: CHOICE\nCHOICE: "a" | "b\\""'
    assert rules_of(regex_grammar("a/b")) == "start: /a\\/b/"
    for choices in ([], ["a", ""]):
        with pytest.raises(RequestError):
            choice_grammar(choices)


def test_calls() -> None:
    tools = [Tool("f", None, {"type": "object"}), Tool("g", "Does it.", {"type": "object"})]
    rules = rules_of(call_grammar(tools, HERMES, may_repeat=True)).splitlines()
    assert rules[0] == 'start: call ("\\n" call)*'
    assert rules[1] == "call: call_0 | call_1"
    assert "<tool_call>" in rules[2]
    rules = rules_of(call_grammar(tools[:1], LLAMA3_JSON, may_repeat=False)).splitlines()
    assert rules[:2] == ["start: call", "call: call_0"]
    assert "<tool_call>" not in "".join(rules)
    with pytest.raises(RequestError, match="multipleOf"):
        call_grammar([Tool("f", None, {"multipleOf": 999983})], HERMES, may_repeat=False)


@pytest.mark.parametrize("pattern", ["\\", "a\\", "a\\\\\\"])
def test_a_regular_expression_that_ends_in_the_middle(pattern: str) -> None:
    with pytest.raises(RequestError, match="ends with a backslash"):
        regex_grammar(pattern)
    regex_grammar(pattern + "\\")

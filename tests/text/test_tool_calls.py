"""Calls of functions are found in an output however its pieces are cut."""

from __future__ import annotations

import random

import pytest

from fullbore.text.tool_calls import CallArguments, CallStart, Event, JsonEnd, ToolCallParser
from fullbore.text.tool_formats import HERMES, KIMI_K2, LLAMA3_JSON, MISTRAL, ToolFormat, find_tool_format

NAMES = {"f", "get_weather"}
F, WEATHER = CallStart("f"), CallStart("get_weather")
NO_ARGUMENTS = CallArguments("{}")

CASES: list[tuple[ToolFormat, str, list[Event]]] = [
    (HERMES, "no call at all", ["no call at all"]),
    (HERMES, "  two\n\nlines \n", ["  two\n\nlines \n"]),
    (
        HERMES,
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{\\\\", "b": [1]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "get_weather"}\n</tool_call>\n',
        ["Hi.", F, CallArguments('{"a": "x}\\"{\\\\", "b": [1]}'), WEATHER, NO_ARGUMENTS],
    ),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>Done.', [F, NO_ARGUMENTS, "Done."]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F, CallArguments('{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [F, NO_ARGUMENTS]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', [F, NO_ARGUMENTS]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', [F, CallArguments('{"a')]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {}} ok', ['<tool_call>{"name": "g", "arguments": {}} ok']),
    (HERMES, "<tool_call>{broken} ok", ["<tool_call>{broken} ok"]),
    (HERMES, "<tool_call>f(1)", ["<tool_call>f(1)"]),
    (HERMES, '<tool_call>{"name": ["f"], "arguments": 1}', ['<tool_call>{"name": ["f"], "arguments": 1}']),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>And<tool_call>{"name":"f","arguments":{}}</tool_call>',
        [F, NO_ARGUMENTS, "And", F, NO_ARGUMENTS],
    ),
    (
        HERMES,
        '<tool_call>f(1)</tool_call><tool_call>{"name":"f","arguments":{}}',
        ["<tool_call>f(1)</tool_call>", F, NO_ARGUMENTS],
    ),
    (HERMES, "a <tool b", ["a <tool b"]),
    (HERMES, "a <tool_cal", ["a <tool_cal"]),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1}}', [F, CallArguments('{"a": 1}')]),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
        [F, NO_ARGUMENTS, WEATHER, NO_ARGUMENTS],
    ),
    (LLAMA3_JSON, '{"answer": 5} yes', ['{"answer": 5} yes']),
    (LLAMA3_JSON, 'Hello {"name": "f", "parameters": {}}', ['Hello {"name": "f", "parameters": {}}']),
    (LLAMA3_JSON, '  {"name": "f", "pa', ['{"name": "f", "pa']),
    (LLAMA3_JSON, "; no call", ["; no call"]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]',
        [F, CallArguments('{"a": 1}'), WEATHER, NO_ARGUMENTS],
    ),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{"a": []}', [F, NO_ARGUMENTS, F, CallArguments('{"a": []}')]),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS]{}', ['[TOOL_CALLS]f{"a": 1}', F, NO_ARGUMENTS]),
    (MISTRAL, "[1, 2]", ["[1, 2]"]),
    (
        KIMI_K2,
        "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "x"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        ["ok", WEATHER, CallArguments('{"city": "x"}'), F, NO_ARGUMENTS],
    ),
]  # fmt: skip


def joined(events: list[Event]) -> list[Event]:
    """Pieces of one text, or of one call's arguments, put together."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, str) and isinstance(last, str):
            result[-1] = last + event
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(last.text + event.text)
        else:
            result.append(event)
    return result


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_calls_are_found_however_the_text_is_cut(tool_format: ToolFormat, text: str, expected: list[Event]) -> None:
    for seed in range(100):
        chance = random.Random(seed)
        longest = 1 if seed == 0 else 10 * seed
        parser, events, start = ToolCallParser(tool_format, NAMES), [], 0
        while start < len(text):
            end = start + chance.randint(1, longest)
            events += parser.push(text[start:end])
            start = end
        assert joined(events + parser.flush()) == expected


def test_arguments_come_as_soon_as_they_are_there() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a": "b') == [F, CallArguments('{"a": "b')]
    assert parser.push("c") == [CallArguments("c")]


def test_text_is_held_back_only_where_a_call_may_begin() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("a < b <tool") == ["a < b"]
    assert parser.push("s") == [" <tools"]


@pytest.mark.parametrize(
    ("text", "length"), [('{"a": [1, {}]} x', 14), ('["}"]x', 5), ('{"a\\"}": 1}x', 11), ("[[]", None), ('{"a', None)]
)
def test_the_end_of_json(text: str, length: int | None) -> None:
    assert JsonEnd().find(text) == length
    end, position = JsonEnd(), 0
    found = None
    while found is None and position < len(text):
        found = end.find(text[position])
        position += 1
    assert (position if found is not None else None) == length


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", HERMES),
        ("<tools>{{ tools }}</tools><tool_call>", HERMES),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA3_JSON),
        ("<|tool_calls_section_begin|>", KIMI_K2),
    ],
)
def test_the_format_is_found_in_the_template(template: str, expected: ToolFormat) -> None:
    assert find_tool_format(template) is expected


def test_ids_of_calls() -> None:
    assert HERMES.make_id("f", 0) != HERMES.make_id("f", 0)
    assert len(MISTRAL.make_id("f", 0)) == 9
    assert KIMI_K2.make_id("f", 3) == "functions.f:3"

"""How models of different families write a call of a function into their output."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass


def _openai_id(name: str, index: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id(name: str, index: int) -> str:
    return secrets.token_hex(5)[:9]  # its template takes no other length


def _kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"  # its template puts the id into the prompt


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls: `begin`, then calls with any of `skipped` and white space around them.

    A call is a JSON object {"name": …, "arguments": {…}} (or "parameters"), or what `tagged_head` matches, its group
    being the function's name, and then the arguments.
    """

    name: str
    begin: str  # "": the calls are the whole output, which then starts with "{"
    skipped: tuple[str, ...]
    tagged_head: re.Pattern[str] | None = None
    inner_markers: tuple[str, ...] = ()
    make_id: Callable[[str, int], str] = _openai_id  # of a call, from the function's name and the call's index

    @property
    def markers(self) -> frozenset[str]:
        """Texts that are special tokens of some vocabularies, and must not be lost as such."""
        return frozenset({self.begin, *self.skipped, *self.inner_markers})


HERMES = ToolFormat("hermes", "<tool_call>", ("</tool_call>", "<tool_call>"))
LLAMA3_JSON = ToolFormat("llama3_json", "", (";", ",", "<|python_tag|>"))
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    ("[TOOL_CALLS]", "[", "]", ","),
    re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]\s*(?=\{)"),
    ("[ARGS]", "[CALL_ID]"),
    _mistral_id,
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"),
    ("<|tool_call_argument_begin|>",),
    _kimi_id,
)
TOOL_FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3_JSON, MISTRAL, KIMI_K2)}


def find_tool_format(chat_template: str) -> ToolFormat:
    """The format that a chat template shows; without a hint Hermes', which is also what `text.tools` asks for."""
    if KIMI_K2.begin in chat_template:
        return KIMI_K2
    if MISTRAL.begin in chat_template:
        return MISTRAL
    if HERMES.begin not in chat_template and "<|python_tag|>" in chat_template:
        return LLAMA3_JSON
    return HERMES

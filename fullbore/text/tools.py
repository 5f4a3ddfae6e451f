"""Functions that a model may call: in its prompt, and as a grammar where it has to call one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from fullbore.text.grammar import JSON_OPTIONS, check_schema, lark_grammar
from fullbore.text.tokenizer import ChatMessage, ToolCall
from fullbore.text.tool_formats import HERMES, LLAMA3_JSON, ToolFormat

_INSTRUCTIONS = """\
You may call functions to answer. These are their signatures, as JSON between <tools> tags:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and its arguments between <tool_call> tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


class Tool(Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any]  # JSON schema of an object

    def for_template(self) -> dict[str, Any]:
        """In OpenAI's form, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


def forced_format(own: ToolFormat) -> ToolFormat:
    """How a model writes calls when a grammar makes it: its own way where that consists of plain text."""
    return HERMES if own is HERMES else replace(LLAMA3_JSON, make_id=own.make_id)


def call_grammar(tools: Sequence[Tool], tool_format: ToolFormat, *, may_repeat: bool) -> str:
    """The grammar of an output that is one call of one of the functions or, with `may_repeat`, several.

    Args:
        tool_format: HERMES or LLAMA3_JSON, see `forced_format`.

    Raises:
        RequestError: a function's parameters are not a schema.
    """
    if tool_format is HERMES:
        before, between, after, separator = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"
    else:
        before, between, after, separator = '{"name": "', '", "parameters": ', "}", "; "
    rules = [f"start: call ({json.dumps(separator)} call)*" if may_repeat else "start: call"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        check_schema(tool.parameters)
        head = json.dumps(before + tool.name + between)
        schema = json.dumps({**tool.parameters, "x-guidance": JSON_OPTIONS})
        rules += [f"call_{index}: {head} arguments_{index} {json.dumps(after)}", f"arguments_{index}: %json {schema}"]
    return lark_grammar("\n".join(rules))


def write_tools_into_messages(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """The conversation for a chat template that knows nothing of functions: as Hermes writes it, in plain messages."""
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        first = ChatMessage(role="system", content=f"{plain[0]['content']}\n\n{instructions}")
        return [first, *plain[1:]]
    return [ChatMessage(role="system", content=instructions), *plain]


def with_arguments_as_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The conversation for a chat template that expects the arguments of calls as JSON texts, not as objects."""
    changed: list[Any] = [dict(message) for message in messages]
    for message in changed:
        if "tool_calls" in message:
            message["tool_calls"] = [_with_arguments_as_text(call) for call in message["tool_calls"]]
    return changed


def _with_arguments_as_text(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _plain_message(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    parts = [message["content"], *(f"<tool_call>\n{function}\n</tool_call>" for function in functions)]
    return ChatMessage(role=message["role"], content="\n".join(filter(None, parts)))

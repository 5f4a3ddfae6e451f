"""The conversation in a chat request, from OpenAI's form to that of chat templates."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from fullbore.server.errors import ApiError
from fullbore.server.strict import FIRST_ERROR, Strict, refuse_unsupported
from fullbore.text.tokenizer import ChatMessage, FunctionCall, ToolCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCallIn(Strict):
    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCallIn(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCallIn

    def for_template(self, path: str) -> ToolCall:
        """The call as chat templates know it. `path`: where it is in the request, for error messages."""
        refuse_unsupported(self.model_extra or {}, f"{path}.")
        refuse_unsupported(self.function.model_extra or {}, f"{path}.function.")
        arguments = _json_object(self.function.arguments)
        if arguments is None:
            param = f"{path}.function.arguments"
            raise ApiError(400, f"{param} must be a JSON object, written as text.", param)
        return ToolCall(
            id=self.id, type="function", function=FunctionCall(name=self.function.name, arguments=arguments)
        )


class Message(Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], FIRST_ERROR] | None,
        Field(description="May be left out only by an assistant that calls functions."),
    ] = None
    name: str | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCallIn], FIRST_ERROR] | None, Field(description="Functions that the assistant called.")
    ] = None
    tool_call_id: Annotated[str | None, Field(description="Of the call that a tool's message answers.")] = None

    def for_template(self, index: int) -> ChatMessage:
        """The message as chat templates know it. `index`: its place in the conversation, for error messages.

        Raises:
            ApiError: it is not supported, or its parts do not fit together.
        """
        path = f"messages.{index}"
        refuse_unsupported(self.model_extra or {}, f"{path}.")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ApiError(400, f"{path}.content is required.", f"{path}.content")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(400, f"{path}.tool_calls: only an assistant calls functions.", f"{path}.tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ApiError(400, f"{path}.tool_call_id is required.", f"{path}.tool_call_id")
        message = ChatMessage(role="system" if self.role == "developer" else self.role, content=self._text(path))
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.for_template(f"{path}.tool_calls.{number}") for number, call in calls]
        if self.role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
            if self.name is not None:
                message["name"] = self.name
        return message

    def _text(self, path: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for number, part in enumerate(self.content):
            refuse_unsupported(part.model_extra or {}, f"{path}.content.{number}.")
        return "".join(part.text for part in self.content)


def conversation(messages: list[Message]) -> list[ChatMessage]:
    """Messages as chat templates know them; raises ApiError when there are none or one is not supported."""
    if not messages:
        raise ApiError(400, "messages is empty; give at least one message.", "messages")
    return [message.for_template(index) for index, message in enumerate(messages)]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

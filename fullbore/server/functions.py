"""Functions that a model may call: the parameters that offer them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fullbore.server.errors import ApiError
from fullbore.server.strict import FIRST_ERROR, Strict, refuse_unsupported
from fullbore.text.tools import Tool

MAX_TOOLS = 1024

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON schema; default: no parameters.")] = None
    strict: Annotated[bool | None, Field(description="Enforced where tool_choice makes the model call.")] = None


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionChoice(Strict):
    name: str


class ToolChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class OffersTools(Strict):
    """Fields of a chat request."""

    tools: Annotated[
        Annotated[list[ToolDefinition], FIRST_ERROR] | None, Field(description="Functions that the model may call.")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None,
        Field(description="auto (default with tools): as the model likes; required, or a function: it has to call."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: at most one call, where tool_choice is required.")
    ] = None

    def check_tools(self) -> None:
        """Raises ApiError for what is not supported or does not fit together."""
        definitions = self.tools or []
        if len(definitions) > MAX_TOOLS:
            raise ApiError(400, f"tools has {len(definitions)} functions; at most {MAX_TOOLS} are allowed.", "tools")
        for index, definition in enumerate(definitions):
            refuse_unsupported(definition.model_extra or {}, f"tools.{index}.")
            refuse_unsupported(definition.function.model_extra or {}, f"tools.{index}.function.")
        names = [definition.function.name for definition in definitions]
        if len(set(names)) < len(names):
            raise ApiError(400, "tools has two functions of one name; names must differ.", "tools")
        if self.tool_choice in (None, "none", "auto"):
            return
        if not definitions:
            raise ApiError(400, "tool_choice asks for a call, but there are no tools.", "tool_choice")
        if isinstance(self.tool_choice, ToolChoice):
            refuse_unsupported(self.tool_choice.model_extra or {}, "tool_choice.")
            if self.tool_choice.function.name not in names:
                raise ApiError(
                    400, f"tool_choice names {self.tool_choice.function.name}, which is not in tools.", "tool_choice"
                )

    def offered_tools(self) -> list[Tool]:
        """The functions that the model is told about: none where it must not call any."""
        if self.tool_choice == "none":
            return []
        return [
            Tool(
                definition.function.name,
                definition.function.description,
                definition.function.parameters or NO_PARAMETERS,
            )
            for definition in self.tools or []
        ]

    def required_tools(self) -> list[Tool]:
        """The functions of which it has to call one; empty where it need not call."""
        if self.tool_choice == "required":
            return self.offered_tools()
        if isinstance(self.tool_choice, ToolChoice):
            return [tool for tool in self.offered_tools() if tool.name == self.tool_choice.function.name]
        return []

    @property
    def may_repeat_calls(self) -> bool:
        return self.tool_choice == "required" and self.parallel_tool_calls is not False


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

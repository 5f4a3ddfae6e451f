"""Function calls in an answer, in OpenAI's form: whole, or as the deltas of a stream."""

from __future__ import annotations

from typing import TypeVar

from fullbore.server.responses import CalledFunction, FinishReason, FunctionDelta, ToolCall, ToolCallDelta
from fullbore.text.tool_calls import CallArguments, CallStart, ToolCallParser
from fullbore.text.tool_formats import ToolFormat

Reason = TypeVar("Reason", FinishReason, FinishReason | None)


class CallReader:
    """Reads one choice's text, in pieces, into content and calls."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str]) -> None:
        """`names`: the functions that may be called."""
        self._format = tool_format
        self._parser = ToolCallParser(tool_format, names)
        self.calls: list[ToolCall] = []  # so far
        self.content = ""  # so far

    def push(self, text: str, is_end: bool) -> tuple[str, list[ToolCallDelta]]:
        """Takes the next piece; returns the content and the calls' deltas that it makes certain."""
        events = self._parser.push(text)
        if is_end:
            events += self._parser.flush()
        content = "".join(event for event in events if isinstance(event, str))
        self.content += content
        deltas = [self._delta(event) for event in events if not isinstance(event, str)]
        return content, deltas

    def finish_reason(self, reason: Reason) -> Reason:
        """What OpenAI calls the end of an answer with calls, unless it was cut in the middle of one."""
        return "tool_calls" if reason == "stop" and self.calls and not self._parser.is_cut else reason

    def _delta(self, event: CallStart | CallArguments) -> ToolCallDelta:
        if isinstance(event, CallStart):
            index = len(self.calls)
            call = ToolCall(
                id=self._format.make_id(event.name, index), function=CalledFunction(name=event.name, arguments="")
            )
            self.calls.append(call)
            function = FunctionDelta(name=event.name, arguments="")
            return ToolCallDelta(index=index, id=call.id, type="function", function=function)
        self.calls[-1].function.arguments += event.text
        return ToolCallDelta(index=len(self.calls) - 1, function=FunctionDelta(arguments=event.text))

"""Finds calls of functions in an output that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from fullbore.text.tool_formats import ToolFormat

_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_JSON_STRUCTURE = re.compile(r'["\\{}\[\]]')
_LONGEST_HEAD = 300  # characters before the arguments of a tagged call


class CallStart(NamedTuple):
    """A call of the function `name` begins; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """The next piece of the latest call's arguments, which together are a JSON object."""

    text: str


Event = str | CallStart | CallArguments  # str: text beside the calls


class ToolCallParser:
    """Separates text and calls; wherever the pieces are cut, the same comes out.

    What looks like a call but is none, for want of a known function or because it is not JSON, stays text.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        """`names`: the functions that may be called."""
        self._format = tool_format
        self._names = names
        self._held = ""  # text that is not decided yet
        self._opening = ""  # the marker before it, in case that it is no call
        self._state = self._text if tool_format.begin else self._start
        self._end = JsonEnd()  # of the arguments under way
        self._is_in_object = False  # the arguments under way are part of an object, which still has to be closed
        self._events: list[Event] = []

    @property
    def is_cut(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return self._state == self._arguments

    def push(self, text: str) -> list[Event]:
        """Adds text; returns what has become certain."""
        self._held += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """What is still held back, to be called at the end."""
        is_text = self._state in (self._text, self._start, self._head)
        text = self._opening + self._held if self._state == self._head else self._held
        self._held = ""
        return [text] if is_text and text else []

    # Each state takes what it can of the held text and returns whether to go on: False when more text is needed.

    def _text(self) -> bool:
        begin = self._format.begin
        start = self._held.find(begin) if begin else -1
        end = start if start >= 0 else len(self._held) - _partial_suffix(self._held, begin)
        text = self._held[:end].rstrip()  # white space before a call is not part of the text
        if text:
            self._events.append(text)
        if start < 0:
            self._held = self._held[len(text) :]
            return False
        self._held = self._held[start + len(begin) :]
        self._opening = begin
        self._state = self._between
        return True

    def _start(self) -> bool:
        """The output of a model that writes either text or calls."""
        first = self._held.lstrip()
        if not first or any(marker.startswith(first) and marker != first for marker in self._format.skipped):
            return False
        is_call = first.startswith(("{", *(marker for marker in self._format.skipped if len(marker) > 1)))
        self._state = self._between if is_call else self._text
        return True

    def _between(self) -> bool:
        self._held = self._held.lstrip()
        skipped = self._format.skipped
        if any(marker.startswith(self._held) and marker != self._held for marker in skipped):
            return False  # nothing yet, or the beginning of a marker
        for marker in skipped:
            if self._held.startswith(marker):
                self._held = self._held[len(marker) :]
                self._opening = marker if marker == self._format.begin else self._opening
                return True
        self._state = self._head
        return True

    def _head(self) -> bool:
        """What precedes the arguments of a call."""
        self._is_in_object = self._held.startswith("{")
        pattern = _JSON_HEAD if self._is_in_object else self._format.tagged_head
        match = pattern.match(self._held) if pattern is not None else None
        if match is not None and match[1] in self._names:
            self._opening = ""
            self._events.append(CallStart(match[1]))
            self._held = self._held[match.end() :]
            self._end = JsonEnd()
            self._state = self._arguments
            return True
        if self._is_in_object:
            return self._whole_object()
        if pattern is not None and match is None and "{" not in self._held and len(self._held) < _LONGEST_HEAD:
            return False
        return self._is_no_call(0)  # what follows is text, in which calls may begin

    def _whole_object(self) -> bool:
        """A call whose parts come in another order, or with others; decided when all of it is there."""
        end = JsonEnd().find(self._held)
        if end is None:
            return False
        call = _read_call(self._held[:end], self._names)
        if call is None:
            return self._is_no_call(end)
        self._opening = ""
        self._events += call
        self._held = self._held[end:]
        self._state = self._between
        return True

    def _arguments(self) -> bool:
        end = self._end.find(self._held)
        piece = self._held[:end]
        if piece:
            self._events.append(CallArguments(piece))
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self._state = self._closing if self._is_in_object else self._between
        return True

    def _closing(self) -> bool:
        _, brace, rest = self._held.partition("}")
        if not brace:
            return False
        self._held = rest
        self._state = self._between
        return True

    def _is_no_call(self, end: int) -> bool:
        if text := self._opening + self._held[:end]:
            self._events.append(text)
        self._opening = ""
        self._held = self._held[end:]
        self._state = self._text
        return True


class JsonEnd:
    """Finds the end of a JSON object or array that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # the piece before ended with a backslash

    def find(self, text: str) -> int | None:
        """The index after the end, if it is in `text`, which continues the text of the calls before."""
        position = 1 if self._is_escaped and text else 0
        self._is_escaped = self._is_escaped and not text
        while (match := _JSON_STRUCTURE.search(text, position)) is not None:
            position = match.end()
            character = match[0]
            if character == "\\":
                self._is_escaped = position == len(text)
                position += 1
            elif character == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


def _read_call(text: str, names: Collection[str]) -> list[Event] | None:
    """The events of a call that is complete; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or function["name"] not in names:
        return None
    arguments = function.get("arguments", function.get("parameters")) or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return [CallStart(function["name"]), CallArguments(arguments)]


def _partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)

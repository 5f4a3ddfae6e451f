"""The events of a profiler trace one after the other, whatever the size of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fullbore.explain.evidence.files import EvidenceFile

_LARGEST_EVENT_CHARS = 8 << 20
_KEPT_HEAD_CHARS = 1 << 20
_START = re.compile(r"\"traceEvents\"\s*:\s*\[|^\s*\[(?=\s*\{)")


class TraceStream:
    """Iterates over event dicts; `outside` is the text around them, where the metadata is."""

    def __init__(self, file: EvidenceFile) -> None:
        self._file = file
        self.outside = ""
        self.problem: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decoder = json.JSONDecoder()
        buffer, position, is_inside = "", 0, False
        for chunk in self._file.chunks():
            buffer = buffer[position:] + chunk
            position = 0
            if not is_inside:
                start = _START.search(buffer)
                if start is None:
                    if len(buffer) > _KEPT_HEAD_CHARS:
                        self.problem = "no list of trace events in its first megabyte"
                        return
                    continue
                self.outside = buffer[: start.start()]
                position, is_inside = start.end(), True
            while True:
                position = _skip(buffer, position)
                if position >= len(buffer):
                    break
                if buffer[position] == "]":
                    self._read_tail(buffer[position + 1 :])
                    return
                try:
                    event, position = decoder.raw_decode(buffer, position)
                except ValueError:
                    if len(buffer) - position > _LARGEST_EVENT_CHARS:
                        self.problem = "it is broken after the events that were read"
                        return
                    break  # the event goes on in the next chunk
                if isinstance(event, dict):
                    yield event
        self.problem = self.problem or self._file.problem or "it ends before its list of events does"

    def _read_tail(self, text: str) -> None:
        """Metadata can follow the events; what `chunks` has not delivered yet is not needed."""
        self.outside += text[:_KEPT_HEAD_CHARS]


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position

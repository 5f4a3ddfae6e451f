"""All engine logs together, line by line in constant memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fullbore.explain.evidence.files import Line
from fullbore.explain.evidence.llama_log import LlamaLog
from fullbore.explain.evidence.log_time import log_time_s
from fullbore.explain.evidence.marks import Marks
from fullbore.explain.evidence.sglang_log import SglangLog
from fullbore.explain.evidence.vllm_log import VllmLog
from fullbore.explain.facts import Source

_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "line", "text", "textPayload", "body")


def lines_of(rows: list[Any]) -> list[Line]:
    """The text of log lines wrapped into JSON, as Docker, journald, Loki and structured loggers write them; else []."""
    tables = [row for row in rows if isinstance(row, dict)]
    key = next((key for key in _TEXT_KEYS if tables and all(isinstance(row.get(key), str) for row in tables)), None)
    if key is None or len(tables) < len(rows):
        return []
    return [(number, str(row[key]).rstrip("\r\n")) for number, row in enumerate(tables, 1)]


class LogReadings:
    """What the lines of any number of log files say."""

    def __init__(self) -> None:
        self.sglang = SglangLog()
        self.vllm = VllmLog()
        self.llama = LlamaLog()
        self.marks = Marks()
        self.last_line_s: float | None = None
        self.last_line_at: Source | None = None
        self.known_lines = 0

    def read(self, lines: Iterable[Line], file: str) -> int:
        """Takes a file in; returns how many of its lines were understood."""
        before = self.known_lines
        for line_number, line in lines:
            source = Source(file, line_number)
            time_s = log_time_s(line)
            if time_s is not None and (self.last_line_s is None or time_s >= self.last_line_s):
                self.last_line_s, self.last_line_at = time_s, source
            try:
                is_known = (
                    self.sglang.read_line(line, source, time_s)
                    or self.vllm.read_line(line, source, time_s)
                    or self.llama.read_line(line, source)
                )
            except ValueError:  # a number with thousands of digits: the line is damaged
                continue
            # Batch lines have nothing else to say; settings name everything, and mean nothing by it.
            has_no_marks = (
                "Decode batch" in line or "Prefill batch" in line or "server_args" in line or "with config" in line
            )
            if (not has_no_marks and self.marks.read_line(line, source)) or is_known:
                self.known_lines += 1
        return self.known_lines - before

"""Results of benchmarks as text: the summaries that bench tools print, Markdown tables, CSV. Rows as bench.py reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fullbore.explain.evidence.bench import is_row
from fullbore.explain.evidence.files import Line

_MAX_ROWS = 1000
_MAX_LINES = 20_000
_MAX_LINE_CHARS = 1000
_MAX_CELLS = 50

# What a summary calls a figure -> our key. Matched against the whole name, lower case, units included.
_SUMMARY: list[tuple[str, str]] = [
    (r"(?:max(?:imum)? request concurrency|max concurrency|number of concurrency|number of parallel)", "concurrency"),
    (r"output token throughput.*|output throughput.*", "output_tok_s"),
    (r"input token throughput.*|prompt throughput.*", "input_tok_s"),
    (r"mean ttft \(ms\)", "ttft_ms_mean"),
    (r"average (?:time to first token|ttft) \(s\)", "ttft_s"),
    (r"mean (?:itl|inter-token latency) \(ms\)", "itl_ms_mean"),
    (r"mean tpot \(ms\)", "tpot_ms_mean"),
    (r"average time per output token \(s\)", "tpot_s"),
    (r"mean e2e(?:l| latency)? \(ms\)", "mean_e2e_latency_ms"),
    (r"average latency \(s\)", "latency_s"),
]
# Whatever else the text is, it has results in it.
HINT = re.compile(
    r"Benchmark Result|Benchmarking summary|token throughput|\bt/s\s*\|"
    r"|^[^\n\d]{0,200}(?:concurrency|tok(?:en)?s?/s|output_tok_s|tokens_per_s|_tok_s|ttft|tpot)[^\n\d]{0,200}[|,;\t]|[|,;\t]"
    r"[^\n\d]{0,200}(?:tok(?:en)?s?/s|output_tok_s|tokens_per_s)[^\n\d]{0,200}$",
    re.I | re.M,
)
_PAIR = re.compile(r"^\W{0,10}([A-Za-z][\w /().%-]{0,60}?)\s{0,80}[:|]\s{0,80}(-?[\d.,]+)\s{0,80}\|?\s*$")
_RULE = re.compile(r"^[\s|:+=-]+$")

# Columns of tables, by what their heads contain.
_COLUMNS: list[tuple[str, str]] = [
    (r"^(?:concurrency|concurrent.*|clients|users|parallel|c)$", "concurrency"),
    (r"^t/s$", "t/s"),
    (r"output.*(?:tok|t)\w*/s|^(?:tok|tokens)/s(?:ec)?$|decode.*(?:tok|t)\w*/s|^tps$|generation.*/s", "output_tok_s"),
    (r"(?:input|prompt|prefill).*(?:tok|t)\w*/s", "input_tok_s"),
    (r"ttft.*ms|ms.*ttft", "ttft_ms"),
    (r"(?:tpot|itl).*ms|ms.*(?:tpot|itl)|ms/tok\w*", "tpot_ms"),
]


def read_rows(lines: Iterable[Line]) -> list[tuple[int, dict[str, Any]]]:
    """(line, row) of every measurement in the text; [] if there is none."""
    taken = list(_first(lines))
    rows = [*_summaries(taken), *_tables(taken)]
    return sorted(((number, row) for number, row in rows if is_row(row)), key=lambda entry: entry[0])[:_MAX_ROWS]


def _first(lines: Iterable[Line]) -> Iterable[Line]:
    for count, (number, line) in enumerate(lines):
        if count == _MAX_LINES:
            return
        yield number, line[:_MAX_LINE_CHARS]


def _summaries(lines: list[Line]) -> list[tuple[int, dict[str, Any]]]:
    """`Mean TTFT (ms):   123.4`; a figure that occurs again begins the next summary."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in lines:
        match = _PAIR.match(line)
        key = _key(match[1].strip().lower(), _SUMMARY) if match is not None else None
        if match is None or key is None:
            continue
        if not rows or key in rows[-1][1]:
            rows.append((number, {}))
        value = _number(match[2])
        if value is not None and value >= 0:
            rows[-1][1][key] = int(value) if key == "concurrency" else value
    return rows


def _tables(lines: list[Line]) -> list[tuple[int, dict[str, Any]]]:
    """Markdown tables and CSV: a line of heads, then lines of as many cells."""
    rows: list[tuple[int, dict[str, Any]]] = []
    heads: list[str] = []
    separator = "|"
    for number, line in lines:
        if _RULE.match(line):
            continue
        if _is_head(line):
            separator = "|" if "|" in line else max(",;\t", key=line.count)
            heads = [cell.strip().lower() for cell in _cells(line, separator)]
            continue
        cells = _cells(line, separator) if heads else []
        if len(cells) != len(heads) or not cells:
            heads = []
            continue
        row = _table_row(dict(zip(heads, (cell.strip() for cell in cells), strict=True)))
        if row:
            rows.append((number, row))
    return rows


def _is_head(line: str) -> bool:
    if not re.search(r"[|,;\t]", line):
        return False
    separator = "|" if "|" in line else max(",;\t", key=line.count)
    cells = [cell.strip().lower() for cell in _cells(line, separator)]
    if len(cells) > _MAX_CELLS:
        return False
    measured = [key for cell in cells if (key := _column(cell)) not in (None, "concurrency")]
    return len(cells) > 1 and bool(measured) and not any(_number(cell) is not None for cell in cells)


def _cells(line: str, separator: str) -> list[str]:
    return line.strip().strip("|" if separator == "|" else "").split(separator)


def _column(head: str) -> str | None:
    if re.fullmatch(r"[a-z0-9]+(?:_[a-z0-9]+)+", head) and is_row({head: 1.0, "concurrency": 1}):
        return head  # one of bench.py's own names
    return _key(head, _COLUMNS)


def _table_row(cells: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for head, cell in cells.items():
        key = _column(head) or re.sub(r"\W+", "_", head).strip("_")
        value = _number(cell)
        if key == "t/s":
            _take_llama_bench(row, cells.get("test", ""), value)
        elif key and cell:
            is_count = value is not None and key == "concurrency"
            row[key] = int(value) if is_count and value is not None else value if value is not None else cell
    return row


def _take_llama_bench(row: dict[str, Any], test: str, value: float | None) -> None:
    """llama-bench: pp512 is reading 512 tokens, tg128 generating 128, one request each."""
    match = re.match(r"(pp|tg)\s*(\d+)", test)
    if match is None or value is None:
        return
    row["concurrency"] = 1
    row["input_tok_s" if match[1] == "pp" else "output_tok_s"] = value
    row["input_tokens" if match[1] == "pp" else "output_tokens"] = int(match[2])


def _key(name: str, table: list[tuple[str, str]]) -> str | None:
    return next((key for pattern, key in table if re.search(rf"^(?:{pattern})$", name)), None) or next(
        (key for pattern, key in table if table is _COLUMNS and re.search(pattern, name)), None
    )


def _number(cell: str) -> float | None:
    """`12.5`, `1,234`, `44.66 ± 0.17`."""
    match = re.fullmatch(r"\s*(-?\d[\d,]*(?:\.\d+)?)\s*(?:±.*)?", cell)
    if match is None:
        return None
    value = float(match[1].replace(",", ""))
    return value if abs(value) < 1e15 else None

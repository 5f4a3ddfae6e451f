"""Client results: fullbore's own format, and what SGLang's and vLLM's bench tools write."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fullbore.explain.facts import Source

# Field -> names it goes by, best first. A name that ends in _s where milliseconds are meant is converted.
_NAMES: dict[str, tuple[str, ...]] = {
    "concurrency": (
        "concurrency",
        "max_concurrency",
        "clients",
        "num_clients",
        "users",
        "concurrent_requests",
        "streams",
    ),
    "output_tok_s": (
        *(
            "output_tok_s",
            "output_throughput",
            "output_tokens_per_s",
            "output_tps",
            "decode_tok_s",
            "tg_tok_s",
            "tok_s",
        ),
        *("tokens_per_s", "tokens_per_second", "tps", "generation_tok_s", "eval_tok_s"),
    ),
    "input_tok_s": (
        "input_tok_s",
        "input_throughput",
        "prefill_tok_s",
        "prompt_tok_s",
        "input_tokens_per_s",
        "pp_tok_s",
    ),
    "ttft_ms": ("ttft_ms_mean", "mean_ttft_ms", "ttft_ms", "ttft_ms_p50", "median_ttft_ms", "ttft_s", "ttft_s_mean"),
    "itl_ms": (
        *(
            "itl_ms_mean",
            "mean_itl_ms",
            "tpot_ms_mean",
            "mean_tpot_ms",
            "itl_ms",
            "tpot_ms",
            "itl_ms_p50",
            "median_itl_ms",
        ),
        *("ms_per_token", "tpot_s", "itl_s"),
    ),
    "latency_ms": (
        *("latency_ms_mean", "mean_e2e_latency_ms", "e2e_latency_ms", "latency_ms", "latency_ms_p50", "latency_ms_p90"),
        *(
            "latency_ms_p99",
            "latency_s",
            "e2e_s",
            "e2e_latency_s",
            "latency_s_p90",
            "p90_latency_s",
            "makespan_s",
            "total_s",
        ),
    ),
}
_INPUT_TOKENS = ("prompt_tokens_mean", "input_tokens", "input_len", "random_input_len", "isl", "prompt_tokens")
_OUTPUT_TOKENS = ("output_tokens_mean", "output_tokens", "output_len", "random_output_len", "osl")
_KNOWN = {name for names in _NAMES.values() for name in names}
_KNOWN |= {"requests", "interrupted", "prompt_tokens_mean", "output_tokens_mean"}
# Results of a run rather than settings of it: never what was varied.
_RESULT = re.compile(
    r"ttft|itl|tpot|latency|e2e|throughput|tok(?:ens)?_(?:per_)?s|tps|duration|completed|total_|_p\d\d|errors?$|date|error"
    r"|accept|power|util|busy|sustained|makespan|goodput|num_prompts|backend|_ms$|_s$"
)
_GPU_COUNTS = ("gpus", "n_gpu", "num_gpus", "gpu_count", "machines", "nodes", "hosts")
_TP = re.compile(r"\btp[\s_=-]*(\d+)|tensor[\w ]*?[\s=]+(\d+)", re.I)
_PP = re.compile(r"\bpp[\s_=-]*(\d+)|pipeline[\w ]*?[\s=]+(\d+)", re.I)


@dataclass
class BenchRow:
    """One measurement. `varied` holds the other keys, by name."""

    source: Source
    concurrency: int | None = None
    output_tok_s: float | None = None
    input_tok_s: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    latency_ms: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    varied: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    pp: int | None = None
    tp: int | None = None
    gpus: int | None = None
    server: dict[str, Any] = field(default_factory=dict)  # of fullbore bench: settings of a fullbore server
    split: str | None = None  # llama.cpp's way to use several GPUs: none, layer, row

    @property
    def step_ms(self) -> float | None:
        """Time in which every running request gets one token."""
        if self.itl_ms:
            return self.itl_ms
        if self.output_tok_s and self.concurrency:
            return 1000 * self.concurrency / self.output_tok_s
        return None

    @property
    def decode_tok_s(self) -> float | None:
        """Output tokens per second; of one request also from the time between tokens."""
        if self.output_tok_s:
            return self.output_tok_s
        return 1000 / self.itl_ms if self.itl_ms and self.concurrency == 1 else None

    @property
    def layout(self) -> str:
        parts = [f"tp{self.tp}" if self.tp else "", f"pp{self.pp}" if self.pp else ""]
        return " ".join(part for part in parts if part) or (f"{self.gpus} GPUs" if self.gpus else "")


def rows_of(tree: Any) -> list[dict[str, Any]]:
    """The list of results in a JSON document, or [] if it is no bench."""
    if isinstance(tree, dict):
        if is_row(tree):
            return [tree]
        for value in tree.values():
            if isinstance(value, list) and (rows := rows_of(value)):
                return rows
        return []
    if isinstance(tree, list):
        rows = [row for row in tree if isinstance(row, dict)]
        return rows if any(is_row(row) for row in rows) else []
    return []


def is_row(row: dict[str, Any]) -> bool:
    """Does it hold a measurement?"""
    if "avg_ts" in row and "n_gen" in row:
        return True  # llama-bench
    fields = {field for field, names in _NAMES.items() if any(name in row for name in names)}
    fields -= {"concurrency"}
    return len(fields) >= 2 or (bool(fields) and ("concurrency" in row or "max_concurrency" in row))


def read(rows: list[dict[str, Any]], file: str, text: str) -> list[BenchRow]:
    """Typed rows; values that are no numbers are left out."""
    lines = _row_lines(text, len(rows))
    return [row_of(raw, Source(file, lines[n])) for n, raw in enumerate(rows)]


def row_of(raw: dict[str, Any], source: Source) -> BenchRow:
    """One typed row."""
    raw = _of_llama_bench(raw) if "avg_ts" in raw else raw
    row = BenchRow(source)
    for field_name, names in _NAMES.items():
        for name in names:
            value = _number(raw.get(name))
            if value is not None:
                to_ms = 1000 if field_name.endswith("_ms") and not re.search(r"_ms\b|_ms_|^ms_", name) else 1
                setattr(row, field_name, value * to_ms)
                break
    if row.concurrency is not None:
        row.concurrency = int(row.concurrency)
    row.input_tokens = next((n for k in _INPUT_TOKENS if (n := _number(raw.get(k))) is not None), None)
    row.output_tokens = next((n for k in _OUTPUT_TOKENS if (n := _number(raw.get(k))) is not None), None)
    for name, value in raw.items():
        if name in _KNOWN or value is None or _is_nested(value):
            continue
        if _RESULT.search(name):
            row.results[name] = value
        else:
            row.varied[name] = value
    server = raw.get("server")
    row.server = server if isinstance(server, dict) else {}
    _read_layout(row)
    return row


def _is_nested(value: Any) -> bool:
    """Tables inside a row are neither a setting nor a result that rows are compared by."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(entry, dict) for entry in value))


def _of_llama_bench(raw: dict[str, Any]) -> dict[str, Any]:
    """llama-bench -o json: reading n_prompt tokens or generating n_gen, one request each."""
    kept = ("split_mode", "tensor_split", "n_gpu_layers", "n_batch", "n_ubatch", "build_commit", "flash_attn")
    row: dict[str, Any] = {name: raw[name] for name in kept if name in raw}
    is_reading = not _number(raw.get("n_gen"))
    row["concurrency"] = 1
    row["input_tok_s" if is_reading else "output_tok_s"] = raw.get("avg_ts")
    row["input_tokens" if is_reading else "output_tokens"] = raw.get("n_prompt" if is_reading else "n_gen")
    return row


def _read_layout(row: BenchRow) -> None:
    sizes = {
        "tp": ("tp", "tp_size", "tensor_parallel_size"),
        "pp": ("pp", "pp_size", "pipeline_parallel_size", "stages"),
    }
    for size, names in sizes.items():
        for name in names:
            value = _number(row.varied.get(name))
            if value:
                setattr(row, size, int(value))
    for value in row.varied.values():
        if isinstance(value, str):
            if row.tp is None and (match := _TP.search(value)) is not None:
                row.tp = int(match[1] or match[2])
            if row.pp is None and (match := _PP.search(value)) is not None:
                row.pp = int(match[1] or match[2])
    gpus = next((n for name in _GPU_COUNTS if (n := _number(row.varied.get(name)))), None)
    split = row.varied.get("split_mode", row.varied.get("sm"))
    row.split = split.lower() if isinstance(split, str) else None
    row.gpus = int(gpus) if gpus else ((row.tp or 1) * (row.pp or 1) if row.tp or row.pp else None)


def resolve_splits(rows: list[BenchRow], gpus: int) -> None:
    """Stages and tensor ranks of rows that name a way to split only, on this many GPUs."""
    for row in rows:
        if row.split is None or row.tp is not None or row.pp is not None:
            continue
        if row.split == "none":
            row.gpus, row.pp, row.tp = 1, 1, 1
        elif gpus > 1:
            row.gpus = row.gpus or gpus
            row.pp, row.tp = (row.gpus, 1) if row.split == "layer" else (1, row.gpus)


def _row_lines(text: str, count: int) -> list[int | None]:
    """Line of each row: those on which an object of the list begins."""
    starts: list[int] = []
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        for char in line:
            if char == "{":
                depth += 1
                if depth == 1:
                    starts.append(number)
            elif char == "}":
                depth -= 1
        if len(starts) > count:
            break
    return [starts[n] if len(starts) >= count else None for n in range(count)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e15 else None
    if isinstance(value, str):
        try:
            return float(value.replace(",", ""))
        except ValueError:
            return None
    return None

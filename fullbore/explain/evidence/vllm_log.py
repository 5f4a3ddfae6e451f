"""vLLM's log lines. `Running` counts all requests of the engine, not one micro-batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fullbore.explain.evidence.sglang_log import literal
from fullbore.explain.facts import Reading, Source
from fullbore.explain.series import Series

_STATS = re.compile(
    r"(?:Engine (\d+): )?Avg prompt throughput: (\d+(?:\.\d+)?) tokens/s, "
    r"Avg generation throughput: (\d+(?:\.\d+)?) tokens/s, "
    r"Running: (\d+) reqs(?:, Swapped: \d+ reqs)?, (?:Waiting|Pending): (\d+) reqs"
)
_KV_USAGE = re.compile(r"(?:GPU )?KV cache usage: (\d+(?:\.\d+)?)%")
_CONFIG = re.compile(r"Initializing an? (?:V\d )?LLM engine \(v?([\w.+-]+)\) with config:? ?(.*)")
_SETTING = re.compile(r"\b(\w+)=('[^']*'|\"[^\"]*\"|None|True|False|-?\d[\d.e+-]*)")
_NON_DEFAULT = re.compile(r"non-default args: \{(.*)\}")
_NON_DEFAULT_SETTING = re.compile(r"'(\w+)': ('[^']*'|None|True|False|-?\d[\d.e+-]*)")
_KV_TOKENS = re.compile(r"GPU KV cache size: (\d[\d,]*) tokens")
_KV_CONCURRENCY = re.compile(r"Maximum concurrency for (\d[\d,]*) tokens per request: (\d+(?:\.\d+)?)x")
_KV_AVAILABLE = re.compile(r"Available KV cache memory: (-?\d+(?:\.\d+)?) Gi?B")
_WEIGHTS = re.compile(r"[Mm]odel (?:loading|weights) took (\d+(?:\.\d+)?) ?Gi?B")
_KV_NEEDED = re.compile(
    r"max(?:imum)? seq(?:uence)? len\w* \((\d+)\).*?\(?(\d+(?:\.\d+)?) GiB KV cache is needed, which is larger than "
    r"the available KV cache memory \((\d+(?:\.\d+)?) GiB\)"
)
_ESTIMATED = re.compile(r"estimated maximum model length is (\d+)")
_STAGE = re.compile(r"\(\w*Worker\w*?[_ ](?:TP\d+_)?PP(\d+)|\bPP(\d+)\b|\bpp_rank=(\d+)|\(Worker(?:Proc)?_?(\d+)\b")
_UNEVEN = re.compile(r"[Hh]idden layers were unevenly partitioned: \[(\d+(?:, ?\d+)*)\]")


@dataclass
class KvRefusal:
    """The engine did not start: the KV cache of one request of full length does not fit."""

    max_tokens: int
    needed_gib: float
    available_gib: float
    estimated_tokens: int | None
    source: Source


class VllmLog:
    """Statistics lines of engine 0, start-up lines of all stages, and the settings that the log repeats."""

    def __init__(self) -> None:
        self.source: Source | None = None
        self.running = Series()
        self.waiting = Series()
        self.gen_tok_s = Series()
        self.prompt_tok_s = Series()
        self.kv_usage = Series()  # 0 to 1
        self.settings: dict[str, Reading] = {}
        self.version: Reading | None = None
        self.kv_tokens: Reading | None = None
        self.kv_concurrency: Reading | None = None
        self.kv_available_gib: dict[int, Reading] = {}  # by stage
        self.has_stage_labels = False  # else stages are numbered in the order of their lines
        self.weights_gib: dict[int, Reading] = {}
        self.kv_refusal: KvRefusal | None = None
        self.partition: Reading | None = None
        self.stalled_lines = 0  # latest lines in a row with requests running and no token
        self.stalled_at: Source | None = None
        self.last_moving_s: float | None = None
        self.last_running = 0

    def read_line(self, line: str, source: Source, time_s: float | None) -> bool:
        if "Avg prompt throughput" in line and (match := _STATS.search(line)) is not None:
            self._read_stats(match, line, source, time_s)
            return True
        if "LLM engine (" in line and (match := _CONFIG.search(line)) is not None:
            self.version = Reading("version", match[1], source)
            for name, value in _SETTING.findall(match[2]):
                self.settings.setdefault(name, Reading(name, literal(value), source))
            return True
        if "non-default args" in line and (match := _NON_DEFAULT.search(line)) is not None:
            for name, value in _NON_DEFAULT_SETTING.findall(match[1]):
                self.settings[name] = Reading(name, literal(value), source)
            return True
        return self._read_memory(line, source)

    def _read_stats(self, match: re.Match[str], line: str, source: Source, time_s: float | None) -> None:
        if match[1] is not None and int(match[1]) != 0:
            return
        prompt, generation = float(match[2]), float(match[3])
        running, waiting = int(match[4]), int(match[5])
        self.source = self.source or source
        self.last_running = running
        if running and prompt == 0 and generation == 0:
            self.stalled_at = self.stalled_at if self.stalled_lines else source
            self.stalled_lines += 1
            return
        self.stalled_lines, self.stalled_at = 0, None
        if generation or prompt:
            self.last_moving_s = time_s
        if running or waiting:
            self.running.add(running)
            self.waiting.add(waiting)
            self.gen_tok_s.add(generation)
            self.prompt_tok_s.add(prompt)
            if (usage := _KV_USAGE.search(line)) is not None:
                self.kv_usage.add(float(usage[1]) / 100)

    def _read_memory(self, line: str, source: Source) -> bool:
        if "KV cache" in line or "model length" in line:
            if (match := _KV_NEEDED.search(line)) is not None and int(match[1]) > 0 and float(match[2]) > 0:
                estimate = _ESTIMATED.search(line)
                self.kv_refusal = KvRefusal(
                    int(match[1]), float(match[2]), float(match[3]), int(estimate[1]) if estimate else None, source
                )
                return True
            if (match := _KV_AVAILABLE.search(line)) is not None:
                stage, is_labelled = _stage_of(line, len(self.kv_available_gib))
                self.has_stage_labels = self.has_stage_labels or is_labelled
                known = self.kv_available_gib.get(stage)
                if known is None or float(match[1]) < known.value:  # of a stage's tensor ranks the tightest
                    reading = Reading("Available KV cache memory in GiB", float(match[1]), source)
                    self.kv_available_gib[stage] = reading
                return True
            if (match := _KV_TOKENS.search(line)) is not None:
                self.kv_tokens = Reading("GPU KV cache size", int(match[1].replace(",", "")), source)
                return True
        if "Maximum concurrency for" in line and (match := _KV_CONCURRENCY.search(line)) is not None:
            self.kv_concurrency = Reading("Maximum concurrency", float(match[2]), source)
            return True
        if "took" in line and (match := _WEIGHTS.search(line)) is not None:
            stage, _ = _stage_of(line, len(self.weights_gib))
            self.weights_gib[stage] = Reading("weights in GiB", float(match[1]), source)
            return True
        if "unevenly partitioned" in line and (match := _UNEVEN.search(line)) is not None:
            self.partition = Reading("layers per stage", tuple(int(n) for n in match[1].split(",")), source)
            return True
        return False


def _stage_of(line: str, next_stage: int) -> tuple[int, bool]:
    """(stage, does the line say so)."""
    match = _STAGE.search(line[:160])
    return (int(next(group for group in match.groups() if group)), True) if match else (next_stage, False)

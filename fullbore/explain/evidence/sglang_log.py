"""SGLang's log lines. Every PP rank prints its own; `#running-req` counts one micro-batch, `#token` the whole pool."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from fullbore.explain.evidence.batch_sequence import Batch, BatchSequence
from fullbore.explain.facts import Reading, Source
from fullbore.explain.series import Series

_PREFIX_CHARS = 120
_LABEL = re.compile(r"\b(PP|TP)(\d{1,4})\b")
_WEIGHTS = re.compile(r"Load weight end\..*?mem usage=(\d+(?:\.\d+)?) ?GB")
_KV = re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)")
_KV_SIZES = re.compile(r"(?:KV|K|V) size: (\d+(?:\.\d+)?) GB")
_SERVER_ARGS = re.compile(r"server_args\s*=\s*(?:ServerArgs\()?")
_ARGUMENT = re.compile(r"'?(\w+)'?\s*[=:]\s*('[^']*'|\"[^\"]*\"|None|True|False|-?\d[\d.e+-]*)")
_CAPACITY = re.compile(r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+)")
_CHUNK = re.compile(r"chunked_prefill_size=(-?\d+)")


@dataclass
class RankLog:
    """What one PP rank printed."""

    rank: int
    source: Source
    decode_running: Series = field(default_factory=Series)
    decode_at: Source | None = None
    gen_tok_s: Series = field(default_factory=Series)
    token_usage: Series = field(default_factory=Series)
    queue: Series = field(default_factory=Series)
    graph_on: int = 0
    graph_off: int = 0
    graph_off_at: Source | None = None
    is_cpu: bool = False
    new_seqs: Series = field(default_factory=Series)
    new_tokens: Series = field(default_factory=Series)
    cached_tokens: Series = field(default_factory=Series)
    prefill_running: Series = field(default_factory=Series)
    prefill_tok_s: Series = field(default_factory=Series)
    prefill_at: Source | None = None
    burst_into_empty_slot: Reading | None = None  # the largest #new-seq while #running-req was 0
    batches: BatchSequence = field(default_factory=BatchSequence)
    last_batch_s: float | None = None
    last_at: Source | None = None
    outstanding: int = 0  # requests queued when the last batch was printed: another batch had to follow
    aborts: int = 0
    aborts_at: Source | None = None
    weights_gb: Reading | None = None
    kv_gb: Reading | None = None
    kv_tokens: Reading | None = None


class SglangLog:
    """Readings of all ranks, and the settings that the log repeats."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankLog] = {}
        self.settings: dict[str, Reading] = {}
        self.has_pp_labels = False

    def read_line(self, line: str, source: Source, time_s: float | None) -> bool:
        """Takes a line in; False if it is none of SGLang's."""
        if " batch" in line and ("Decode batch" in line or "Prefill batch" in line):
            self._read_batch(line, source, time_s)
            return True
        if "server_args" in line and (match := _SERVER_ARGS.search(line)) is not None:
            self._read_server_args(line[match.end() :], source)
            return True
        if "Load weight end" in line and (match := _WEIGHTS.search(line)) is not None:
            rank = self._restarted(line, source)
            rank.weights_gb = Reading("weights in GB", float(match[1]), source)
            return True
        if "KV Cache is allocated" in line and (match := _KV.search(line)) is not None:
            rank = self._rank(line, source)
            rank.kv_tokens = Reading("#tokens", int(match[1]), source)
            sizes = [float(size) for size in _KV_SIZES.findall(line)]
            if sizes:
                rank.kv_gb = Reading("KV size in GB", sum(sizes), source)
            return True
        if "max_total_num_tokens=" in line and (match := _CAPACITY.search(line)) is not None:
            self.settings["max_total_tokens"] = Reading("max_total_num_tokens", int(match[1]), source)
            self.settings["max_running_requests"] = Reading("max_running_requests", int(match[2]), source)
            if (chunk := _CHUNK.search(line)) is not None:
                self.settings["chunked_prefill_size"] = Reading("chunked_prefill_size", int(chunk[1]), source)
            return True
        if "Abort" in line and ("AbortReq" in line or "Abort request" in line or "abort" in line.lower()):
            rank = self._rank(line, source)
            rank.aborts += 1
            rank.aborts_at = rank.aborts_at or source
            return True
        return False

    def _rank(self, line: str, source: Source) -> RankLog:
        labels = _labels(line)
        number = int(labels.get("PP", 0))
        if "PP" in labels:
            self.has_pp_labels = True
        if number not in self.ranks:
            self.ranks[number] = RankLog(number, source)
        return self.ranks[number]

    def _restarted(self, line: str, source: Source) -> RankLog:
        """Weights are loaded once in a process: what was printed before belongs to an earlier one."""
        rank = self._rank(line, source)
        if len(rank.batches):
            rank = self.ranks[rank.rank] = RankLog(rank.rank, source)
        return rank

    def _read_server_args(self, text: str, source: Source) -> None:
        for name, value in _ARGUMENT.findall(text):
            self.settings.setdefault(name, Reading(name, literal(value), source))

    def _read_batch(self, line: str, source: Source, time_s: float | None) -> None:
        if _labels(line).get("TP", "0") != "0":
            return  # all tensor ranks of a stage print the same
        values = _values(line)
        rank = self._rank(line, source)
        is_prefill = "Prefill batch" in line
        batch = Batch(
            _int(values.get("#new-seq"), 0) if is_prefill else -1,
            _int(values.get("#new-token"), 0),
            _int(values.get("#cached-token"), 0),
            _int(values.get("#running-req"), 0),
            _int(values.get("#queue-req"), 0),
        )
        rank.batches.add(batch, source)
        rank.last_batch_s, rank.last_at = time_s if time_s is not None else rank.last_batch_s, source
        rank.queue.add(batch.queued)
        rank.outstanding = batch.queued
        for name in ("token usage", "full token usage"):
            if name in values:
                _add(rank.token_usage, values[name])
                break
        if is_prefill:
            _take_prefill(rank, batch, values, source)
        else:
            _take_decode(rank, batch, values, source)


def _labels(line: str) -> dict[str, str]:
    """{"PP": "1", "TP": "0"} of a line that begins with [time PP1 TP0]."""
    start = line.find("[20", 0, _PREFIX_CHARS)  # behind what a container runtime may have put before it
    return _labels_of(line[start + 20 : line.find("]", start, start + 90) + 1] if start >= 0 else "")


@lru_cache(maxsize=1024)
def _labels_of(text: str) -> dict[str, str]:
    return dict(_LABEL.findall(text))


def _values(line: str) -> dict[str, str]:
    """`#queue-req: 0`, `gen throughput (token/s): 20.43` -> name without unit, value."""
    values = {}
    for part in line.split(","):
        name, _, value = part.rpartition(": ")
        if name:
            name = name.rpartition(". ")[2].strip()  # older versions: "Decode batch. #running-req: 4"
            values[name.partition(" (")[0]] = value.strip()
    return values


def _take_prefill(rank: RankLog, batch: Batch, values: dict[str, str], source: Source) -> None:
    rank.prefill_at = rank.prefill_at or source
    rank.new_seqs.add(batch.new_seqs)
    rank.new_tokens.add(batch.new_tokens)
    rank.cached_tokens.add(batch.cached_tokens)
    rank.prefill_running.add(batch.running)
    largest = rank.burst_into_empty_slot.value if rank.burst_into_empty_slot else 0
    if batch.running == 0 and batch.new_seqs > largest:
        rank.burst_into_empty_slot = Reading("#new-seq", batch.new_seqs, source)
    if "input throughput" in values:
        _add(rank.prefill_tok_s, values["input throughput"])


def _take_decode(rank: RankLog, batch: Batch, values: dict[str, str], source: Source) -> None:
    rank.decode_at = rank.decode_at or source
    rank.decode_running.add(batch.running)
    if "gen throughput" in values:
        _add(rank.gen_tok_s, values["gen throughput"])
    for name in ("cuda graph", "cpu graph", "npu graph"):
        if name in values:
            rank.is_cpu = rank.is_cpu or name == "cpu graph"
            if values[name] == "True":
                rank.graph_on += 1
            else:
                rank.graph_off += 1
                rank.graph_off_at = rank.graph_off_at or source


def _add(series: Series, text: str) -> None:
    """A number, unless the line is damaged."""
    try:
        value = float(text)
    except ValueError:
        return
    if 0 <= value < 1e12:
        series.add(value)


def literal(text: str) -> object:
    """A Python literal as it stands in a settings line."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    bare = text.strip("'\"")
    if bare != text:
        return bare
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def _int(text: str | None, default: int) -> int:
    try:
        value = int(float(text)) if text is not None else default
    except (ValueError, OverflowError):
        return default
    return value if abs(value) < 1 << 40 else default  # a damaged line

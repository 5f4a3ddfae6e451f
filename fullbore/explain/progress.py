"""Is the engine moving at all? Tokens frozen while requests are held is the one honest sign of a hang."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.prometheus import MetricsDump
from fullbore.explain.facts import Fact, show

_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "fullbore_generated_tokens_total")
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "fullbore_prompt_tokens_total")
_REALTIME = "sglang:realtime_tokens_total"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "fullbore_requests_running")
_STALLED_S = 60.0  # silence shorter than this may be one long prefill, or nothing to do
_STALLED_LINES = 2
_LEAST_APART_S = 8.0


@dataclass
class Progress:
    """`frozen`: signs that nothing moves while requests are held. `moving`: signs that tokens come out."""

    frozen: list[Fact] = field(default_factory=list)
    moving: list[Fact] = field(default_factory=list)
    tok_s: Fact | None = None  # between two dumps, where the time between them is known

    @property
    def is_frozen(self) -> bool:
        return bool(self.frozen) and not self.moving


def read_progress(evidence: Evidence) -> Progress:
    progress = Progress()
    dumps = sorted(evidence.metrics, key=lambda dump: dump.file)
    _compare_dumps(dumps, evidence, progress)
    _read_vllm_log(evidence, progress)
    _read_silence(evidence, progress)
    _read_marks(evidence, progress)
    return progress


def seconds_between_dumps(evidence: Evidence) -> float | None:
    """As a user noted it: "30 s apart", {"metrics_interval_s": 30}."""
    for path, note in evidence.notes.items():
        if isinstance(note.value, str):
            match = re.search(r"(\d+(?:\.\d+)?)\s*(s|sec|seconds|min|minutes)\b[^.]*\bapart", note.value)
            if match is not None:
                return float(match[1]) * (60 if match[2].startswith("min") else 1)
        elif re.search(r"(interval|apart|between).*_s$", path) and isinstance(note.value, int | float):
            return float(note.value)
    return None


def _compare_dumps(dumps: list[MetricsDump], evidence: Evidence, progress: Progress) -> None:
    if len(dumps) < 2:
        return
    first, last = dumps[0], dumps[-1]
    before, after = _tokens(first), _tokens(last)
    running = [found for dump in (first, last) if (found := dump.total(*_RUNNING)) is not None]
    if before is None or after is None:
        return
    change = after.number - before.number
    if change != 0:
        progress.moving.append(
            Fact(f"{after.text}, was {show(before.value)}: tokens are produced", change, after.source)
        )
        seconds = seconds_between_dumps(evidence)
        if seconds and change > 0:
            rate = change / seconds
            progress.tok_s = Fact(
                f"{show(change)} tokens in {show(seconds)} s = {show(rate)} tokens/s", rate, after.source
            )
        return
    if len(running) == 2 and all(found.number >= 1 for found in running) and _prompt_moves(first, last) is False:
        seconds = seconds_between_dumps(evidence)
        if seconds is not None and seconds < _LEAST_APART_S:
            return  # one step may take that long
        apart = f" {show(seconds)} s apart" if seconds else ""
        text = f"tokens unchanged in two dumps{apart}: {after.text} in both, while {running[1].text} requests are held"
        progress.frozen.append(Fact(text, 0, after.source))


def _tokens(dump: MetricsDump) -> Fact | None:
    """Tokens generated so far; SGLang counts decoding and prefill apart."""
    return dump.total(*_GENERATED) or dump.total(_REALTIME)


def _prompt_moves(first: MetricsDump, last: MetricsDump) -> bool:
    before, after = first.total(*_PROMPT), last.total(*_PROMPT)
    return before is not None and after is not None and before.value != after.value


def _read_vllm_log(evidence: Evidence, progress: Progress) -> None:
    vllm, logs = evidence.logs.vllm, evidence.logs
    if vllm.stalled_lines >= _STALLED_LINES or (vllm.stalled_lines and logs.marks.get("broadcast-stuck")):
        text = (
            f"no tokens: generation throughput 0.0 tokens/s with Running: {vllm.last_running} reqs in the last "
            f"{vllm.stalled_lines} statistics lines"
        )
        progress.frozen.append(Fact(text, vllm.stalled_lines, vllm.stalled_at))
    elif vllm.gen_tok_s and vllm.gen_tok_s.maximum > 0 and not vllm.stalled_lines and not progress.frozen:
        fact = Fact(
            f"generation throughput up to {show(vllm.gen_tok_s.maximum)} tokens/s to the end of the log",
            None,
            vllm.source,
        )
        progress.moving.append(fact)


def _read_silence(evidence: Evidence, progress: Progress) -> None:
    """SGLang prints a line for every prefill and every few decode steps: silence with work outstanding is a hang."""
    logs = evidence.logs
    ranks = [rank for rank in logs.sglang.ranks.values() if rank.last_batch_s is not None]
    if not ranks or logs.last_line_s is None:
        return
    last_batch = max(ranks, key=lambda rank: rank.last_batch_s or 0.0)
    silence_s = logs.last_line_s - (last_batch.last_batch_s or 0.0)
    outstanding = max(rank.outstanding for rank in ranks)
    if silence_s >= _STALLED_S and outstanding > 0:
        text = (
            f"no batch in the last {show(round(silence_s))} s of the log, though {outstanding} requests were queued "
            f"and other lines (up to {logs.last_line_at}) still appear: no progress"
        )
        progress.frozen.append(Fact(text, silence_s, last_batch.last_at))


def _read_marks(evidence: Evidence, progress: Progress) -> None:
    marks = evidence.logs.marks
    for name in ("collective-timeout", "scheduler-watchdog", "rpc-timeout"):
        mark = marks.get(name)
        if mark is not None:
            fact = mark.fact()
            progress.frozen.append(Fact(f"stuck: {fact.text}", fact.value, fact.source))
    broadcast = marks.get("broadcast-stuck")
    if broadcast is not None and (broadcast.count >= 2 or progress.frozen) and not progress.moving:
        fact = broadcast.fact()
        progress.frozen.append(Fact(f"stuck: {fact.text}", fact.value, fact.source))

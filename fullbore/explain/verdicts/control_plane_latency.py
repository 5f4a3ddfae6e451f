"""control-plane-latency: nobody computes while stages agree on what to do next.

Requests, consensus on readiness, results and plans travel stage by stage; what one hop costs is paid P times and more
(sglang#34815 and #38206: bootstrap consensus around the ring; gLLM#148: metadata sent to each rank in turn, 20-30 ms;
vllm#42187: stages blocked on a broadcast).
"""

from __future__ import annotations

import re

from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, Source, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.explain.verdicts.launch_bound import eager_decode

_UNEXPLAINED_SHARE = 0.6
_UNEXPLAINED_MS = 1000.0
_IDLE = 0.3
_QUEUED_SHARE = 0.4  # of the time to first token: then it is a queue
_NEARLY_ONE = 0.7  # stages at work at once
_LOAD_INDEPENDENT = 1.4
_NOBODY = 0.4
_HALF = 0.5
_CONTROL_KEY = re.compile(
    r"metadata|control|broadcast|schedul|zmq|pickle|plan|consensus|driver|dispatch|rpc|sync", re.I
)


def control_plane_latency(s: Situation) -> Finding | None:
    if s.P is None or s.P < 2 or s.progress.is_frozen:
        return None
    return _first_token(s) or _between_steps(s) or _noted(s) or _counters(s) or _by_elimination(s)


def _first_token(s: Situation) -> Finding | None:
    """TTFT far above what its prefill computes, with idle GPUs, no queue, and the same at any load."""
    ttft = s.speed.ttft_ms
    if ttft is None or ttft.number < _UNEXPLAINED_MS or s.P is None:
        return None
    compute = _prefill_compute_ms(s)
    load_free = _load_independent(s)
    idle = s.busy is not None and s.busy.is_trusted and max(s.busy.shares) < _IDLE
    if compute is None and s.busy is not None and s.busy.total > _NEARLY_ONE:
        return None  # some stage computes all the time: prompts pass through one after the other
    queue = _queue_ms(s)
    if queue is not None and queue.number > _QUEUED_SHARE * ttft.number:
        return None
    queued = s.load.waiting is not None and s.load.waiting.number > 0
    if queued or not idle or (compute is None and load_free is None):
        return None
    lost_ms = ttft.number - (compute.number if compute is not None else 0)
    if compute is not None and (lost_ms < _UNEXPLAINED_SHARE * ttft.number or lost_ms < _UNEXPLAINED_MS):
        return None
    facts = [ttft, *(_ttft_rows(s)), *([compute] if compute else []), *(load_free or []), *_references(s)]
    facts += [queue] if queue is not None else []
    if s.load.waiting is not None:
        facts.append(Fact(f"{s.load.waiting.text}: nothing waits in the queue", 0, s.load.waiting.source))
    facts += s.busy.facts if s.busy else []
    facts += [fact for fact in (s.load.prefill_side, _kv_room(s)) if fact is not None]
    strength = 0.6 + 0.15 * (compute is not None) + 0.15 * (load_free is not None) + 0.1 * (queue is not None)
    spent = (
        f" (computing the prompt explains about {show(compute.number / 1000)} s of it)" if compute is not None else ""
    )
    return Finding(
        "control-plane-latency",
        min(strength, 0.9),
        f"The first token takes {show(ttft.number / 1000)} s (TTFT {show(ttft.number)} ms){spent} while the GPUs idle "
        f"and nothing is queued: the time goes into agreeing between the {s.P} stages, not into computing.",
        evidence=facts,
        fix=_fix_first_token(s),
        gain=Gain(
            f"TTFT down by up to {show(lost_ms / 1000)} s; tokens/s of a loaded pipeline hardly change",
            None,
            None,
            "TTFT",
            assumes="what computing and queueing do not explain is agreement between stages",
        ),
        verify="TTFT at concurrency 1 should come near the time that the prompt's uncached tokens need",
        precedent="sglang#34815, sglang#38206",
    )


def _queue_ms(s: Situation) -> Fact | None:
    """How long requests waited before they were scheduled, as the engine counts it."""
    for dump in s.evidence.metrics:
        for name in ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"):
            mean = dump.mean(name)
            if mean is not None:
                return Fact(mean.text, 1000 * mean.value, mean.source)
    return None


def _prefill_compute_ms(s: Situation) -> Fact | None:
    """Uncached tokens of a prompt over the speed at which the engine computes prefills."""
    ranks = [rank for rank in s.evidence.logs.sglang.ranks.values() if rank.new_tokens and rank.prefill_tok_s]
    if ranks:
        rank = min(ranks, key=lambda r: r.rank)
        per_request = rank.new_tokens.mean / max(rank.new_seqs.mean, 1)
        speed = rank.prefill_tok_s.median
        if speed > 0:
            text = (
                f"about {show(round(per_request))} uncached tokens per prefill at {show(round(speed))} tokens/s: "
                f"{show(per_request / speed)} s of computing"
            )
            return Fact(text, 1000 * per_request / speed, rank.prefill_at)
    prompt = s.load.input_tokens
    for path, note in s.evidence.notes.items():
        numbers = numbers_in(note.value)
        if prompt is not None and re.search(r"(prefill|input|prompt)\w*_tok_s", path) and numbers and min(numbers) > 0:
            speed = min(numbers)
            return Fact(
                f"{show(prompt.number)} prompt tokens at {path} {note.value}", 1000 * prompt.number / speed, note.source
            )
    return None


def _load_independent(s: Situation) -> list[Fact] | None:
    """The same TTFT with one request as with many."""
    rows = sorted(
        (row for row in s.evidence.bench if row.ttft_ms and row.concurrency), key=lambda row: row.concurrency or 0
    )
    if len(rows) < 2 or (rows[-1].concurrency or 0) < 2 * (rows[0].concurrency or 1):
        return None
    ratio = (rows[-1].ttft_ms or 0) / (rows[0].ttft_ms or 1)
    if ratio > _LOAD_INDEPENDENT or (rows[0].concurrency or 0) > 2:
        return None
    text = (
        f"TTFT at concurrency {rows[-1].concurrency} is {show(ratio)} × that at {rows[0].concurrency}: it does not "
        "depend on load"
    )
    return [Fact(text, ratio, rows[-1].source)]


def _ttft_rows(s: Situation) -> list[Fact]:
    rows = [row for row in s.evidence.bench if row.ttft_ms and row.concurrency][:6]
    return [
        Fact(f"TTFT {show(row.ttft_ms)} ms at concurrency {row.concurrency}", row.ttft_ms, row.source) for row in rows
    ]


def _references(s: Situation) -> list[Fact]:
    """Noted TTFTs of other setups."""
    facts = []
    for path, note in s.evidence.notes.items():
        if "ttft" in path and isinstance(note.value, int | float):
            facts.append(Fact(f"{path}: {show(note.value)}", note.value, note.source))
    return facts


def _kv_room(s: Situation) -> Fact | None:
    ranks = [rank for rank in s.evidence.logs.sglang.ranks.values() if rank.token_usage]
    if not ranks:
        return None
    usage = max(rank.token_usage.maximum for rank in ranks)
    return (
        Fact(f"token usage at most {usage:.0%}: memory does not hold requests back", usage, ranks[0].source)
        if usage < 0.8
        else None
    )


def _between_steps(s: Situation) -> Finding | None:
    """Traces: no stage computes, and the time lies between the last stage's end and the first stage's next start."""
    timeline = s.timeline
    if timeline is None or not timeline.is_complete or timeline.nobody < _NOBODY or not timeline.hops_us:
        return None
    back, hops = timeline.return_us or 0.0, sum(timeline.hops_us)
    if back < hops or (eager_decode(s) is not None and timeline.kernel_density < 0.6):
        return None
    fact = Fact(
        f"in {timeline.nobody:.0%} of the traces' time no stage computes; from the last stage's end to the first "
        f"stage's next start {show(back / 1000)} ms, over all hops {show(hops / 1000)} ms",
        timeline.nobody,
        s.evidence.traces[0].source,
    )
    host = [
        Fact(f"rank {stage} spends {show(rank.host_us[name] / 1e6)} s in {name}", rank.host_us[name], rank.source)
        for stage, rank in timeline.ranks.items()
        for name in rank.host_us
        if stage == 0 and rank.host_us[name] > 0.1 * timeline.window_us
    ]
    return _finding(
        s,
        0.75,
        "Between steps no stage computes: the result's way back and the next plan take that long.",
        [fact, *host],
    )


def _noted(s: Situation) -> Finding | None:
    """A user measured the messages: their sum beside the step."""
    period = s.speed.step_ms or s.speed.lone_ms
    for path, note in s.evidence.notes.items():
        numbers = numbers_in(note.value)
        if (
            not numbers
            or not _CONTROL_KEY.search(path)
            or not re.search(r"ms\b|_ms", path)
            or s.P is None
            or period is None
        ):
            continue
        is_each = isinstance(note.value, list) or re.search(r"per_(?:rank|stage|hop)|each", path)
        total = (
            sum(numbers)
            if isinstance(note.value, list)
            else sum(numbers[:2]) / len(numbers[:2]) * (s.P if is_each else 1)
        )
        if total >= 0.3 * period.number:
            text = f"{path}: {note.value}; in all {show(total)} ms of a step of {show(period.number)} ms"
            return _finding(
                s,
                0.75,
                "Messages that steer the stages take a large part of every step.",
                [Fact(text, total, note.source), period],
            )
    return None


def _counters(s: Situation) -> Finding | None:
    """SGLang's own seconds by category, on rank 0 (elsewhere recv_requests is waiting for the stage before)."""
    for dump in s.evidence.metrics:
        seconds: dict[str, float] = {}
        line = None
        for sample in dump.get("sglang:scheduler_stage_seconds_total"):
            if sample.labels.get("pp_rank", "0") == "0":
                category = sample.labels.get("category", "")
                seconds[category] = seconds.get(category, 0.0) + sample.value
                line = line or sample.line
        whole = sum(value for category, value in seconds.items() if category not in ("idle", "other"))
        steering = sum(
            seconds.get(c, 0.0) for c in ("recv_requests", "process_input_requests", "get_next_batch_to_run")
        )
        if whole > 1.0 and steering > 0.5 * whole and seconds.get("idle", 0.0) < whole:
            text = f"rank 0 spends {show(steering)} of {show(whole)} s receiving requests and forming batches"
            return _finding(
                s,
                0.6,
                "The first rank spends most of its time steering, not running.",
                [Fact(text, None, Source(dump.file, line))],
            )
    return None


def _by_elimination(s: Situation) -> Finding | None:
    """Micro-batches in every slot, even stages, graphs on, links hardly used - and stages idle most of the time."""
    busy, slots = s.busy, s.load.slots
    if busy is None or not busy.is_trusted or slots is None or s.P is None or s.is_cpu:
        return None
    if slots < 0.9 * s.P or busy.total > _HALF * s.P or busy.spread > 1.2 or eager_decode(s) is not None:
        return None
    fact = Fact(
        f"{show(slots)} of {s.P} slots are filled, yet only {show(busy.total)} stages work at once, on average; the "
        "stages are even and decode steps are not known to be eager",
        busy.total,
    )
    facts = [fact for fact in (s.load.in_flight, s.load.micro_batch) if fact is not None]
    summary = (
        "Every slot has a micro-batch, and still all stages idle most of the time: what is left is what lies between "
        "steps."
    )
    return _finding(s, 0.55, summary, [fact, *facts])


def _finding(s: Situation, strength: float, summary: str, facts: list[Fact]) -> Finding:
    return Finding(
        "control-plane-latency",
        strength,
        summary,
        evidence=facts + (s.busy.facts if s.busy else []),
        fix=_fix_steps(s),
        gain=Gain(
            "tokens/s up to the share of time in which nobody computes",
            None,
            None,
            assumes="the messages can be overlapped",
        ),
        verify="the gap between the last stage's end and the first stage's next start should shrink in a trace of "
        "all ranks",
        precedent="gLLM#148, vllm#42187",
    )


def _fix_first_token(s: Situation) -> list[str]:
    if s.engine == "sglang" and s.load.prefill_side is not None:
        ranks = (s.P or 1) * s.tp
        return [
            f"on the prefill side fewer stages: --tp-size {ranks} --pp-size 1, or --tp-size {max(ranks // 2, 1)} "
            "--pp-size 2 (bootstrap consensus goes around the ring twice, about 2 · pp_size loop iterations)",
            "a release with the fix of sglang#34815 / #38206 (consensus kept off the micro-batch ring: sglang#38959)",
        ]
    return _fix_steps(s)


def _fix_steps(s: Situation) -> list[str]:
    if s.engine == "vllm":
        return [
            "a release with the pipelined runner (vllm#42187: results are broadcast beside the hidden states, not "
            "before them)"
        ]
    if s.engine == "sglang":
        return [
            "--pp-async-batch-depth 1 or 2 (more micro-batches in flight cover the exchange when there are requests "
            "for them)"
        ]
    if s.engine == "fullbore":
        return ["--pp-async-batch-depth auto; fewer things on the driver's cores (see /timeline)"]
    return ["send plans to all stages at once and ahead of the data, instead of rank by rank"]

"""chunks-serialised: chunks of a prompt wait for each other through the whole pipeline.

Chunk k + 1 can enter stage 0 while chunk k is in stage 1; n chunks then keep each stage busy n/(n + P - 1) of the time.
vLLM with async scheduling waits for the last stage's sampled token after every chunk, though there is none
(vllm#38726, vllm#41682); smaller chunks then only add overhead.
"""

from __future__ import annotations

import re
from math import ceil

from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.facts import Fact, show
from fullbore.explain.physics import fill_efficiency
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_CHUNK_KEY = re.compile(r"chunk|batched_tokens|ubatch|prefill_size", re.I)
_SLOWER = 0.95
_ONE_AT_A_TIME = 1.5


def chunks_serialised(s: Situation) -> Finding | None:
    stages = s.P
    if stages is None or stages < 2 or s.progress.is_frozen or s.load.prefill_side is not None:
        return None
    sweep = _sweep(s)
    alone = _one_stage_at_a_time(s)
    chunked = _is_chunked(s)
    if sweep is None and (alone is None or chunked is None):
        return None
    if not (s.load.is_prefill_bound or sweep is not None):
        return None
    strength = 0.9 if sweep is not None and alone is not None else 0.75 if sweep is not None else 0.65
    if s.busy is not None and s.busy.is_trusted and s.busy.total > 0.6 * stages:
        return None  # chunks do follow each other
    facts = [*(sweep or []), *([alone] if alone else []), *([chunked] if chunked else [])]
    facts += [
        fact
        for fact in (s.load.input_tokens, s.load.output_tokens, s.settings.fact("async_scheduling"))
        if fact is not None
    ]
    return Finding(
        "chunks-serialised",
        strength,
        f"The chunks of a prompt go through the {stages} stages one after the other, each waiting for the one before "
        f"to leave the last stage: one stage of {stages} works at a time, and smaller chunks cost overhead instead of "
        "filling the pipeline.",
        evidence=facts + (s.busy.facts if s.busy else []),
        fix=_fix(s),
        gain=_gain(s, stages),
        verify="with chunks following each other, input tokens/s should rise as chunks get smaller (until launches "
        "dominate), and the stages' utilisation with it",
        precedent="vllm#38726, vllm#41682",
    )


def _sweep(s: Situation) -> list[Fact] | None:
    """The same work at several chunk sizes: slower with smaller chunks."""
    rows = [(size, rate, row) for row in s.evidence.bench if (size := _chunk(row)) and (rate := _rate(row))]
    if len(rows) < 2:
        return None
    rows.sort(key=lambda entry: -entry[0])
    largest, smallest = rows[0], rows[-1]
    if largest[0] < 2 * smallest[0] or smallest[1] > _SLOWER * largest[1]:
        return None
    facts = []
    for size, rate, row in rows:
        per_gpu = next((v for k, v in row.results.items() if "per_gpu" in k and isinstance(v, int | float)), None)
        each = f" ({show(per_gpu)} per GPU)" if per_gpu else ""
        facts.append(Fact(f"chunk {show(size)}: {show(rate)} input tokens/s{each}", rate, row.source))
    ratio = smallest[1] / largest[1]
    text = (
        f"{show(smallest[0])}-token chunks give {show(ratio)} × the speed of {show(largest[0])}: chunks that follow "
        f"each other through {s.P} stages would be faster, not slower"
    )
    return [*facts, Fact(text, ratio, smallest[2].source)]


def _chunk(row: BenchRow) -> float | None:
    for name, value in row.varied.items():
        if _CHUNK_KEY.search(name) and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def _rate(row: BenchRow) -> float | None:
    if row.input_tok_s:
        return row.input_tok_s
    return 1e6 / row.ttft_ms if row.ttft_ms else None


def _one_stage_at_a_time(s: Situation) -> Fact | None:
    busy = s.busy
    if busy is None or not busy.is_trusted or not 0.6 <= busy.total <= _ONE_AT_A_TIME or busy.spread > 1.5:
        return None
    text = f"stages at work at once, on average: {show(busy.total)} of {s.P}"
    return Fact(text, busy.total, busy.facts[0].source if busy.facts else None)


def _is_chunked(s: Situation) -> Fact | None:
    """Prompts longer than a chunk."""
    chunk, prompt = s.settings.number("chunk"), s.load.input_tokens
    if chunk is None or prompt is None or chunk.number <= 0 or prompt.number < 2 * chunk.number:
        return None
    count = ceil(prompt.number / chunk.number)
    return Fact(f"{chunk.text}: {show(prompt.number)} prompt tokens make {count} chunks", count, chunk.source)


def _fix(s: Situation) -> list[str]:
    if s.engine == "vllm":
        return [
            "--no-async-scheduling   (chunks are then pipelined: no broadcast of a token that does not exist)",
            "or a release with vllm#38726, which skips that broadcast for chunked prefill, or with the pipelined "
            "runner (vllm#42187)",
            "until then --max-num-batched-tokens at least the prompt's length: fewer waits per prompt",
        ]
    if s.engine == "sglang":
        return [
            "--chunked-prefill-size 4096 to 8192 with --enable-dynamic-chunking, on a release whose successive slots "
            "run successive chunks (sglang#11857)",
        ]
    if s.engine in ("llama.cpp", "ollama"):
        return ["-b 4096 -ub 512: a batch of several micro-batches is what llama.cpp pipelines (llama.cpp#4918)"]
    return ["let chunk k + 1 enter the first stage while chunk k is in the second"]


def _gain(s: Situation, stages: int) -> Gain:
    chunk, prompt = s.settings.number("chunk"), s.load.input_tokens
    if chunk is None or prompt is None or chunk.number <= 0:
        return Gain(f"up to {stages} × input tokens/s", 1.0, float(stages), "input tokens/s")
    count = max(ceil(prompt.number / chunk.number), 1)
    ideal = stages * fill_efficiency(count, stages)
    return Gain(
        f"{show(ideal / 2)} to {show(ideal)} × input tokens/s",
        max(ideal / 2, 1.0),
        ideal,
        "input tokens/s",
        assumes=f"{count} equal chunks per prompt: P·n/(n + P - 1) over one stage at a time; the low end for "
        "chunks whose time grows with the context",
    )

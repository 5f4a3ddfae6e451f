"""pp-latency-expected (nothing is wrong): a pipeline does not shorten one request's way.

Its token passes all stages one after the other: Σ s + hops, the time of one GPU with all layers. Tensor parallelism
divides every layer instead; on fast links its latency is lower, and the more stages, the less (TensorRT-LLM#1144,
TensorRT-LLM#1102: 11.3 s on two stages, 11.5 s on one GPU).
"""

from __future__ import annotations

from itertools import pairwise

from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import faster_lone_request
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding

_SAME = (0.75, 1.35)  # time per token on P stages over that on one GPU
_NEAR_ROOFLINE = 0.55
_WORSE = 1.05


def pp_latency_expected(s: Situation) -> Finding | None:
    if s.progress.is_frozen:
        return None
    return _layouts(s) or _one_gpu(s) or _lone_roofline(s)


def _layouts(s: Situation) -> Finding | None:
    """The same GPUs in several layouts, under the same load: more stages, more latency, within what physics says."""
    groups: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in s.evidence.bench:
        if row.pp is not None or row.tp is not None:
            key = (row.gpus, row.concurrency, row.varied.get("request_rate"), row.input_tokens, row.output_tokens)
            groups.setdefault(key, []).append(row)
    for (gpus, concurrency, rate, *_), rows in groups.items():
        if len({row.pp or 1 for row in rows}) < 2 or not isinstance(gpus, int):
            continue
        if concurrency is not None and concurrency > 2:  # type: ignore[operator]
            continue  # a question of throughput
        if concurrency is None and rate is None and not any(row.latency_ms for row in rows):
            continue
        measured = sorted(
            ((row.pp or 1, ms, row) for row in rows if (ms := _latency(row)) is not None), key=lambda e: e[0]
        )
        is_ordered = all(later[1] > _WORSE * earlier[1] for earlier, later in pairwise(measured))
        if len(measured) < 2 or not is_ordered or measured[-1][1] > gpus * 1.1 * measured[0][1]:
            continue
        return _layout_finding(s, rows, measured, gpus)
    return None


def _layout_finding(
    s: Situation, rows: list[BenchRow], measured: list[tuple[int, float, BenchRow]], gpus: int
) -> Finding:
    facts = [Fact(f"{row.layout}: {show(ms)} ms", ms, row.source) for _, ms, row in measured]
    for row in rows:
        if row.results.get("sustained") is False:
            facts.append(Fact(f"{row.layout}: does not sustain the rate", None, row.source))
    best = min(rows, key=lambda row: row.pp or 1)
    finding = Finding(
        "pp-latency-expected",
        0.85,
        "Nothing is wrong: latency grows with the number of pipeline stages because a request passes them one after "
        f"the other, while tensor parallelism divides every layer over the cards. On the same {gpus} GPUs "
        f"{best.layout or 'tensor parallelism'} (tp={best.tp or gpus}) has the least latency.",
        evidence=facts
        + [note.fact(f"{name}: {note.value}") for name, note in s.evidence.notes.items() if name == "link"],
        fix=[
            "for latency: the layout with the most tensor parallelism that the links carry, here "
            f"tp={best.tp or gpus} pp={best.pp or 1}; stages are for models that do not fit otherwise, for slow "
            "links, and for throughput with many requests in flight"
        ],
        verify="the same comparison at a higher rate or concurrency: there a full pipeline gains on tensor parallelism",
        precedent="TensorRT-LLM#1144",
    )
    if any(row.results.get("sustained") is False for row in rows):
        finding.unexplained = (
            "why the longest pipeline does not sustain the rate: requests in flight, batch sizes and an engine log "
            "would tell"
        )
    return finding


def _latency(row: BenchRow) -> float | None:
    return (
        row.latency_ms or row.itl_ms or (1000 / row.output_tok_s if row.output_tok_s and row.concurrency == 1 else None)
    )


def _one_gpu(s: Situation) -> Finding | None:
    """One request on P stages, as fast as on one GPU."""
    rows = [row for row in s.evidence.bench if row.gpus and row.concurrency in (1, None)]
    singles = [row for row in rows if row.gpus == 1 and _latency(row)]
    several = [row for row in rows if (row.gpus or 1) > 1 and (row.tp or 1) == 1 and _latency(row)]
    most = max((row.gpus or 1 for row in several), default=0)  # if hops cost anything, it shows on the most stages
    several = [row for row in several if row.gpus == most]
    for single in singles:
        for row in several:
            if single.concurrency != row.concurrency or (single.concurrency is None and not single.latency_ms):
                continue
            ratio = (_latency(row) or 0) / (_latency(single) or 1)
            if _SAME[0] <= ratio <= _SAME[1]:
                facts = [
                    Fact(f"one GPU: {show(_latency(single))} ms", None, single.source),
                    Fact(
                        f"{row.gpus} GPUs in stages: {show(_latency(row))} ms, {show(ratio)} × that", ratio, row.source
                    ),
                ]
                return _lone_finding(s, 0.9, facts, row.gpus)
    return None


def _lone_roofline(s: Situation) -> Finding | None:
    """One request on P stages, near what reading its weights once allows."""
    share, stages = s.speed.lone_share, s.P
    if (
        share is None
        or stages is None
        or stages < 2
        or not _NEAR_ROOFLINE <= share <= 1.3
        or s.load.known not in (1, None)
    ):
        return None
    facts = [fact for fact in (s.speed.lone_ms, s.speed.bytes_per_token, s.speed.bandwidth_bytes_s) if fact is not None]
    facts.append(
        Fact(
            f"roofline of one request, on any number of stages: {show(1000 / (s.speed.lone_floor_ms or 1))} tokens/s",
            None,
        )
    )
    return _lone_finding(s, 0.65, facts, stages)


def _lone_finding(s: Situation, strength: float, facts: list[Fact], count: int | None) -> Finding:
    stages = f"{count} stages" if count is not None else "stages"
    return Finding(
        "pp-latency-expected",
        strength,
        f"Nothing is wrong: one request passes {stages} one after the other and takes as long as on one GPU with all "
        "layers. A pipeline makes room and serves many requests at once; it does not make one faster.",
        evidence=facts + (s.busy.facts if s.busy else []),
        fix=[*faster_lone_request(s), "for more tokens/s in all: more requests at once, at least one per stage"],
        verify="tokens/s of all requests together at concurrency 1, P and 4P: it should grow while each request "
        "stays as fast",
        precedent="TensorRT-LLM#1102, TensorRT-LLM#1144",
    )

"""kv-limited: the KV cache decides how many requests, or how long ones, the pipeline can hold.

Its capacity in tokens is the smallest stage's: min over stages of free bytes / (bytes per token and layer x layers of
the stage). vLLM checks one request of full length against a stage as if it held all layers (vllm#34076, vllm#32105).
"""

from __future__ import annotations

from fullbore.explain.evidence.vllm_log import KvRefusal
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import balance_kv, more_kv
from fullbore.explain.physics import weighted_partition
from fullbore.explain.situation import Situation
from fullbore.explain.stage_layers import stage_layers
from fullbore.explain.verdicts.finding import Finding, Gain

_FULL = 0.9
_HALF = 0.5  # below this nothing is thrown out for want of room
_LEAST_DEFAULT_LIMIT = 128  # of vLLM, on requests that run at once
_UNEVEN_CAPACITY = 1.25


def kv_limited(s: Situation) -> Finding | None:
    if s.evidence.logs.vllm.kv_refusal is not None:
        return _refused(s, s.evidence.logs.vllm.kv_refusal)
    return _no_memory(s) or _full(s)


def _refused(s: Situation, refusal: KvRefusal) -> Finding:
    """One request of full length does not fit: on which stage, and what would if each counted its own layers."""
    facts = [
        Fact(
            f"{show(refusal.needed_gib)} GiB needed for {show(refusal.max_tokens)} tokens, "
            f"{show(refusal.available_gib)} GiB available",
            refusal.needed_gib,
            refusal.source,
        )
    ]
    available = s.evidence.logs.vllm.kv_available_gib
    facts += [
        reading.fact(f"stage {n}: {show(reading.value)} GiB available") for n, reading in sorted(available.items())
    ]
    layers = stage_layers(s)
    finding = Finding(
        "kv-limited",
        0.95,
        f"The engine refuses to start: the KV cache of one request of {show(refusal.max_tokens)} tokens does not fit.",
        evidence=facts,
        fix=[f"--max-model-len {refusal.estimated_tokens}   (what the engine says fits)"]
        if refusal.estimated_tokens
        else [],
        gain=Gain("it starts"),
        is_at_start=True,
        verify="`GPU KV cache size` and `Maximum concurrency` in the log at the next start",
        precedent="vllm#34076, vllm#32105, vllm#33698",
    )
    is_known = s.evidence.logs.vllm.has_stage_labels or len({reading.value for reading in available.values()}) == 1
    if layers is not None and is_known and len(available) == s.P and s.P is not None and s.P > 1:
        _refused_by_stage(s, refusal, layers, finding)
    finding.fix += more_kv(s)
    return finding


def _refused_by_stage(s: Situation, refusal: KvRefusal, layers: Fact, finding: Finding) -> None:
    """Each stage needs only its own layers' share of the cache."""
    available = [float(reading.value) for _, reading in sorted(s.evidence.logs.vllm.kv_available_gib.items())]
    total = sum(layers.value)
    needs = [refusal.needed_gib * count / total for count in layers.value]
    fits = [int(refusal.max_tokens * have / need) for have, need in zip(available, needs, strict=True)]
    tightest = fits.index(min(fits))
    finding.evidence.append(layers)
    for stage, (need, have, tokens) in enumerate(zip(needs, available, fits, strict=True)):
        finding.evidence.append(
            Fact(
                f"stage {stage} (PP{stage}) holds {layers.value[stage]} of {total} layers: it needs {show(need)} GiB "
                f"and has {show(have)} GiB, enough for {show(tokens)} tokens",
                tokens,
            )
        )
    finding.summary += (
        f" The check charges all {total} layers to every stage; stage {tightest}, the tightest, holds "
        f"{layers.value[tightest]} of them, needs {show(needs[tightest])} GiB and could hold {show(fits[tightest])} "
        "tokens."
    )
    if min(fits) >= refusal.max_tokens:
        finding.fix.insert(
            0,
            "a release whose check counts each stage's own layers (vllm#34076, vllm#33698): with it "
            f"{show(refusal.max_tokens)} tokens fit on every stage, and nothing else has to change",
        )
        return
    room = [have / (refusal.needed_gib / total) for have in available]
    better = weighted_partition(total, room)
    best = min(
        int(refusal.max_tokens * have * total / refusal.needed_gib / n)
        for have, n in zip(available, better, strict=True)
    )
    finding.fix.append(
        f"--max-model-len {fits[tightest] // 16 * 16} with a release whose check counts each stage's own layers "
        f"(vllm#34076): {show(fits[tightest])} tokens is what stage {tightest} can hold"
    )
    finding.fix.append(
        f"{balance_kv(s)}: by memory left for KV alone {','.join(str(n) for n in better)} would hold {show(best)} "
        "tokens, but layers also bring their weights along"
    )
    finding.unexplained = (
        "how much KV memory is left on each stage after layers are moved, since their weights move with them"
    )


def _no_memory(s: Situation) -> Finding | None:
    """Out of memory at start-up, before any request ran."""
    mark = s.evidence.logs.marks.get("no-kv-memory", "out-of-memory")
    logs = s.evidence.logs
    has_served = logs.vllm.running or any(rank.decode_running or rank.new_seqs for rank in logs.sglang.ranks.values())
    if mark is None or has_served:
        return None
    layers = stage_layers(s)
    return Finding(
        "kv-limited",
        0.8,
        "The engine does not start for want of memory: nothing is left for the KV cache on at least one stage.",
        evidence=[mark.fact(), *([layers] if layers else [])],
        fix=[*more_kv(s), balance_kv(s)],
        gain=Gain("it starts"),
        is_at_start=True,
        verify="the KV cache size that each stage prints at the next start",
        precedent="sglang#9798",
    )


def _full(s: Situation) -> Finding | None:
    """While serving: the pool is full, requests wait or are thrown out."""
    usage = _usage(s)
    evictions = _evictions(s)
    waits = s.load.waiting is not None and s.load.waiting.number > 0
    next_fits = _next_request_fits(s, usage)
    is_full = usage is not None and (usage.number >= _FULL or next_fits is False)
    has_room = usage is not None and usage.number < _HALF
    if s.progress.is_frozen or not ((is_full and (waits or evictions)) or (evictions and not has_room)):
        return None
    facts = [fact for fact in (usage, s.load.waiting, s.load.in_flight, s.load.at_most) if fact is not None] + evictions
    uneven = _uneven_capacity(s)
    fits = f" ({s.load.known} are)" if s.load.known is not None else ""
    if next_fits is False and usage is not None and s.load.known:
        text = f"one more request as large as the {s.load.known} that run would need {usage.number / s.load.known:.0%}"
        facts.append(Fact(f"{text} of the cache; {1 - usage.number:.0%} are free", usage.number, usage.source))
    finding = Finding(
        "kv-limited",
        0.9 if is_full and evictions else 0.75,
        f"The KV cache {'is full' if next_fits is not False else 'has no room for another request'}: it, not the "
        f"scheduler, decides how many requests run{fits}; others wait"
        + (" or are thrown out and computed again." if evictions else "."),
        evidence=facts + ([uneven] if uneven else []),
        fix=more_kv(s) + ([balance_kv(s)] if uneven or (s.P or 1) > 1 else []),
        gain=_gain_full(s, usage),
        verify="KV usage below 90 % with nothing waiting, no more preemptions or retractions",
        precedent="vllm#34076; sglang#10214",
    )
    if uneven is None and (s.P or 1) > 1:
        finding.unexplained = "whether one stage has less room than the others (free memory per stage at start-up)"
    return finding


def _next_request_fits(s: Situation, usage: Fact | None) -> bool | None:
    """Would one more request, as large as those that run, fit into what is free?"""
    running, limit = s.load.known, s.load.at_most
    if usage is None or not running:
        return None
    admitted = limit.number if limit is not None else _LEAST_DEFAULT_LIMIT if s.engine == "vllm" else 0
    if running >= admitted:
        return None  # or it waits for that limit
    return usage.number * (1 + 1 / running) < 1.0


def _usage(s: Situation) -> Fact | None:
    """Highest use of the pool, 0 to 1."""
    vllm, sglang = s.evidence.logs.vllm, s.evidence.logs.sglang
    found: list[Fact] = []
    if vllm.kv_usage:
        found.append(
            Fact(f"GPU KV cache usage up to {vllm.kv_usage.maximum:.0%}", vllm.kv_usage.quantile(0.75), vllm.source)
        )
    for rank in sglang.ranks.values():
        if rank.token_usage:
            at = rank.decode_at or rank.prefill_at
            found.append(
                Fact(
                    f"token usage up to {rank.token_usage.maximum:.0%} (PP{rank.rank})",
                    rank.token_usage.quantile(0.75),
                    at,
                )
            )
    for dump in s.evidence.metrics:
        usage = dump.total("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
        if usage is not None:
            found.append(usage)
        used, free = dump.total("fullbore_kv_blocks_used"), dump.total("fullbore_kv_blocks_free")
        if used is not None and free is not None and used.value + free.value > 0:
            share = used.value / (used.value + free.value)
            found.append(
                Fact(f"{show(used.value)} of {show(used.value + free.value)} KV blocks in use", share, used.source)
            )
    return max(found, key=lambda fact: fact.number, default=None)


def _evictions(s: Situation) -> list[Fact]:
    facts = [
        mark.fact() for name in ("retraction", "preemption") if (mark := s.evidence.logs.marks.get(name)) is not None
    ]
    names = (
        "vllm:num_preemptions_total",
        "sglang:num_retracted_reqs",
        "sglang:num_retracted_requests_total",
        "fullbore_preemptions_total",
    )
    dumps = sorted(s.evidence.metrics, key=lambda dump: dump.file)
    if dumps:
        last = dumps[-1].total(*names)
        before = dumps[0].total(*names) if len(dumps) > 1 else None
        grown = last.number - (before.number if before is not None else 0) if last is not None else 0
        if last is not None and grown > 0:
            facts.append(last)
    return facts


def _uneven_capacity(s: Situation) -> Fact | None:
    """Stages with room for different numbers of tokens: what the others have more is stranded."""
    layers = stage_layers(s)
    available = s.evidence.logs.vllm.kv_available_gib
    is_known = s.evidence.logs.vllm.has_stage_labels
    if layers is None or s.P is None or not is_known or sorted(available) != list(range(s.P)):
        return None
    room = [float(available[n].value) / layers.value[n] for n in range(s.P)]
    if min(room) <= 0 or max(room) / min(room) < _UNEVEN_CAPACITY:
        return None
    tight = room.index(min(room))
    text = (
        f"stage {tight} has {show(min(room))} GiB per layer for KV, the roomiest {show(max(room))}: the difference is "
        "stranded"
    )
    return Fact(text, tight, available[tight].source)


def _gain_full(s: Situation, usage: Fact | None) -> Gain:
    waiting, running = s.load.waiting, s.load.known
    if waiting is None or running is None or not running or usage is None:
        return Gain("more requests at once; tokens/s in proportion until the stages are full", 1.0, None)
    high = min((running + waiting.number) / running, 2.0)
    return Gain(
        f"up to {show(high)} × requests at once with twice the KV capacity; tokens/s at most as much",
        1.0,
        high,
        assumes="stage time does not grow with the batch, and the waiting requests are like the running ones",
    )

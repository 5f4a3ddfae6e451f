"""not-idle-time: slower than idle stages can explain.

A pipeline of P stages that works one stage at a time is as slow as one GPU with the same work, never slower: a slowdown
beyond P x, and for one request any beyond the hops, is something else - the host, copies, layers on the CPU
(accelerate#1394: 8.8 x on two GPUs).
"""

from __future__ import annotations

import re

from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation, gpu_count
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.explain.verdicts.launch_bound import eager_decode
from fullbore.plan.devices import device_named

_LONE_SLOWDOWN = 1.6  # of one request against one GPU: hops and result return cost less
_BEYOND = 1.05
_ON_CPU_SHARE = 0.97
_NOBODY_WORKS = 0.5  # stages at work at once, for one request
_SINGLE = re.compile(
    r"(?:single|one|1)_?(?:gpu|card|device)|(?:gpu|card)s?_?1\b|without_(?:pp|pipeline)|pp_?1\b|no_pp", re.I
)

_RATE = re.compile(r"tok(?:ens)?_?(?:per)?_?s(?:ec)?(?:ond)?(?:$|_)|tps", re.I)
_TIME = re.compile(r"ms_per_token|tpot_ms|itl_ms", re.I)


def not_idle_time(s: Situation) -> Finding | None:
    if s.progress.is_frozen or s.is_cpu:
        return None
    return _on_cpu(s) or _against_one_gpu(s) or _against_before(s) or _against_memory(s)


def _against_one_gpu(s: Situation) -> Finding | None:
    compared = _comparison(s)
    if compared is None:
        return None
    slowdown, stages, facts, is_lone = compared
    if stages < 2:
        return None
    lone_limit = _LONE_SLOWDOWN * _card_ratio(s)
    if slowdown <= stages * _BEYOND and not (is_lone and slowdown > lone_limit):
        return None
    is_beyond = slowdown > stages * _BEYOND
    text = f"{show(slowdown)} × slower than one GPU"
    reason = (
        f"Idle stages can cost {stages} stages at most a factor of {stages}; this is {show(slowdown)} × ({text}), so "
        "idle time is not the cause."
        if is_beyond
        else f"One request is {text}. Idle stages do not slow one request down at all: it only has to pass the "
        "hops; this is something else."
    )
    finding = Finding(
        "not-idle-time",
        0.95 if is_beyond else 0.6,
        reason + " Time goes into the host, copies between devices or kernels that do not run as they should.",
        evidence=[
            *facts,
            Fact(f"slowdown {slowdown:.2f} × on {stages} GPUs", slowdown),
            *(s.busy.facts if s.busy else []),
        ],
        fix=_fix(s),
        gain=Gain(
            f"up to {show(slowdown)} × tokens/s (the speed of one GPU)",
            1.0,
            slowdown,
            assumes="one GPU's speed is what the same work takes without the split",
        ),
        verify="a profile of one step (PyTorch profiler or nsys) on all devices: where neither computes, what does "
        "the host do?",
        precedent="accelerate#1394",
    )
    if s.busy is not None and s.busy.is_trusted and s.busy.total < _NOBODY_WORKS:
        finding.evidence.append(
            Fact(f"stages at work at once, on average: {show(s.busy.total)}; with a request always there it would be 1")
        )
    finding.unexplained = "what exactly takes the time: the evidence shows how much, not what"
    return finding


def _comparison(s: Situation) -> tuple[float, int, list[Fact], bool] | None:
    """(slowdown, stages, facts, is it one request) against one GPU at the same concurrency."""
    rows = [row for row in s.evidence.bench if row.decode_tok_s and row.gpus]
    # Of several cards that were measured alone the slowest counts: a pipeline over both cannot be faster than a mean.
    singles = sorted((row for row in rows if row.gpus == 1), key=lambda row: row.decode_tok_s or 0)
    several = [row for row in rows if (row.gpus or 1) > 1 and (row.tp or 1) == 1]
    several.sort(key=lambda row: (row.decode_tok_s or 0) * (row.gpus or 1))
    for single in singles:
        for row in several:
            if row.concurrency == single.concurrency:
                slowdown = (single.decode_tok_s or 0) / (row.decode_tok_s or 1)
                what = "machines" if {"machines", "nodes", "hosts"} & set(row.varied) else "GPUs"
                facts = [
                    Fact(f"{show(single.decode_tok_s)} tokens/s on one", single.decode_tok_s, single.source),
                    Fact(f"{show(row.decode_tok_s)} tokens/s on {row.gpus} {what}", row.decode_tok_s, row.source),
                ]
                return slowdown, max(row.gpus or 1, s.P or 1), facts, single.concurrency == 1
    reference = _noted_single(s)
    stages = s.P if s.P is not None and s.P > 1 else gpu_count(s)
    if reference is not None and s.speed.lone_ms is not None and stages is not None:
        slowdown = reference.number * s.speed.lone_ms.number / 1000
        return slowdown, stages, [reference, s.speed.lone_ms], True
    return None


def _against_before(s: Situation) -> Finding | None:
    """Slower than it was, on the same GPUs, by more than idle stages can cost."""
    before, slowdown = s.speed.was_faster, s.speed.slowdown
    if s.P is None or s.P < 2 or before is None or slowdown is None or slowdown <= s.P * _BEYOND:
        return None
    return Finding(
        "not-idle-time",
        0.6,
        f"It was {show(slowdown)} × as fast before. Idle stages can cost {s.P} stages at most a factor of {s.P}: "
        "something else takes the time.",
        evidence=[before, *([s.speed.lone_ms] if s.speed.lone_ms else []), *(s.busy.facts if s.busy else [])],
        fix=["go back to the version or setup that was fast, and change one thing at a time", *_fix(s)],
        gain=Gain(
            f"up to {show(slowdown)} × tokens/s (what it was)",
            1.0,
            slowdown,
            assumes="load and model are what they were",
        ),
        verify="a profile of one step on all devices: where none computes, what does the host do?",
        precedent="vllm#6826",
        unexplained="what changed: the evidence shows how much, not what",
    )


def _card_ratio(s: Situation) -> float:
    """Memory bandwidth of the fastest card over the slowest: with unequal cards one GPU may mean the fast one."""
    speeds = [card.bandwidth_gb_s for gpu in s.gpus if (card := device_named(gpu.name)) is not None]
    return max(speeds) / min(speeds) if speeds else 1.0


def _noted_single(s: Situation) -> Fact | None:
    """Tokens/s of one GPU as noted."""
    for path, note in s.evidence.notes.items():
        numbers = numbers_in(note.value)[:2]
        if _SINGLE.search(path) and numbers and not re.search(r"prefill|input|prompt|ttft", path):
            mean = sum(numbers) / len(numbers)
            if _RATE.search(path) and mean > 0:
                return Fact(f"{path}: {note.value}", mean, note.source)
            if _TIME.search(path) and mean > 0:
                return Fact(f"{path}: {note.value}", 1000 / mean, note.source)
    return None


def _on_cpu(s: Situation) -> Finding | None:
    """Layers or weights that are not on a GPU."""
    facts = _cpu_facts(s)
    if not facts:
        return None
    share = s.speed.lone_share
    return Finding(
        "not-idle-time",
        0.85 if share is None or share < 0.6 else 0.5,
        "Part of the model is not on the GPUs: its layers run on, or are copied from, the host for every token. That "
        "time is work of the host, not idle time of the pipeline.",
        evidence=facts + (s.busy.facts if s.busy else []),
        fix=_fix_cpu(s),
        gain=Gain("large: host memory is 5 to 30 × slower than a GPU's", None, None),
        verify="all layers on GPUs in the start-up log; then measure again",
        precedent="ollama#8995",
    )


def _cpu_facts(s: Situation) -> list[Fact]:
    facts = []
    offloaded = s.evidence.logs.llama.offloaded
    if offloaded is not None and offloaded.value[0] < _ON_CPU_SHARE * offloaded.value[1]:
        facts.append(offloaded.fact(f"offloaded {offloaded.value[0]}/{offloaded.value[1]} layers to GPU"))
    offload = s.settings.number("cpu_offload_gb")
    if offload is not None and offload.number > 0:
        facts.append(offload)
    for name, buffer in s.evidence.logs.llama.buffers_mib.items():
        if name.startswith("CPU") and "REPACK" in name:
            facts.append(buffer.fact(f"{buffer.name}: {show(buffer.value)}"))
    return facts


def _against_memory(s: Situation) -> Finding | None:
    """One request, far from the memory roofline, and no stage at work most of the time."""
    share, busy = s.speed.lone_share, s.busy
    if s.P is None or s.P < 2 or share is None or busy is None or not busy.is_trusted or s.load.known != 1:
        return None
    if busy.total >= _NOBODY_WORKS or 1 / share <= s.P * _BEYOND or eager_decode(s) is not None:
        return None
    if s.engine not in (None, "transformers", "ollama", "llama.cpp", "exllama"):
        return None
    facts = [f for f in (s.speed.lone_ms, s.speed.bytes_per_token, s.speed.bandwidth_bytes_s) if f is not None]
    return Finding(
        "not-idle-time",
        0.65,
        f"One request takes {show(1 / share)} × as long per token as reading its weights, more than {s.P} idle stages "
        f"could cost, and no stage works for {1 - busy.total:.0%} of the time.",
        evidence=facts + busy.facts,
        fix=_fix(s),
        gain=Gain(
            f"up to {show(1 / share)} × tokens/s",
            1.0,
            1 / share,
            assumes="the memory roofline of the card's data sheet",
        ),
        verify="a profile of one step on all devices",
        precedent="accelerate#1394",
    )


def _fix(s: Situation) -> list[str]:
    if s.engine == "transformers":
        return [
            "an engine made for it (fullbore, vLLM, SGLang, llama.cpp): device_map='auto' moves tensors between "
            "devices from Python, layer by layer, for every token",
            "one GPU, if the model fits (torch_dtype or 4-bit weights): faster than any split",
            "a recent accelerate (accelerate#1394 stopped copying weights and inputs back and forth), and a "
            "device_map with one border",
        ]
    return [
        "profile one step on all devices and look at what runs while none computes: host code, device-to-host "
        "copies, synchronisations",
        "check peer access between the GPUs (nvidia-smi topo -p2p r) and that no layer or tensor is on the CPU",
    ]


def _fix_cpu(s: Situation) -> list[str]:
    if s.engine in ("llama.cpp", "ollama"):
        return [
            "-ngl 999 (ollama: num_gpu 999), with a smaller quantisation or -c so that all layers fit, or another GPU"
        ]
    return ["no CPU offload (--cpu-offload-gb 0): quantised weights, or more GPUs"]

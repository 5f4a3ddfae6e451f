"""launch-bound: decode steps take as long as launching their kernels takes, not as reading the weights does.

Without CUDA graphs every kernel of every layer is launched by the host, 5 to 10 µs each and more in Python: at small
batches the GPU finishes each before the next one arrives (llama.cpp#6763, llama.cpp#13751).
"""

from __future__ import annotations

from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import use_graphs
from fullbore.explain.situation import Situation
from fullbore.explain.stage_layers import total_layers
from fullbore.explain.verdicts.finding import Finding, Gain

_SLOWER_THAN_MEMORY = 1.6  # measured step over its memory roofline; graphs reach 1.2 to 1.5
_SPARSE = 0.6  # of a stretch of work that kernels fill
_MANY_LAUNCHES = 40  # in one stretch
_GRAPHED_SHARE = 0.7  # of the roofline, with graphs
_MOSTLY_EAGER = 0.5
_MOST_LAUNCH_MS_PER_LAYER = 3.0  # fused kernels take 0.2 to 0.5 ms, Python loops over experts up to this


def launch_bound(s: Situation) -> Finding | None:
    if s.is_cpu or s.progress.is_frozen or s.load.is_prefill_bound or not s.has_load:
        return None
    eager, sparse = eager_decode(s), _sparse_kernels(s)
    if eager is None and sparse is None:
        return None
    slow = _slower_than_memory(s)
    strength = _strength(s, eager, sparse, slow)
    if strength is None:
        return None
    beyond = _beyond_launches(s)
    if beyond is not None and sparse is None:
        strength = 0.45
    finding = Finding(
        "launch-bound",
        strength,
        "Decode steps run kernel by kernel, without CUDA graphs: the host's launches, not the GPU's work, set the "
        "pace of each step.",
        evidence=[fact for fact in (eager, sparse, slow, s.speed.bandwidth_bytes_s, _power(s)) if fact is not None],
        against=[beyond] if beyond is not None else [],
        fix=use_graphs(s),
        gain=_gain(s),
        verify="the time between tokens of one request should fall; decode steps counted as eager should be none",
        precedent="llama.cpp#6763, llama.cpp#13751",
    )
    if slow is None:
        finding.unexplained = "how far the steps are from the memory roofline (model size or card not in the evidence)"
    elif s.speed.lone_share is not None:
        finding.unexplained = (
            f"{show(1 / s.speed.lone_share)} × the memory roofline is more than launches alone need explain; a "
            "profile of one stage shows the gaps between kernels"
        )
    return finding


def eager_decode(s: Situation) -> Fact | None:
    """A sign that decode steps are not graphs: a flag, log lines, or counters."""
    logs = s.evidence.logs
    ranks = [rank for rank in logs.sglang.ranks.values() if rank.graph_on + rank.graph_off and not rank.is_cpu]
    on, off = sum(rank.graph_on for rank in ranks), sum(rank.graph_off for rank in ranks)
    if off and off / (on + off) > _MOSTLY_EAGER:
        rank = next(rank for rank in ranks if rank.graph_off)
        return Fact(f"`cuda graph: False` on {off} of {on + off} decode lines", off, rank.graph_off_at)
    if on:
        return None
    flag = s.settings.is_on("eager")
    if flag is not None:
        return flag
    if logs.llama.graphs_disabled is not None:
        return logs.llama.graphs_disabled.fact(f'"{logs.llama.graphs_disabled.value}"')
    mark = logs.marks.get("eager-forced")
    return mark.fact() if mark is not None else _eager_passes(s)


def _eager_passes(s: Situation) -> Fact | None:
    for dump in s.evidence.metrics:
        eager = dump.total("sglang:cuda_graph_passes_total", mode="decode_none")
        if eager is not None and eager.value > 0:
            whole = sum(
                sample.value
                for sample in dump.get("sglang:cuda_graph_passes_total")
                if sample.labels.get("mode", "").startswith("decode") and sample.labels.get("pp_rank", "0") == "0"
            )
            if eager.value > _MOSTLY_EAGER * whole:
                return Fact(
                    f"{show(eager.value)} of {show(whole)} decode passes without a graph", eager.value, eager.source
                )
    return None


def _sparse_kernels(s: Situation) -> Fact | None:
    """Within a stage's stretch of work, gaps between kernels."""
    timeline = s.timeline
    if timeline is None or not timeline.is_complete or timeline.kernel_density > _SPARSE or timeline.is_extend:
        return None
    if timeline.launches_per_step < _MANY_LAUNCHES or any(rank.graph_launches for rank in timeline.ranks.values()):
        return None
    text = (
        f"while a stage works, kernels fill {timeline.kernel_density:.0%} of the time; "
        f"{show(timeline.launches_per_step)} launches per step, none of them a graph"
    )
    return Fact(text, timeline.kernel_density, s.evidence.traces[0].source)


def _slower_than_memory(s: Situation) -> Fact | None:
    """The measured step beside what reading the weights takes."""
    floor = s.speed.lone_floor_ms
    if floor is None or s.speed.bytes_per_token is None:
        return None
    if s.speed.lone_ms is not None:
        ratio, measured = s.speed.lone_ms.number / floor, s.speed.lone_ms
    elif s.speed.step_ms is not None and s.load.known is not None and s.P is not None:
        requests = s.load.micro_batch.number if s.load.micro_batch is not None else max(s.load.known / s.P, 1)
        floor = s.speed.pass_floor_ms(requests) or floor
        ratio, measured = s.speed.step_ms.number / floor, s.speed.step_ms
    else:
        return None
    text = (
        f"{measured.text}; reading the weights once takes {show(floor)} ms ({s.speed.bytes_per_token.text}): the step "
        f"is {show(ratio)} × that"
    )
    return Fact(text, ratio, measured.source)


def _beyond_launches(s: Situation) -> Fact | None:
    """A lone request's step that is longer than its memory traffic and any number of launches."""
    lone, layers = s.speed.lone_ms, total_layers(s)
    if lone is None or layers is None:
        return None
    launches_ms = _MOST_LAUNCH_MS_PER_LAYER * layers.number
    if lone.number <= launches_ms + (s.speed.lone_floor_ms or 0.0):
        return None
    text = f"{lone.text}: launches of {layers.text} take {show(launches_ms)} ms at the very most"
    return Fact(text, lone.number, lone.source)


def _strength(s: Situation, eager: Fact | None, sparse: Fact | None, slow: Fact | None) -> float | None:
    ratio = slow.number if slow is not None else None
    if sparse is not None:
        return 0.9 if eager is not None else 0.75
    if ratio is not None:
        return 0.87 if ratio >= _SLOWER_THAN_MEMORY else 0.3
    if s.busy is not None and s.busy.is_trusted and max(s.busy.shares) < 0.6:
        return 0.55
    return 0.4


def _power(s: Situation) -> Fact | None:
    loaded = [gpu for gpu in s.gpus if gpu.load.power_w]
    if not loaded:
        return None
    mean = sum(gpu.load.power_w.mean for gpu in loaded) / len(loaded)
    limit = loaded[0].power_limit_w
    of = f" of {show(limit)} W" if limit else ""
    return Fact(f"power under load {show(round(mean))} W{of} per GPU", mean, loaded[0].where)


def _gain(s: Situation) -> Gain:
    share = s.speed.lone_share
    if share is None:
        return Gain("not predictable from this evidence; 1.1 to 3 × is usual at small batches", None, None)
    high = max(_GRAPHED_SHARE / share, 1.0)
    return Gain(
        f"1.1 to {show(high)} × tokens/s for one request",
        min(1.1, high),
        high,
        assumes=f"with graphs a step reaches up to {_GRAPHED_SHARE:.0%} of the memory roofline "
        f"({show(1000 / (s.speed.lone_floor_ms or 1))} tokens/s for one request)",
    )

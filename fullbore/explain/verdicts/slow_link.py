"""slow-link: bytes per step over the link's bandwidth are a large part of the step.

A pipeline sends one hidden state per token and hop: kilobytes, hardly ever the bottleneck when decoding (vllm#6610:
doubling the network changed nothing). Tensor parallelism exchanges twice per layer and waits for the slowest link each
time (LLMKube#1423; a 4x RTX 3090 board report).
"""

from __future__ import annotations

import re

from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import hidden_size
from fullbore.explain.pcie import link_bytes_s
from fullbore.explain.physics import all_reduce_bytes_per_token, hop_bytes_per_token
from fullbore.explain.situation import Situation
from fullbore.explain.stage_layers import total_layers
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.plan.devices import device_named

_DEGRADED = 0.51  # of the bandwidth of its neighbours
_CRIPPLED = 0.26  # ... or of what the card can do: then each exchange also takes longer to get through
_SHARE = 0.2  # of a step, for a link to be its bottleneck
_EXCHANGE_S = 50e-6  # least time of one exchange through PCIe and host memory
_SOCKET_EXCHANGE_S = 150e-6  # ... and through the kernel's network stack on both ends
_TRACE_SHARE = 0.25
_EXCHANGE_SHARE = 0.35  # of a stage's work; fast links take 10 to 25 % of a small step
_MANY_EXCHANGES = 8  # in one step: two for each of a stage's layers
_TENSOR_SLOWER = 1.5
_LAYOUT_KEYS = ("layout", "tp", "pp", "tp_size", "pp_size", "gpus", "split")
_NETWORK_KEY = re.compile(r"(?:link|network|nic|ethernet|inter_?node|interconnect|bandwidth)", re.I)
_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*(?:([GM])(?:bit|b|bps|be|BASE|igE)\w*|([gm])(?:iga|ega)bit)", re.I)
_SOCKET_BYTES_S = 1.1e9  # NCCL over TCP on 10 Gbit/s, where the speed is not noted


def slow_link(s: Situation) -> Finding | None:
    if s.progress.is_frozen:
        return None
    return _degraded(s) or _sockets(s) or _trace(s) or _exchanges(s) or _tensor_against_pipeline(s)


def link_facts(s: Situation) -> list[Fact]:
    """What the links carry per step and how long that takes: shown also where it is not the bottleneck."""
    if s.P is None or s.P < 2:
        return []
    hidden, text = hidden_size(s)
    slowest = _slowest(s)
    if slowest is None:
        return []
    gpu, bandwidth = slowest
    requests = s.load.micro_batch.number if s.load.micro_batch is not None else float(max(s.load.known or 1, 1))
    size = hop_bytes_per_token(hidden) * requests
    time_ms = 1000 * size / bandwidth
    step = s.speed.step_ms or s.speed.lone_ms
    of = f", of a step of {show(step.number)} ms" if step is not None else ""
    line = (
        f"link: a hop carries {show(size / 1000)} kB per step ({text}, {show(requests)} requests); the slowest link, "
        f"of {gpu.label} ({_link(gpu)}), needs {show(time_ms)} ms for it{of}"
    )
    return [Fact(line, time_ms, gpu.where)]


def _degraded(s: Situation) -> Finding | None:
    """A link that under load runs below its neighbours, or far below what its card can do, and carries much."""
    gpu = _degraded_gpu(s)
    if gpu is None:
        return None
    bandwidth = _bandwidth(gpu)
    exchange_ms, how = _exchange_ms(s, bandwidth, _EXCHANGE_S if _is_crippled(s, gpu) else 0.0)
    step = _step(s)
    if exchange_ms is None:
        return None
    share = exchange_ms / step.number if step is not None else None
    if (share is not None and share < _SHARE) or (share is None and s.tp < 2):
        return None
    facts = [_link_fact(gpu), *[_link_fact(other) for other in s.gpus if other is not gpu and other.load.link_gen][:7]]
    facts.append(Fact(how, exchange_ms, gpu.where))
    facts += [fact for fact in (step, s.settings.fact("split_mode")) if fact is not None] + (
        s.busy.facts if s.busy else []
    )
    floor = s.speed.lone_floor_ms
    finding = Finding(
        "slow-link",
        0.8 if share is not None and share < 2 else 0.6,
        f"{gpu.label} is behind a slow link: {_link(gpu)} under load, about {show(bandwidth / 1e9)} GB/s. "
        + (
            f"With every layer divided over {s.tp} GPUs, all of them wait for it twice per layer."
            if s.tp > 1
            else "Every micro-batch has to cross it."
        ),
        evidence=facts,
        fix=_fix(s, gpu),
        gain=_gain(exchange_ms, step),
        verify=f"nvidia-smi --query-gpu=index,pcie.link.gen.current,pcie.link.width.current --format=csv -l 1 "
        f"under load: {gpu.label} like the others; then measure again",
        precedent="LLMKube#1423; vllm#6610 for the opposite case",
    )
    if floor is not None and step is not None and step.number > exchange_ms + floor:
        rest = step.number - exchange_ms - floor
        finding.unexplained = (
            f"of {show(step.number)} ms, exchanges take at least {show(exchange_ms)} ms and memory at least "
            f"{show(floor)} ms; the other {show(rest)} ms are waiting at each exchange, launches and host work, not "
            "told apart by this evidence"
        )
    return finding


def _degraded_gpu(s: Situation) -> Gpu | None:
    known = [gpu for gpu in s.gpus if _has_link(gpu)]
    if not known:
        return None
    slowest = min(known, key=_bandwidth)
    best = max(_bandwidth(gpu) for gpu in known)
    card = device_named(slowest.name)
    full = link_bytes_s(*card.pcie) if card is not None and card.pcie else best
    is_degraded = _bandwidth(slowest) <= _DEGRADED * best or _bandwidth(slowest) <= _CRIPPLED * full
    return slowest if is_degraded else None


def _is_crippled(s: Situation, gpu: Gpu) -> bool:
    best = max(_bandwidth(other) for other in s.gpus if _has_link(other))
    card = device_named(gpu.name)
    full = link_bytes_s(*card.pcie) if card is not None and card.pcie else best
    return _bandwidth(gpu) <= _CRIPPLED * max(best, full)


def _step(s: Situation) -> Fact | None:
    """Time of a step; when prompts are read, the time of one chunk."""
    row, chunk = s.load.row, s.settings.number("chunk")
    if s.load.is_prefill_bound and row is not None and row.input_tok_s and chunk is not None:
        time_ms = 1000 * chunk.number / row.input_tok_s
        return Fact(f"{show(time_ms)} ms per chunk at {show(row.input_tok_s)} input tokens/s", time_ms, row.source)
    if s.load.is_prefill_bound:
        return s.speed.ttft_ms
    return s.speed.step_ms or s.speed.lone_ms


def _has_link(gpu: Gpu) -> bool:
    """Is the link under load known, and is it what the GPU is connected by?"""
    card = device_named(gpu.name)
    is_meaningful = card is None or card.pcie is not None
    return is_meaningful and bool(gpu.load.link_gen) and bool(gpu.load.link_width) and _bandwidth(gpu) > 0


def _slowest(s: Situation) -> tuple[Gpu, float] | None:
    known = [gpu for gpu in s.gpus if _has_link(gpu)]
    if not known:
        return None
    gpu = min(known, key=_bandwidth)
    return gpu, _bandwidth(gpu)


def _bandwidth(gpu: Gpu) -> float:
    """Links slow down when idle: the fastest generation seen under load counts."""
    return link_bytes_s(gpu.load.link_gen.maximum, gpu.load.link_width.maximum)


def _link(gpu: Gpu) -> str:
    return f"PCIe gen {show(gpu.load.link_gen.maximum)} x{show(gpu.load.link_width.maximum)}"


def _link_fact(gpu: Gpu) -> Fact:
    return Fact(f"{gpu.label}: {_link(gpu)} under load, {show(_bandwidth(gpu) / 1e9)} GB/s", _bandwidth(gpu), gpu.where)


def _exchange_ms(s: Situation, bandwidth: float, each_s: float) -> tuple[float | None, str]:
    """What a step sends over the slowest link, as time; with the least time of each exchange where that counts."""
    hidden, text = hidden_size(s)
    requests = float(max(s.load.known or s.load.most or 1, 1))
    if s.load.is_prefill_bound and s.load.input_tokens is not None and s.tp > 1:
        requests = s.load.input_tokens.number  # tokens, all of them in one step
    if s.tp > 1:
        layers = total_layers(s)
        if layers is None:
            return None, ""
        size = all_reduce_bytes_per_token(int(layers.number), hidden, s.tp, 4) * requests
        count = 2 * int(layers.number)
        time_ms = 1000 * (size / bandwidth + count * each_s)
        least = f" and at least {show(each_s * 1e6)} µs each" if each_s else ""
        return time_ms, (
            f"{count} exchanges per token ({layers.text}, {text}), {show(size / 1e6)} MB over {show(bandwidth / 1e9)} "
            f"GB/s{least}: {show(time_ms)} ms"
        )
    if s.P is None or s.P < 2:
        return None, ""
    tokens = requests
    chunk = s.settings.number("chunk")
    if s.load.is_prefill_bound and chunk is not None:
        tokens = chunk.number
    size = hop_bytes_per_token(hidden) * tokens
    time_ms = 1000 * size / bandwidth
    return (
        time_ms,
        f"a hop carries {show(size / 1000)} kB for {show(tokens)} tokens ({text}): {show(time_ms)} ms over the "
        "slowest link",
    )


def _sockets(s: Situation) -> Finding | None:
    """Machines joined by TCP: bytes per step over what was noted, or over 10 Gbit/s."""
    mark = s.evidence.logs.marks.get("network-socket")
    rdma = s.evidence.logs.marks.get("network-rdma")
    rpc = s.settings.fact("rpc")
    noted = _noted_bandwidth(s)
    if (mark is None or rdma is not None) and rpc is None and noted is None:
        return None
    bandwidth = noted.number if noted is not None else _SOCKET_BYTES_S
    exchange_ms, how = _exchange_ms(s, bandwidth, _SOCKET_EXCHANGE_S)
    step = _step(s)
    if exchange_ms is None or step is None:
        return None
    share = exchange_ms / step.number
    if share < _SHARE:
        return None
    facts = [
        fact for fact in (mark.fact() if mark else None, rpc, noted, Fact(how, exchange_ms), step) if fact is not None
    ]
    interface = s.evidence.logs.marks.interface
    return Finding(
        "slow-link",
        0.8 if noted is not None else 0.65,
        f"Machines talk over TCP sockets{f' ({interface})' if interface else ''}; what a step sends takes {share:.0%} "
        "of it.",
        evidence=facts + (s.busy.facts if s.busy else []),
        fix=[
            "RDMA where the network has it: NCCL_IB_DISABLE=0, NCCL_SOCKET_IFNAME naming the fast interface, and "
            "NCCL_DEBUG=INFO to see NET/IB in the log",
            "pipeline stages instead of tensor ranks across machines: a hop carries one hidden state, not two "
            "exchanges per layer",
        ],
        gain=_gain(exchange_ms, step),
        verify="NCCL_DEBUG=INFO: `via NET/IB`; then measure again",
        precedent="LLMKube#1423",
    )


def _tensor_against_pipeline(s: Situation) -> Finding | None:
    """The same GPUs, tensor ranks much slower than stages: what differs is two exchanges per layer."""
    rows = [row for row in s.evidence.bench if row.gpus and (row.tp or row.pp)]
    for tensor in (row for row in rows if (row.tp or 1) > 1 and (row.pp or 1) == 1):
        for stages in (row for row in rows if (row.pp or 1) > 1 and (row.tp or 1) == 1 and row.gpus == tensor.gpus):
            same = {k: v for k, v in tensor.varied.items() if k not in _LAYOUT_KEYS}
            if same != {k: v for k, v in stages.varied.items() if k not in _LAYOUT_KEYS}:
                continue  # something else differs as well
            for metric in ("input_tok_s", "output_tok_s"):
                slow, fast = getattr(tensor, metric), getattr(stages, metric)
                is_lone = tensor.concurrency == stages.concurrency and (
                    tensor.concurrency == 1 or metric == "input_tok_s"
                )
                if slow and fast and is_lone and fast / slow >= _TENSOR_SLOWER:
                    return _tensor_finding(s, tensor, stages, metric, fast / slow)
    return None


def _tensor_finding(s: Situation, tensor: BenchRow, stages: BenchRow, metric: str, ratio: float) -> Finding:
    facts = [
        Fact(f"{row.layout}: {metric} {show(getattr(row, metric))}", getattr(row, metric), row.source)
        for row in (tensor, stages)
    ]
    return Finding(
        "slow-link",
        0.7,
        f"On the same {tensor.gpus} GPUs stages are {show(ratio)} × as fast as tensor ranks, which have all the "
        "arithmetic and memory of the cards and lose it in two exchanges per layer: the links are too slow for them.",
        evidence=[*facts, *[_link_fact(gpu) for gpu in s.gpus if _has_link(gpu)][:8]],
        fix=[
            f"the pipeline layout ({stages.layout}) on these links; or full-width links, peer access, NVLink for "
            "tensor ranks"
        ],
        gain=Gain(f"{show(ratio)} × in {metric}, measured", ratio, ratio, metric),
        verify="nvidia-smi topo -m and nvidia-smi topo -p2p r: how are these GPUs joined?",
        precedent="exllamav2#734, LLMKube#1423",
    )


def _noted_bandwidth(s: Situation) -> Fact | None:
    for path, note in s.evidence.notes.items():
        if not _NETWORK_KEY.search(path) or "memory" in path:
            continue
        numbers = numbers_in(note.value)
        if isinstance(note.value, int | float) and re.search(r"[gm]bit|[gm]bps|[gm]b_s", path, re.I) and numbers:
            is_bytes = re.search(r"[gm]b_s|[gm]bytes", path) and not re.search("bit|bps", path)
            scale = (1e9 if is_bytes else 0.125e9) / (1000 if re.search(r"mbit|mbps|mb_s", path, re.I) else 1)
            return Fact(f"{path}: {show(note.value)}", numbers[0] * scale, note.source)
        if isinstance(note.value, str) and (match := _BITS.search(note.value)) is not None:
            per_bit = 0.125e9 if (match[2] or match[3]).upper() == "G" else 0.125e6
            return Fact(f"{path}: {note.value}", float(match[1]) * per_bit, note.source)
    return None


def _trace(s: Situation) -> Finding | None:
    """Between one stage's end and the next one's start both wait: the data is on its way."""
    timeline = s.timeline
    if timeline is None or not timeline.is_complete or not timeline.hops_us or not timeline.period_us:
        return None
    hops, back = sum(timeline.hops_us), timeline.return_us or 0.0
    share = hops / timeline.period_us
    if share < _TRACE_SHARE or hops < back or timeline.concurrent_max > 1:
        return None
    slowest = timeline.hops_us.index(max(timeline.hops_us))
    fact = Fact(
        f"hops take {show(hops / 1000)} ms of a round of {show(timeline.period_us / 1000)} ms; the slowest, stage "
        f"{slowest} to {slowest + 1}, {show(timeline.hops_us[slowest] / 1000)} ms",
        share,
        s.evidence.traces[0].source,
    )
    return Finding(
        "slow-link",
        0.75,
        f"Hidden states are on their way for {share:.0%} of every round; while they are, neither end computes.",
        evidence=[fact, *(s.busy.facts if s.busy else [])],
        fix=[
            "check the link between those stages (topology: nvidia-smi topo -m), peer access, and NCCL_DEBUG=INFO "
            "for its transport"
        ],
        gain=Gain(
            f"up to {show(1 / (1 - share))} × tokens/s at this concurrency",
            1.0,
            1 / (1 - share),
            assumes="hops become negligible",
        ),
        verify="the gap between a stage's end and the next stage's start in traces of all ranks",
        precedent="",
    )


def _exchanges(s: Situation) -> Finding | None:
    """Traces: tensor ranks spend their step exchanging, also the one that waits least."""
    timeline = s.timeline
    if timeline is None or not timeline.is_complete or timeline.exchanges_per_step < _MANY_EXCHANGES:
        return None
    share = timeline.exchange_share
    if share < _EXCHANGE_SHARE:
        return None
    whose = "on the rank that waits least" if timeline.has_tensor_peers else "on the one rank of it that was traced"
    fact = Fact(
        f"{share:.0%} of a stage's work are exchanges between its tensor ranks, {whose}; "
        f"{show(round(timeline.exchanges_per_step))} exchanges per step",
        share,
        s.evidence.traces[0].source,
    )
    finding = Finding(
        "slow-link",
        0.75 if timeline.has_tensor_peers else 0.55,
        f"Tensor ranks spend {share:.0%} of their step exchanging what each has computed, twice per layer: the link "
        "between them is too slow for that.",
        evidence=[fact, *[_link_fact(gpu) for gpu in s.gpus if _has_link(gpu)][:8]],
        fix=[
            "fewer tensor ranks and more pipeline stages on these links; or peer access, full-width slots, NVLink "
            "(nvidia-smi topo -m, nvidia-smi topo -p2p r)"
        ],
        gain=Gain(
            f"up to {show(1 / (1 - share))} × tokens/s",
            1.0,
            1 / (1 - share),
            assumes="exchanges become negligible",
        ),
        verify="the all-reduce kernels' share of a step in new traces of all ranks",
        precedent="LLMKube#1423, exllamav2#734",
    )
    if not timeline.has_tensor_peers:
        finding.unexplained = "whether the exchanges are slow or wait for a slow peer: traces of all ranks tell"
    return finding


def _fix(s: Situation, gpu: Gpu) -> list[str]:
    lines = [
        f"give {gpu.label} a full link: another slot, a riser that holds its generation, BIOS link speed and "
        "bifurcation; check `lspci -vv` for LnkSta against LnkCap"
    ]
    if s.tp > 1:
        pipeline = {"llama.cpp": "--split-mode layer", "sglang": f"--pp-size {s.tp} --tp-size 1"}
        pipeline["vllm"] = f"--pipeline-parallel-size {s.tp} --tensor-parallel-size 1"
        lines.append(
            f"or a pipeline instead: {pipeline.get(s.engine or '', 'split by layers')}, which sends one hidden state "
            "per hop instead of two exchanges per layer"
        )
    return lines


def _gain(exchange_ms: float, step: Fact | None) -> Gain:
    if step is None or exchange_ms >= step.number:
        return Gain("not predictable from this evidence")
    factor = step.number / (step.number - 0.8 * exchange_ms)
    return Gain(
        f"at least {show(factor)} × tokens/s; more if the other waiting goes with it",
        1.0,
        factor,
        assumes="four fifths of the exchange time go away",
    )

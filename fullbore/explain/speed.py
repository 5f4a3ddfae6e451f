"""How fast it is, and how fast the hardware could be: measured steps beside the memory roofline."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, show
from fullbore.explain.load import Load, logged_tok_s, own_rows
from fullbore.explain.models import ModelSize
from fullbore.explain.physics import distinct_experts
from fullbore.explain.progress import Progress
from fullbore.explain.settings import Settings
from fullbore.plan.device_table import Device

_EXPERT_SHARE = 0.5  # of the bytes that one token reads in a mixture of experts, where nothing better is known
_FASTER = 1.3
_VERSION = re.compile(r"version|release|commit|build|driver|image", re.I)
_ANYTHING_GB = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s?GB\b")

_CACHE_WORTH_SAYING = 0.05  # of the weights

_MOST_ROWS = 256  # compared with each other


@dataclass
class Speed:
    """`lone_ms`: time per token of one request alone. `step_ms`: time in which every running request gets a token."""

    lone_ms: Fact | None = None
    step_ms: Fact | None = None
    tok_s: Fact | None = None
    ttft_ms: Fact | None = None
    was_faster: Fact | None = None  # tokens/s of an earlier time or version, well above the present
    slowdown: float | None = None  # that over the present
    bytes_per_token: Fact | None = None  # read from memory for one token of one request, over all stages
    bandwidth_bytes_s: Fact | None = None  # of one GPU
    model: ModelSize = field(default_factory=ModelSize)
    tp_size: int = 1

    def __post_init__(self) -> None:
        self.tp_size = max(self.tp_size, 1)

    @property
    def lone_floor_ms(self) -> float | None:
        """Least time per token of a lone request: its weights, read once, one stage after the other."""
        if self.bytes_per_token is None or self.bandwidth_bytes_s is None:
            return None
        return 1000 * self.bytes_per_token.number / (self.bandwidth_bytes_s.number * self.tp_size)

    @property
    def lone_share(self) -> float | None:
        """Share of the memory roofline that a lone request reaches."""
        floor = self.lone_floor_ms
        return floor / self.lone_ms.number if floor is not None and self.lone_ms is not None else None

    def pass_floor_ms(self, requests: float) -> float | None:
        """Least time of one micro-batch of so many requests through all stages."""
        floor = self.lone_floor_ms
        if floor is None:
            return None
        if not self.model.is_moe or not self.model.experts or not self.model.experts_per_token:
            return floor
        touched = distinct_experts(requests, self.model.experts, self.model.experts_per_token)
        return floor * (1 - _EXPERT_SHARE + _EXPERT_SHARE * touched / self.model.experts_per_token)


def read_speed(
    evidence: Evidence,
    settings: Settings,
    load: Load,
    progress: Progress,
    model: ModelSize,
    card: Device | None,
    tp_size: int,
    num_stages: int | None,
) -> Speed:
    speed = Speed(model=model, tp_size=tp_size)
    if not load.is_prefill_bound:
        speed.lone_ms = _lone_ms(evidence, load, progress, num_stages)
        speed.step_ms = _step_ms(evidence, load)
    speed.tok_s = _tok_s(evidence, load, progress)
    speed.was_faster, speed.slowdown = _was_faster(evidence, speed.tok_s) or _other_version(evidence) or (None, None)
    speed.ttft_ms = _ttft_ms(evidence, load)
    speed.bytes_per_token = _with_cache(_bytes_per_token(evidence, model), model, load)
    speed.bandwidth_bytes_s = _bandwidth(evidence, card)
    for name in ("lone_ms", "step_ms", "tok_s", "bytes_per_token", "bandwidth_bytes_s"):
        fact = getattr(speed, name)
        if fact is not None and not fact.number > 0:  # a damaged or senseless value
            setattr(speed, name, None)
    return speed


def _lone_ms(evidence: Evidence, load: Load, progress: Progress, num_stages: int | None) -> Fact | None:
    for row in own_rows(evidence, num_stages):
        if row.concurrency == 1 and row.step_ms:
            rate = f" ({show(row.output_tok_s)} tokens/s)" if row.output_tok_s else ""
            return Fact(f"{show(row.step_ms)} ms per token for one request{rate}", row.step_ms, row.source)
    llama = evidence.logs.llama
    if llama.decode_ms:
        return Fact(f"eval time {show(llama.decode_ms.median)} ms per token", llama.decode_ms.median, llama.decode_at)
    logged = logged_tok_s(evidence) or progress.tok_s
    if logged is not None and load.known == 1:
        return Fact(f"{logged.text} with one request running", 1000 / logged.number, logged.source)
    if load.most == 1:
        for path, note in evidence.notes.items():
            numbers = numbers_in(note.value)
            if re.search(r"(?:^|_)tok(?:ens)?_(?:per_)?s$", path) and numbers and not _is_other_setup(path):
                noted = sum(numbers[:2]) / len(numbers[:2])
                return Fact(f"{path}: {note.value}", 1000 / noted, note.source) if noted > 0 else None
    return None


def _is_other_setup(path: str) -> bool:
    return bool(
        re.search(r"single|one_gpu|1_?gpu|tp\d|prefill|input|prompt|last|before|expected|healthy|ideal", path, re.I)
    )


def _step_ms(evidence: Evidence, load: Load) -> Fact | None:
    row = load.row
    if row is not None and row.step_ms:
        return Fact(f"{show(row.step_ms)} ms per token at concurrency {row.concurrency}", row.step_ms, row.source)
    for dump in evidence.metrics:
        for name in (
            "sglang:inter_token_latency_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
        ):
            mean = dump.mean(name)
            if mean is not None and mean.value > 0:
                return Fact(mean.text, mean.value * 1000, mean.source)
    logged, running = logged_tok_s(evidence), load.in_flight
    if logged is None or running is None or running.number < 1:
        return None
    step_ms = 1000 * running.number / logged.number  # Little's law: each running request gets a token per step
    return Fact(
        f"{show(step_ms)} ms between a request's tokens ({running.text} ÷ {logged.text})", step_ms, logged.source
    )


def _tok_s(evidence: Evidence, load: Load, progress: Progress) -> Fact | None:
    row = load.row
    if row is not None and row.output_tok_s:
        return Fact(f"{show(row.output_tok_s)} tokens/s at concurrency {row.concurrency}", row.output_tok_s, row.source)
    return logged_tok_s(evidence) or progress.tok_s


def _was_faster(evidence: Evidence, now: Fact | None) -> tuple[Fact, float] | None:
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value)[:2]
        is_earlier = re.search(
            r"last_?(?:week|month|time|year)|yesterday|before|previous|earlier|\bwas\b|_was_", path, re.I
        )
        if now is not None and numbers and is_earlier and re.search(r"tok_?s|tps|tokens_per_s", path):
            mean = sum(numbers) / len(numbers)
            if mean > _FASTER * now.number:
                fact = Fact(f"{path}: {note.value}, now {show(now.value)} tokens/s", mean, note.source)
                return fact, mean / now.number
    return None


def _other_version(evidence: Evidence) -> tuple[Fact, float] | None:
    """Two measurements that differ in the version alone."""
    for fast in evidence.bench[:_MOST_ROWS]:
        for slow in evidence.bench[:_MOST_ROWS]:
            names = {name for name in (*fast.varied, *slow.varied) if fast.varied.get(name) != slow.varied.get(name)}
            if len(names) != 1 or not _VERSION.search(name := names.pop()) or fast.concurrency != slow.concurrency:
                continue
            rates = fast.decode_tok_s, slow.decode_tok_s
            if rates[0] and rates[1] and rates[0] > _FASTER * rates[1]:
                text = (
                    f"{show(rates[0])} tokens/s with {name} {fast.varied.get(name)}, {show(rates[1])} with "
                    f"{slow.varied.get(name)}"
                )
                return Fact(text, rates[0], fast.source), rates[0] / rates[1]
    return None


def _ttft_ms(evidence: Evidence, load: Load) -> Fact | None:
    if load.row is not None and load.row.ttft_ms:
        row = load.row
        return Fact(f"TTFT {show(row.ttft_ms)} ms at concurrency {row.concurrency}", row.ttft_ms, row.source)
    for dump in evidence.metrics:
        for name in ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
            mean = dump.mean(name)
            if mean is not None:
                return Fact(mean.text, mean.value * 1000, mean.source)
    return None


def _bytes_per_token(evidence: Evidence, model: ModelSize) -> Fact | None:
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value)
        if re.search(r"(?:read|active|weights?).*gb.*(?:per_token|per_step)|gb_(?:read_)?per_token", path) and numbers:
            return Fact(f"{path} = {show(numbers[0])}", numbers[0] * 1e9, note.source)
    total = _weights_gb(evidence)
    if total is not None and model.parameters_b and (model.active_b is not None or not model.is_moe):
        share = (model.active_b or model.parameters_b) / model.parameters_b
        text = total.text if share == 1 else f"{total.text}, of which one token reads about {share:.0%}"
        return Fact(text, max(total.number * share, model.active_gb or 0.0) * 1e9, total.source)
    if model.active_gb is not None:
        return Fact(f"{show(model.active_gb)} GB read for one token (model table)", model.active_gb * 1e9)
    if model.active_b is not None and model.bytes_per_parameter is not None:
        size = model.active_b * model.bytes_per_parameter
        how = "16-bit weights assumed" if model.is_assumed_16_bit else "from the model's name"
        return Fact(f"about {show(size)} GB read for one token ({how})", size * 1e9)
    return None


def _with_cache(weights: Fact | None, model: ModelSize, load: Load) -> Fact | None:
    """The weights, and the cache of a long context, which every token reads as well."""
    if weights is None or model.kv_bytes_per_token is None or load.input_tokens is None:
        return weights
    tokens = load.input_tokens.number + (load.output_tokens.number / 2 if load.output_tokens is not None else 0.0)
    cache_bytes = tokens * model.kv_bytes_per_token
    if cache_bytes < _CACHE_WORTH_SAYING * weights.number:
        return weights
    text = f"{weights.text}, and {show(cache_bytes / 1e9)} GB of KV cache ({show(tokens)} tokens)"
    return Fact(text, weights.number + cache_bytes, weights.source)


def _weights_gb(evidence: Evidence) -> Fact | None:
    """All weights: noted, or what the stages loaded."""
    for path, note in evidence.notes.items():
        if re.search(r"^(?:model|weights|quant)", path):
            match = _ANYTHING_GB.search(str(note.value)) if isinstance(note.value, str) else None
            if match is not None:
                return Fact(f"{match[0]} of weights", float(match[1]), note.source)
            if isinstance(note.value, int | float) and re.search(r"(?:weights|model)\w*_gb$", path):
                return Fact(f"{path} = {show(note.value)}", float(note.value), note.source)
    ranks = evidence.logs.sglang.ranks.values()
    loaded = [rank.weights_gb for rank in ranks if rank.weights_gb is not None]
    if loaded and len(loaded) == len(ranks):
        total = sum(float(reading.value) for reading in loaded)
        return Fact(f"{show(total)} GB of weights loaded by {len(loaded)} ranks", total, loaded[0].source)
    return None


def _bandwidth(evidence: Evidence, card: Device | None) -> Fact | None:
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value)
        is_memory = re.search(r"(?:memory|hbm|vram|dram|gpu).*bandwidth.*gb|^bandwidth_gb_s", path)
        if is_memory and numbers and not re.search(r"link|net|pcie", path):
            return Fact(f"{path} = {show(numbers[0])}", numbers[0] * 1e9, note.source)
    if card is not None:
        return Fact(f"{show(card.bandwidth_gb_s)} GB/s (data sheet of {card.name.upper()})", card.bandwidth_bytes_s)
    return None

"""Which layers are on which stage: as set, as printed, or inferred from what the stages loaded."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.explain.facts import Fact, show
from fullbore.explain.physics import default_partition, old_default_partition
from fullbore.explain.situation import Situation

_EVEN_KV = 0.02  # KV pools closer than this hold the same number of layers


def total_layers(s: Situation) -> Fact | None:
    """Layers of the model."""
    noted = s.settings.count("layers")
    if noted is not None and noted.number < 10_000:
        return noted
    given = given_layers(s)
    if given is not None:
        return Fact(f"{show(sum(given.value))} layers in all", sum(given.value), given.source)
    if s.model.layers is not None and s.model_fact is not None:
        return Fact(f"{s.model.layers} layers ({s.model_fact.text})", s.model.layers, s.model_fact.source)
    return None


def given_layers(s: Situation) -> Fact | None:
    """Layers per stage where the evidence states them, at least one each."""
    given = _given(s)
    return given if given is not None and min(given.value) >= 1 else None


def _given(s: Situation) -> Fact | None:
    for info in s.evidence.server_infos:
        if info.stage_layers and len(info.stage_layers) == s.P:
            return Fact(f"layers per stage {_join(info.stage_layers)}", info.stage_layers, info.source)
    for account in s.evidence.accounts:
        if account.layers and len(account.layers) == s.P:
            return Fact(f"layers per stage {_join(account.layers)}", account.layers, account.source)
    partition = s.settings.numbers("partition")
    if partition is not None and len(partition.value) == s.P:
        return Fact(partition.text, [int(n) for n in partition.value], partition.source)
    printed = s.evidence.logs.vllm.partition
    if printed is not None and len(printed.value) == s.P:
        return printed.fact(f"layers per stage {_join(list(printed.value))}")
    for path, note in s.evidence.notes.items():
        if "layers" in path and isinstance(note.value, list) and len(note.value) == s.P:
            return Fact(f"{path} = {_join(note.value)}", [int(n) for n in note.value], note.source)
    return None


def stage_layers(s: Situation) -> Fact | None:
    """Layers per stage: stated, or inferred from KV pools (equal bytes per layer), or the engine's default."""
    return given_layers(s) or _from_kv(s) or _default(s)


def stage_weights_gb(s: Situation) -> list[Fact]:
    """What each stage loaded, where all stages say so."""
    sglang = s.evidence.logs.sglang.ranks
    loaded = {rank.rank: rank.weights_gb for rank in sglang.values() if rank.weights_gb is not None}
    loaded = loaded or dict(s.evidence.logs.vllm.weights_gib)
    if s.P is None or sorted(loaded) != list(range(s.P)):
        return []
    return [reading.fact(f"stage {n} loaded {show(reading.value)} GB") for n, reading in sorted(loaded.items())]


def _from_kv(s: Situation) -> Fact | None:
    """Layers in proportion to the KV pool of each stage, when all pools hold the same number of tokens."""
    total = total_layers(s)
    ranks = s.evidence.logs.sglang.ranks
    pools = [
        ranks[n]
        for n in range(s.P or 0)
        if n in ranks and ranks[n].kv_gb is not None and ranks[n].kv_tokens is not None
    ]
    if total is None or s.P is None or len(pools) != s.P:
        return None
    sizes = [float(rank.kv_gb.value) for rank in pools if rank.kv_gb is not None]
    if len({rank.kv_tokens.value for rank in pools if rank.kv_tokens is not None}) != 1 or min(sizes) <= 0:
        return None
    if max(sizes) / min(sizes) - 1 < _EVEN_KV and total.number % s.P:
        return None  # too coarse to tell 7 layers from 8
    layers = [round(total.number * size / sum(sizes)) for size in sizes]
    if sum(layers) != total.number:
        layers[sizes.index(max(sizes))] += int(total.number) - sum(layers)
    text = f"layers per stage {_join(layers)} (from KV pools of {', '.join(show(size) for size in sizes)} GB)"
    return Fact(text, layers, pools[-1].kv_gb.source if pools[-1].kv_gb else None)


def _default(s: Situation) -> Fact | None:
    total = total_layers(s)
    if total is None or s.P is None or not 2 <= s.P <= total.number or s.engine not in ("sglang", "vllm"):
        return None
    layers, release = default_partition(s.engine, int(total.number), s.P), f"{s.engine}'s default"
    older = old_default_partition(int(total.number), s.P)
    observed = _last_over_others(s)
    if observed is not None and abs(_ratio(older) - observed) < abs(_ratio(layers) - observed):
        layers, release = older, f"the default of older releases of {s.engine}, which the sizes of the stages fit"
    return Fact(f"layers per stage {_join(layers)} ({release} for {show(total.number)})", layers, total.source)


def _last_over_others(s: Situation) -> float | None:
    """The last stage against the mean of the others: by weights, memory in use, or time at work."""
    weights = [fact.number for fact in stage_weights_gb(s)]
    memory = [sum(gpu.memory_used_mib or 0.0 for gpu in stage) for stage in s.stages]
    busy = s.busy.shares if s.busy is not None and s.busy.is_trusted else []
    for sizes in (weights, memory, busy):
        if len(sizes) == s.P and min(sizes) > 0:
            return _ratio(sizes)
    return None


def _ratio(sizes: Sequence[float]) -> float:
    return sizes[-1] / (sum(sizes[:-1]) / (len(sizes) - 1))


def _join(layers: list[int]) -> str:
    return ",".join(str(n) for n in layers)

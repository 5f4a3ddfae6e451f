"""What the evidence says about one deployment, put together once so that every rule sees the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from fullbore.explain import models
from fullbore.explain.busy import Busy, by_stage, read_busy
from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, show
from fullbore.explain.load import Load, read_load
from fullbore.explain.progress import Progress, read_progress
from fullbore.explain.serving_gpus import gpus_at_work, gpus_with_model, listed_gpus
from fullbore.explain.settings import Settings
from fullbore.explain.speed import Speed, read_speed
from fullbore.explain.trace_timeline import Timeline, build_timeline
from fullbore.plan.device_table import Device
from fullbore.plan.devices import device_named

# Engines that cut a model by layers over the GPUs they find unless told otherwise.
LAYER_SPLIT_ENGINES = ("ollama", "llama.cpp", "transformers", "exllama")
_TENSOR_SPLIT_MODES = ("row", "tensor", "graph", "attn")
_LOAD_AS_PUBLISHED = ("sglang", "vllm", "fullbore", "transformers", "tensorrt-llm")
_MOST_RANKS = 4096
_CARD_NOTES = ("gpu", "gpu_name", "card", "hardware", "device", "gpus")


@dataclass
class Situation:
    """The deployment. What is not known is None; everything known says where from."""

    evidence: Evidence
    settings: Settings
    engine: str | None = None
    engine_fact: Fact | None = None
    version: Fact | None = None
    pp: Fact | None = None
    tp: int = 1
    gpus: list[Gpu] = field(default_factory=list)  # those that hold the model
    stages: list[list[Gpu]] = field(default_factory=list)
    card: Device | None = None  # the slowest
    card_fact: Fact | None = None
    model: models.ModelSize = field(default_factory=models.ModelSize)
    model_fact: Fact | None = None
    load: Load = field(default_factory=Load)
    progress: Progress = field(default_factory=Progress)
    timeline: Timeline | None = None
    busy: Busy | None = None
    speed: Speed = field(default_factory=Speed)

    @property
    def P(self) -> int | None:  # noqa: N802 - the field's name for it
        """Pipeline stages."""
        return int(self.pp.number) if self.pp is not None else None

    @property
    def device(self) -> str | None:
        """Where the stages compute, as far as the engine says so: cpu, cuda, cuda:0."""
        known = [account.device for account in self.evidence.accounts if account.device is not None]
        if known:
            return known[0]
        device = self.settings.reading("device")
        return str(device.value) if device is not None and str(device.value) != "auto" else None

    @property
    def is_cpu(self) -> bool:
        ranks = self.evidence.logs.sglang.ranks.values()
        return self.device == "cpu" or any(rank.is_cpu for rank in ranks)

    @property
    def is_saturated(self) -> bool:
        """Requests wait, or there are at least two for each stage."""
        waiting = self.load.waiting is not None and self.load.waiting.number > 0
        return waiting or (self.P is not None and self.load.known is not None and self.load.known >= 2 * self.P)

    @property
    def has_load(self) -> bool:
        """Anything in the evidence was taken while requests were served."""
        logs = self.evidence.logs
        return bool(
            any(gpu.has_load for gpu in self.gpus)
            or self.timeline
            or self.evidence.accounts
            or self.evidence.bench
            or logs.vllm.running
            or logs.sglang.ranks
            or logs.llama.decode_ms
        )


def understand(evidence: Evidence) -> Situation:
    """Facts from readings. Pure."""
    settings = Settings(evidence)
    s = Situation(evidence, settings)
    s.engine, s.engine_fact = _engine(evidence)
    s.version = _version(evidence)
    s.gpus = gpus_with_model(evidence, settings)
    s.tp, s.pp = _parallelism(s)
    if s.pp is not None and not 1 <= s.pp.number <= _MOST_RANKS:
        s.pp = None
    s.gpus = gpus_at_work(s.gpus, (s.P or 0) * s.tp, settings.replicas)
    s.stages = by_stage(s.gpus, s.P, s.tp)
    s.card, s.card_fact = _card(s)
    s.model, s.model_fact = _model(s)
    s.load = read_load(evidence, settings, s.P)
    s.progress = read_progress(evidence)
    s.timeline = build_timeline(evidence.traces, s.tp, s.P)
    if s.pp is None and s.timeline is not None:
        s.pp = Fact(f"{s.timeline.num_stages} ranks in the traces", s.timeline.num_stages, evidence.traces[0].source)
    if s.load.in_flight is None and s.timeline is not None and s.timeline.batch_size is not None:
        s.load.in_flight = _in_flight_of_traces(s.timeline, evidence)
    s.busy = read_busy(evidence, s.timeline, s.stages, s.P)
    s.speed = read_speed(evidence, settings, s.load, s.progress, s.model, s.card, s.tp, s.P)
    return s


def _in_flight_of_traces(timeline: Timeline, evidence: Evidence) -> Fact | None:
    """Requests of one batch times the micro-batches that travel at once."""
    if not timeline.is_complete or not timeline.batch_size or not timeline.concurrent_mean:
        return None
    count = max(round(timeline.concurrent_mean), 1) * timeline.batch_size
    text = f"about {show(count)} requests in flight: batches of {show(timeline.batch_size)} in the traces"
    return Fact(text, count, evidence.traces[0].source)


def _engine(evidence: Evidence) -> tuple[str | None, Fact | None]:
    for info in evidence.server_infos:
        return info.engine, Fact(f"/server_info of {info.engine}", info.engine, info.source)
    for launch in evidence.launches:
        if launch.engine != "mpi":
            return launch.engine, Fact(f"launch command of {launch.engine}", launch.engine, launch.source)
    logs = evidence.logs
    if logs.sglang.ranks:
        rank = next(iter(logs.sglang.ranks.values()))
        return "sglang", Fact("log lines of sglang", "sglang", rank.source)
    if logs.vllm.source or logs.vllm.version or logs.vllm.kv_refusal:
        return "vllm", Fact("log lines of vllm", "vllm", logs.vllm.source)
    for dump in evidence.metrics:
        if dump.engine is not None:
            return dump.engine, None
    if evidence.account is not None:
        return "fullbore", Fact("an account by fullbore", "fullbore", evidence.account.source)
    if logs.llama.decode_ms or logs.llama.buffers_mib:
        return "llama.cpp", None
    note = evidence.notes.get("engine")
    if note is not None and isinstance(note.value, str):
        return note.value.lower().split()[0], note.fact()
    return None, None


def _version(evidence: Evidence) -> Fact | None:
    for info in evidence.server_infos:
        if info.version:
            return Fact(f"version {info.version}", info.version, info.source)
    if evidence.logs.vllm.version is not None:
        return evidence.logs.vllm.version.fact(f"version {evidence.logs.vllm.version.value}")
    for name in ("version", "engine_version"):
        note = evidence.notes.get(name)
        if note is not None:
            return Fact(f"version {note.value}", str(note.value), note.source)
    return None


def gpu_count(s: Situation) -> int | None:
    """GPUs in use: noted, seen with a share of the model, named in a list of devices, or noted by name."""
    note = s.evidence.notes.get("gpus") or s.evidence.notes.get("num_gpus") or s.evidence.notes.get("n_gpu")
    numbers = numbers_in(note.value) if note is not None else []
    if len(numbers) == 1 and 0 < numbers[0] < 10_000:
        return int(numbers[0])
    return len(s.gpus) or len(listed_gpus(s.settings) or []) or len(_noted_cards(s)) or None


def _noted_cards(s: Situation) -> list[str]:
    """What a user calls the GPUs, one by one: "2x RTX 3090 + RTX 3060" -> three."""
    note = next((s.evidence.notes[name] for name in _CARD_NOTES if name in s.evidence.notes), None)
    if note is None or not isinstance(note.value, str):
        return []
    cards = []
    for part in re.split(r"\s*\+\s*|,", note.value):
        several = re.match(r"\s*(\d{1,2})\s*[x×]\s*(.+)", part)
        name = several[2] if several else part
        if device_named(name) is not None:
            cards += [name] * (int(several[1]) if several else 1)
    return cards if len(cards) > 1 else []  # one name alone is a kind, not a number


def _parallelism(s: Situation) -> tuple[int, Fact | None]:
    """(tensor-parallel ranks of a stage, pipeline stages)."""
    tp = s.settings.count("tp_size")
    tp_size = int(tp.number) if tp is not None and tp.number <= _MOST_RANKS else 1
    pp = s.settings.count("pp_size")
    if pp is not None:
        return tp_size, pp
    seen = _stages_seen(s)
    if seen is not None:
        return tp_size, seen
    count = gpu_count(s)
    if s.engine in LAYER_SPLIT_ENGINES and count:
        return _layer_split(s, count)
    for name in ("stages", "num_stages", "pipeline_stages"):
        note = s.evidence.notes.get(name)
        if note is not None and isinstance(note.value, int):
            return tp_size, note.fact()
    if count == 1 and tp is None:
        return 1, Fact("one GPU: no pipeline", 1, s.gpus[0].source if s.gpus else None)
    if s.engine in ("sglang", "vllm", "fullbore") and len(s.evidence.launches) == 1:
        launch = s.evidence.launches[0]
        return tp_size, Fact("no pipeline size on the command line: one stage", 1, launch.source)
    return _parallelism_of_traces(s) if tp is None else (tp_size, None)


def _parallelism_of_traces(s: Situation) -> tuple[int, Fact | None]:
    """Ranks that exchange and never send or receive are tensor ranks of one stage."""
    traces = s.evidence.traces
    world = max((rank.world_size or 0 for rank in traces), default=0)
    is_tensor = all(rank.exchange_kernels and not rank.point_to_point_kernels for rank in traces)
    if not 2 <= world <= _MOST_RANKS or not is_tensor:
        return 1, None
    text = f"the {world} ranks in the traces exchange and never send: tensor ranks of one stage"
    return world, Fact(text, 1, traces[0].source)


def _stages_seen(s: Situation) -> Fact | None:
    """Stages that show in logs, metrics or accounts."""
    log = s.evidence.logs.sglang
    if log.has_pp_labels:
        last = max((rank for rank in log.ranks if rank < _MOST_RANKS), default=0)
        return Fact(f"ranks up to PP{last} in the log", last + 1)
    for dump in s.evidence.metrics:
        for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "fullbore_stage_busy_seconds_total"):
            stages = dump.by_stage(name)
            if stages:
                return Fact(f"{max(stages) + 1} stages in the metrics", max(stages) + 1)
    account = s.evidence.account
    if account is not None:
        return Fact(f"{len(account.stages)} stages in the account", len(account.stages), account.source)
    return None


def _layer_split(s: Situation, count: int) -> tuple[int, Fact | None]:
    mode = s.settings.reading("split_mode")
    source = s.engine_fact.source if s.engine_fact else None
    if mode is not None and any(word in str(mode.value).lower() for word in _TENSOR_SPLIT_MODES):
        return count, Fact(
            f"{mode.name} {mode.value}: every layer is divided over {count} GPUs, no pipeline", 1, mode.source
        )
    if mode is not None and str(mode.value).lower() == "none":
        return 1, Fact(f"{mode.name} none: one GPU", 1, mode.source)
    if s.settings.is_on("tensor_parallel_mode"):
        return count, Fact("tensor parallel: no pipeline", 1, source)
    return 1, Fact(f"{s.engine} cuts the layers over {count} GPUs: {count} stages", count, source)


def _card(s: Situation) -> tuple[Device | None, Fact | None]:
    """The slowest of the cards, which a pipeline's pace depends on."""
    found = [(card, gpu.name, gpu.source) for gpu in s.gpus if (card := device_named(gpu.name)) is not None]
    for path, note in s.evidence.notes.items():
        if path in _CARD_NOTES and isinstance(note.value, str):
            for part in re.split(r"\s*\+\s*|,", note.value):
                if (card := device_named(part)) is not None:
                    found.append((card, part, note.source))
    traced = [(device_named(rank.device), rank) for rank in s.evidence.traces]
    found += [(card, rank.device, rank.source) for card, rank in traced if card is not None]
    if not found:
        return None, None
    card, name, source = min(found, key=lambda entry: entry[0].bandwidth_gb_s)
    return card, Fact(
        f"{name}: {show(card.bandwidth_gb_s)} GB/s memory, {show(card.boost_mhz)} MHz", card.bandwidth_gb_s, source
    )


def _model(s: Situation) -> tuple[models.ModelSize, Fact | None]:
    """From the noted name, which is written for people, before the folder's."""
    candidates = [s.evidence.notes.get("model"), s.evidence.notes.get("model_name"), s.settings.reading("model")]
    best, fact = models.ModelSize(), None
    for candidate in candidates:
        if candidate is None or not isinstance(candidate.value, str):
            continue
        size = models.find_model(candidate.value.rstrip("/").rsplit("/", 1)[-1])
        if fact is None or (best.parameters_b is None and size.parameters_b is not None):
            best, fact = size, candidate.fact(f"model {candidate.value}")
        elif best.bytes_per_parameter is None and size.bytes_per_parameter is not None:
            best = replace(best, bytes_per_parameter=size.bytes_per_parameter)
    return _with_precision(s, best), fact


def _with_precision(s: Situation, size: models.ModelSize) -> models.ModelSize:
    """Engines that load published checkpoints: 16 bit, unless a name, a setting or the cards' memory says otherwise."""
    if size.bytes_per_parameter is not None or s.engine not in _LOAD_AS_PUBLISHED or size.parameters_b is None:
        return size
    if s.settings.reading("quantization") is not None:
        return size
    memory_gb = sum(gpu.memory_total_mib or 0.0 for gpu in s.gpus) * 2**20 / 1e9
    if not memory_gb and s.card is not None and s.P is not None:
        memory_gb = s.card.memory_bytes / 1e9 * s.P * s.tp
    if memory_gb and 2 * size.parameters_b > memory_gb:
        return size
    return replace(size, bytes_per_parameter=2.0, is_assumed_16_bit=True)

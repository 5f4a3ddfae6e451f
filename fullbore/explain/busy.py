"""How busy each stage is, from the best evidence there is, and whether that evidence can be trusted.

Utilisation from the driver says that a kernel is resident, not that it computes: a spinning receive reads 100 %. Power
tells them apart. Low utilisation can be trusted: nothing inflates idleness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, Source, show
from fullbore.explain.progress import seconds_between_dumps
from fullbore.explain.trace_timeline import Timeline
from fullbore.plan.devices import device_named

HIGH_UTILISATION = 0.7
LOW_POWER_SHARE = 0.4  # of the limit: a GPU that computes or reads memory flat out draws more
_LOW_OF_BUSY_POWER = 0.67  # of what the card draws when it decodes
_IDLE_FACTOR = 1.35


@dataclass
class Busy:
    """`shares`: by stage, 0 to 1. `kind` names the evidence."""

    shares: list[float]
    kind: str
    facts: list[Fact] = field(default_factory=list)
    is_trusted: bool = True  # False: high utilisation at low power, so probably receives that spin

    @property
    def total(self) -> float:
        """Stages busy at once, on average."""
        return sum(self.shares)

    @property
    def spread(self) -> float:
        """Busiest over mean; 1 when even."""
        mean = self.total / len(self.shares)
        return max(self.shares) / mean if mean > 0 else 1.0


def by_stage(gpus: list[Gpu], num_stages: int | None, tp_size: int) -> list[list[Gpu]]:
    """GPUs of each stage, in the order of machines and indices; [] where the numbers do not fit."""
    if not num_stages or len(gpus) != num_stages * tp_size:
        return []
    return [gpus[stage * tp_size : (stage + 1) * tp_size] for stage in range(num_stages)]


def read_busy(
    evidence: Evidence, timeline: Timeline | None, stages: list[list[Gpu]], num_stages: int | None
) -> Busy | None:
    """The first that is there: fullbore's account, traces, noted stage times, the engine's counters, utilisation."""
    account = evidence.account
    if account is not None:
        shares = account.busy()
        texts = [f"stage {n} works {share:.0%} of the time" for n, share in enumerate(shares)]
        return Busy(shares, "account", [Fact(text, None, account.source) for text in texts])
    if timeline is not None and timeline.is_complete and timeline.busy:
        facts = [
            Fact(f"stage {n} computes {share:.0%} of the time", share, timeline.ranks[n].source)
            for n, share in enumerate(timeline.busy)
        ]
        return Busy(timeline.busy, "trace", facts)
    return _from_notes(evidence, num_stages) or _from_metrics(evidence, num_stages) or _from_utilisation(stages)


def _from_notes(evidence: Evidence, num_stages: int | None) -> Busy | None:
    times, period = stage_times_ms(evidence, num_stages), period_ms(evidence)
    if times is None or period is None or not period.value:
        return None
    shares = [min(time / period.value, 1.0) for time in times.value]
    if min(shares) <= 0:
        return None
    return Busy(shares, "stage times", [times, period])


def _from_metrics(evidence: Evidence, num_stages: int | None) -> Busy | None:
    """Busy seconds of each stage between two dumps, or SGLang's occupancy of the device."""
    dumps = sorted(evidence.metrics, key=lambda dump: dump.file)
    if not dumps:
        return None
    seconds = seconds_between_dumps(evidence)
    for name in ("fullbore_stage_busy_seconds_total", "sglang:forward_execution_seconds_total"):
        before, after = dumps[0].by_stage(name), dumps[-1].by_stage(name)
        if len(dumps) > 1 and seconds and after and sorted(before) == sorted(after) == list(range(len(after))):
            shares = [min(max(after[n][0] - before[n][0], 0.0) / seconds, 1.0) for n in range(len(after))]
            if (num_stages is None or len(shares) == num_stages) and max(shares) > 0:
                facts = [
                    Fact(f"stage {n} works {share:.0%} of the time", share, Source(dumps[-1].file, after[n][1]))
                    for n, share in enumerate(shares)
                ]
                return Busy(shares, "engine counters", facts)
    occupancy = dumps[-1].by_stage("sglang:fwd_occupancy")
    if occupancy and (num_stages is None or len(occupancy) == num_stages) and max(v for v, _ in occupancy.values()) > 0:
        scale = 100 if max(v for v, _ in occupancy.values()) > 1.5 else 1
        facts = [
            Fact(f"sglang:fwd_occupancy of PP{stage} = {show(value)}", value, Source(dumps[-1].file, line))
            for stage, (value, line) in sorted(occupancy.items())
        ]
        return Busy([value / scale for _, (value, _) in sorted(occupancy.items())], "engine counters", facts)
    return None


def _from_utilisation(stages: list[list[Gpu]]) -> Busy | None:
    if not stages or not all(gpu.has_load for stage in stages for gpu in stage):
        return None
    shares, facts = [], []
    for number, stage in enumerate(stages):
        shares.append(sum(gpu.load.utilisation_percent.mean for gpu in stage) / len(stage) / 100)
        names = " and ".join(gpu.label for gpu in stage[:2]) + (" …" if len(stage) > 2 else "")
        power = stage[0].load.power_w
        watts = f", {show(round(power.mean))} W" if power else ""
        facts.append(Fact(f"stage {number} ({names}): {shares[-1]:.0%} utilised{watts}", shares[-1], stage[0].where))
    suspects = [gpu for stage in stages for gpu in stage if is_spin_suspect(gpu)]
    return Busy(shares, "utilisation", facts, is_trusted=not suspects)


def stage_times_ms(evidence: Evidence, num_stages: int | None) -> Fact | None:
    """Noted compute time of each stage: a list with one number per stage."""
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value) if isinstance(note.value, list) else []
        is_stage_list = len(numbers) > 1 and (num_stages is None or len(numbers) == num_stages)
        words = path.lower()
        if (
            is_stage_list
            and ("ms" in words or words.endswith("_s"))
            and not _is_period(words)
            and not _is_transfer(words)
        ):
            return Fact(f"{path} = {', '.join(show(n) for n in numbers)}", numbers, note.source)
    return None


def period_ms(evidence: Evidence) -> Fact | None:
    """Noted time from one step of a stage to the next."""
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value)
        if _is_period(path.lower()) and numbers and ("ms" in path.lower() or path.lower().endswith("_s")):
            mean = sum(numbers) / len(numbers)
            return Fact(f"{path} = {', '.join(show(n) for n in numbers)}", mean, note.source)
    return None


def _is_period(words: str) -> bool:
    return any(word in words for word in ("period", "cycle", "iteration", "step_ms", "step_time", "loop"))


def _is_transfer(words: str) -> bool:
    return any(word in words for word in ("hop", "transfer", "send", "recv", "receive", "p2p", "metadata", "control"))


def is_low_power(gpu: Gpu) -> bool | None:
    """Does the GPU draw too little, under load, to be computing? None: not known."""
    if not gpu.load.power_w:
        return None
    power = gpu.load.power_w.mean
    card = device_named(gpu.name)
    if card is not None and card.decode_power_w is not None:
        return power < _LOW_OF_BUSY_POWER * card.decode_power_w
    limit = gpu.power_limit_w or (card.power_w if card else None)
    if limit:
        return power < LOW_POWER_SHARE * limit
    if gpu.idle.power_w:
        return power < _IDLE_FACTOR * gpu.idle.power_w.mean
    return None


def is_spin_suspect(gpu: Gpu) -> bool:
    """Utilised but cool."""
    if not gpu.has_load or gpu.load.utilisation_percent.mean / 100 < HIGH_UTILISATION:
        return False
    return is_low_power(gpu) is True

"""What one GPU showed over time, under load and idle apart. Filled by the readers of nvidia-smi's formats."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fullbore.explain.facts import Source
from fullbore.explain.series import Series

LOAD_UTILISATION_PERCENT = 3.0  # a moment counts as under load when any GPU of the machine is busier than this

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?")


@dataclass
class Samples:
    """Series of one GPU in one state (under load, or idle)."""

    utilisation_percent: Series = field(default_factory=Series)
    power_w: Series = field(default_factory=Series)
    sm_clock_mhz: Series = field(default_factory=Series)
    temperature_c: Series = field(default_factory=Series)
    link_gen: Series = field(default_factory=Series)
    link_width: Series = field(default_factory=Series)


@dataclass
class Gpu:
    """One GPU of one machine. `source` is where it first occurs."""

    machine: str
    index: int
    source: Source
    name: str | None = None
    load: Samples = field(default_factory=Samples)
    idle: Samples = field(default_factory=Samples)
    first_load: Source | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    max_link_gen: float | None = None
    max_link_width: float | None = None
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    throttle_reasons: dict[str, Source] = field(default_factory=dict)
    has_many_machines: bool = False  # the evidence is of several, so that the index alone names no GPU

    @property
    def label(self) -> str:
        return f"GPU {self.index} of {self.machine}" if self.has_many_machines else f"GPU {self.index}"

    @property
    def has_load(self) -> bool:
        return bool(self.load.utilisation_percent)

    @property
    def where(self) -> Source:
        return self.first_load or self.source


@dataclass
class GpuSample:
    """One GPU at one moment, as read from one line; None where the driver has no value."""

    index: int
    source: Source
    name: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    throttle_reasons: list[str] = field(default_factory=list)


_SERIES = ("utilisation_percent", "power_w", "sm_clock_mhz", "temperature_c", "link_gen", "link_width")
_CONSTANTS = (
    "power_limit_w",
    "default_power_limit_w",
    "max_sm_clock_mhz",
    "max_link_gen",
    "max_link_width",
    "memory_used_mib",
    "memory_total_mib",
)


class Machine:
    """Collects samples of one machine moment by moment, so that one busy GPU marks all of them as under load."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gpus: dict[int, Gpu] = {}
        self._moment: dict[int, GpuSample] = {}

    def add(self, sample: GpuSample) -> None:
        if sample.index in self._moment:
            self.flush()
        self._moment[sample.index] = sample

    def flush(self) -> None:
        """Ends the current moment."""
        busiest = max((s.values.get("utilisation_percent", 0.0) for s in self._moment.values()), default=0.0)
        for sample in self._moment.values():
            self._take(sample, is_load=busiest > LOAD_UTILISATION_PERCENT)
        self._moment = {}

    def _take(self, sample: GpuSample, *, is_load: bool) -> None:
        gpu = self.gpus.get(sample.index)
        if gpu is None:
            gpu = self.gpus[sample.index] = Gpu(self.name, sample.index, sample.source)
        gpu.name = gpu.name or sample.name
        samples = gpu.load if is_load else gpu.idle
        if is_load and gpu.first_load is None:
            gpu.first_load = sample.source
        for name in _SERIES:
            if name in sample.values:
                getattr(samples, name).add(sample.values[name])
        for name in _CONSTANTS:
            if name in sample.values:
                setattr(gpu, name, sample.values[name])
        for reason in sample.throttle_reasons:
            if is_load:
                gpu.throttle_reasons.setdefault(reason, sample.source)


def number(text: str) -> float | None:
    """The number in `83.64 W`, `83,64 W`, `48 %`; None for `[N/A]` and the like."""
    match = _NUMBER.search(text)
    if match is None or text.strip().startswith(("[", "0x")):
        return None
    value = float(match[0].replace(",", "."))
    return value if abs(value) < 1e12 else None

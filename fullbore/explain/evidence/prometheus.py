"""Prometheus text: the samples of SGLang, vLLM and fullbore, one dump per file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fullbore.explain.evidence.files import Line
from fullbore.explain.facts import Fact, Source, show

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"")
_MAX_SAMPLES = 50_000


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float
    line: int


@dataclass
class MetricsDump:
    """One scrape. Histogram buckets are left out, their sums and counts are kept."""

    file: str
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def get(self, *names: str) -> list[Sample]:
        """The samples of the first of these names that is present."""
        return next((self.samples[name] for name in names if name in self.samples), [])

    def total(self, *names: str, **labels: str) -> Fact | None:
        """Sum over label sets of the first name present; None if there is none.

        A label that is given must have that value; of ranks that all report the same thing, rank 0 is taken.
        """
        found = [s for s in self.get(*names) if all(s.labels.get(k) == v for k, v in labels.items())]
        found = [s for s in found if s.labels.get("pp_rank", "0") == "0" and s.labels.get("tp_rank", "0") == "0"]
        if not found:
            return None
        value = sum(s.value for s in found)
        name = next(name for name in names if name in self.samples)
        return Fact(f"{name} = {show(value)}", value, Source(self.file, found[0].line))

    def by_stage(self, name: str, **labels: str) -> dict[int, tuple[float, int]]:
        """Stage -> (value, line) of a metric with the label `pp_rank` or `stage`."""
        values: dict[int, tuple[float, int]] = {}
        for sample in self.samples.get(name, []):
            stage = sample.labels.get("pp_rank", sample.labels.get("stage", ""))
            is_wanted = all(sample.labels.get(k) == v for k, v in labels.items())
            if is_wanted and stage.isdigit() and sample.labels.get("tp_rank", "0") == "0":
                earlier = values.get(int(stage), (0.0, sample.line))
                values[int(stage)] = (earlier[0] + sample.value, earlier[1])
        return values

    def mean(self, name: str) -> Fact | None:
        """Mean of a histogram, in its own unit."""
        total, count = self.total(f"{name}_sum"), self.total(f"{name}_count")
        if total is None or count is None or not count.value:
            return None
        mean = total.value / count.value
        return Fact(f"mean of {name} = {show(mean)} over {show(count.value)}", mean, total.source)

    @property
    def engine(self) -> str | None:
        for prefix, engine in (("sglang:", "sglang"), ("vllm:", "vllm"), ("fullbore_", "fullbore")):
            if any(name.startswith(prefix) for name in self.samples):
                return engine
        return None


def read(lines: Iterable[Line], file: str) -> MetricsDump:
    dump = MetricsDump(file)
    count = 0
    for line_number, line in lines:
        if line.startswith("#") or "_bucket{" in line or count >= _MAX_SAMPLES:
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if value != value or abs(value) == float("inf"):
            continue
        labels = dict(_LABEL.findall(match[2])) if match[2] else {}
        dump.samples[match[1]].append(Sample(labels, value, line_number))
        count += 1
    return dump

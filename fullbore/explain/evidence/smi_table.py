"""The table that plain `nvidia-smi` prints."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fullbore.explain.evidence.files import Line
from fullbore.explain.evidence.gpu import Gpu, GpuSample, Machine
from fullbore.explain.facts import Source

_NAME = re.compile(r"^\|\s*(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f]+:")
_POWER = re.compile(r"(\d+)W\s*/\s*(\d+|N/A)W?")
_MEMORY = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")
_UTILISATION = re.compile(r"MiB\s*\|\s*(\d+)%")
_TEMPERATURE = re.compile(r"\b(\d+)C\b")


def read(lines: Iterable[Line], file: str) -> list[Gpu]:
    """GPUs with one sample for each table in the file."""
    machine = Machine(file)
    current: GpuSample | None = None
    for line_number, line in lines:
        if (name := _NAME.match(line)) is not None:
            current = GpuSample(int(name[1]), Source(file, line_number), name=name[2])
        elif current is not None and line.startswith("|") and ("MiB" in line or "W /" in line):
            _read_values(line, current)
            machine.add(current)
            current = None
    machine.flush()
    return list(machine.gpus.values())


def _read_values(line: str, sample: GpuSample) -> None:
    if (power := _POWER.search(line)) is not None:
        sample.values["power_w"] = float(power[1])
        if power[2] != "N/A":
            sample.values["power_limit_w"] = float(power[2])
    if (memory := _MEMORY.search(line)) is not None:
        sample.values["memory_used_mib"] = float(memory[1])
        sample.values["memory_total_mib"] = float(memory[2])
    if (utilisation := _UTILISATION.search(line)) is not None:
        sample.values["utilisation_percent"] = float(utilisation[1])
    if (temperature := _TEMPERATURE.search(line)) is not None:
        sample.values["temperature_c"] = float(temperature[1])

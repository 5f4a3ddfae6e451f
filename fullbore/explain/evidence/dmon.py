"""nvidia-smi dmon: columns named in a comment line; `-` where there is no value."""

from __future__ import annotations

from collections.abc import Iterable

from fullbore.explain.evidence.files import Line
from fullbore.explain.evidence.gpu import Gpu, GpuSample, Machine
from fullbore.explain.facts import Source

_COLUMNS = {
    "pwr": "power_w",
    "gtemp": "temperature_c",
    "sm": "utilisation_percent",
    "pclk": "sm_clock_mhz",
    "fb": "memory_used_mib",
}
_VIOLATIONS = {"pviol": "power_violation", "tviol": "thermal_violation"}


def read(lines: Iterable[Line], file: str) -> list[Gpu]:
    machine = Machine(file)
    columns: list[str] = []
    for line_number, line in lines:
        cells = line.replace("#", " ").split()
        if line.lstrip().startswith("#"):
            names = [cell.lower() for cell in cells]
            if "gpu" in names:
                columns = names
            continue
        row = dict(zip(columns, cells, strict=False))
        if not row.get("gpu", "").isdigit():
            continue
        machine.add(_sample(row, Source(file, line_number)))
    machine.flush()
    return list(machine.gpus.values())


def _sample(row: dict[str, str], source: Source) -> GpuSample:
    sample = GpuSample(int(row["gpu"][:6]), source)
    for column, cell in row.items():
        if column in _COLUMNS:
            try:
                sample.values[_COLUMNS[column]] = float(cell)
            except ValueError:
                continue
        elif column in _VIOLATIONS and cell.strip("0.-"):
            sample.throttle_reasons.append(_VIOLATIONS[column])
    return sample

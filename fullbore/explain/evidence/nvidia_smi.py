"""nvidia-smi --query-gpu=… --format=csv: any columns in any order, `;` and decimal commas, [N/A], repeated headers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fullbore.explain.evidence.files import Line
from fullbore.explain.evidence.gpu import Gpu, GpuSample, Machine, number
from fullbore.explain.facts import Source

# Column (units cut off) -> field of Gpu or of its Samples.
_COLUMNS = {
    "utilization.gpu": "utilisation_percent",
    "power.draw": "power_w",
    "power.draw.average": "power_w",
    "power.limit": "power_limit_w",
    "enforced.power.limit": "power_limit_w",
    "power.default_limit": "default_power_limit_w",
    "clocks.sm": "sm_clock_mhz",
    "clocks.current.sm": "sm_clock_mhz",
    "clocks.gr": "sm_clock_mhz",
    "clocks.current.graphics": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.max.graphics": "max_sm_clock_mhz",
    "temperature.gpu": "temperature_c",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_total_mib",
    "pcie.link.gen.current": "link_gen",
    "pcie.link.gen.gpucurrent": "link_gen",
    "pcie.link.width.current": "link_width",
    "pcie.link.gen.max": "max_link_gen",
    "pcie.link.gen.gpumax": "max_link_gen",
    "pcie.link.width.max": "max_link_width",
}
# Columns that somebody renamed, or another exporter's: the first pattern that fits.
_RENAMED = (
    (re.compile(r"(?:power|pwr)\w*(?:limit|cap)|(?:limit|cap)\w*(?:power|pwr)"), "power_limit_w"),
    (re.compile(r"power|pwr|watt"), "power_w"),
    (re.compile(r"mem\w*(?:used|usage)|used\w*mem"), "memory_used_mib"),
    (re.compile(r"mem\w*total|total\w*mem"), "memory_total_mib"),
    (re.compile(r"mem"), None),  # its utilisation or clock
    (re.compile(r"util"), "utilisation_percent"),
    (re.compile(r"temp"), "temperature_c"),
    (re.compile(r"max\w*(?:sm|graphics)\w*clock|max\w*clock|clock\w*max"), "max_sm_clock_mhz"),
    (re.compile(r"sm_?clock|clocks?_?(?:sm|gr)|mhz"), "sm_clock_mhz"),
)
_IDENTITY = ("index", "pci.bus_id", "gpu_bus_id", "uuid", "gpu_uuid")
_REASON = re.compile(r"clocks_(?:throttle|event)_reasons\.(\w+)")
# 93 % and 578.38 W in one line: samples printed with --format=csv,noheader
HEADERLESS = re.compile(r"\d+ %\s*[,;].*\d W\b|\d W\s*[,;].*\d+ %")
_HARMLESS_REASONS = {"gpu_idle", "active", "supported", "applications_clocks_setting"}
# Bits of clocks_event_reasons.active that slow a GPU down.
_REASON_BITS = {0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown"}
_REASON_BITS[0x80] = "hw_power_brake_slowdown"


def read(lines: Iterable[Line], file: str) -> list[Gpu]:
    """All GPUs of the machine that the file is of."""
    machine = Machine(file)
    header: list[str] | None = None
    separator = ","
    numbers: dict[str, int] = {}  # identity of a GPU -> its number
    for line_number, line in lines:
        if _is_header(line):
            separator = max(";\t,", key=line.count)
            header = [_column(cell) for cell in line.split(separator)]
            continue
        if header is None and HEADERLESS.search(line):
            separator = max(";\t,", key=line.count)
            header = _guessed(line.split(separator))
        if header is None or not line.strip():
            continue
        cells = [cell.strip().strip('"') for cell in line.split(separator)]
        if len(cells) < 2:
            continue
        row = dict(zip(header, cells, strict=False))
        machine.add(_sample(row, _number_of(row, numbers), Source(file, line_number)))
    machine.flush()
    return list(machine.gpus.values())


def _guessed(cells: list[str]) -> list[str]:
    """Columns of a file without a header, as far as units and forms tell; the rest stay nameless."""
    columns: list[str] = []
    by_unit = {"%": ["utilization.gpu"], "W": ["power.draw", "power.limit"], "MiB": ["memory.used", "memory.total"]}
    by_unit["MHz"] = ["clocks.sm"]
    for cell in cells:
        bare = cell.strip()
        unit = bare.rpartition(" ")[2]
        if by_unit.get(unit):
            columns.append(by_unit[unit].pop(0))
        elif bare.isdigit() and "index" not in columns and len(bare) < 4:
            columns.append("index")
        elif "name" not in columns and re.match(r"(?:NVIDIA|Tesla|Quadro|GeForce|AMD)\b", bare):
            columns.append("name")
        else:
            columns.append(f"column {len(columns)}")
    return columns


def _is_header(line: str) -> bool:
    low = line.lower()
    return ("[" in low or "." in low) and sum(name in low for name in (*_COLUMNS, "timestamp", "index", "name")) >= 2


def _column(cell: str) -> str:
    return re.sub(r"\[.*?\]", "", cell).strip().strip('"').lower()


def _number_of(row: dict[str, str], numbers: dict[str, int]) -> int:
    for name in _IDENTITY:
        identity = row.get(name)
        if identity:
            if name == "index" and identity.isdigit() and len(identity) < 6:
                return int(identity)
            return numbers.setdefault(identity, len(numbers))
    return 0


def _sample(row: dict[str, str], index: int, source: Source) -> GpuSample:
    sample = GpuSample(index, source, name=row.get("name") or row.get("gpu_name"))
    for column, cell in row.items():
        field = _COLUMNS.get(column) or _renamed(column)
        if field is not None and (value := number(cell)) is not None:
            sample.values.setdefault(field, value)
        elif (match := _REASON.fullmatch(column)) is not None:
            sample.throttle_reasons += _reasons(match[1], cell)
    return sample


def _renamed(column: str) -> str | None:
    """What a column of another name means; columns that nvidia-smi itself has are what they are."""
    if "." in column or column in _IDENTITY:
        return None
    return next((field for pattern, field in _RENAMED if pattern.search(column)), None)


def _reasons(name: str, cell: str) -> list[str]:
    if name == "active" and cell.lower().startswith("0x"):
        try:
            bits = int(cell, 16)
        except ValueError:
            return []
        return [reason for bit, reason in _REASON_BITS.items() if bits & bit]
    is_active = cell.lower() == "active"
    return [name] if is_active and name not in _HARMLESS_REASONS else []

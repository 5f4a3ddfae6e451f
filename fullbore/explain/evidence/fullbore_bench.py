"""What `fullbore bench` writes of a fullbore server beside what its clients saw: its stages' time and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullbore.explain.evidence.account import Account
from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.evidence.gpu import Gpu, GpuSample, Machine
from fullbore.explain.evidence.server_info import ServerInfo
from fullbore.explain.facts import Reading, Source

_NO_SETTINGS = ("version", "layers_per_stage", "in_flight_limit", "architecture")

_WHOLE = 1.05


def account_of(raw: Mapping[str, Any], row: BenchRow) -> Account | None:
    """Seconds of each stage by cause while one level ran; None where the level has none.

    Every stage took as many steps as every other, so that what they computed stands for the times of their steps.
    """
    uses = raw.get("stages")
    if not isinstance(uses, list) or not uses:
        return None
    window_s = _share(raw.get("duration_s"), most=1e9) or 1.0
    stages = [_seconds(use, window_s) for use in uses]
    if not all(stages):
        return None
    account = Account(row.source, window_s, [stage or {} for stage in stages], kind="bench")
    account.concurrency, account.tok_s = row.concurrency, row.output_tok_s
    account.stage_s = [stage["compute"] for stage in account.stages]
    server = raw.get("server")
    if isinstance(server, dict):
        account.layers = _layers(server)
        account.device = str(server["device"]) if "device" in server else None
    return account


def gpus_of(rows: Sequence[dict[str, Any]], found: Sequence[BenchRow], file: str) -> list[Gpu]:
    """What NVML said of this machine's GPUs while the level with the most clients ran, each a mean over the level."""
    pairs = [(row, raw["gpus"]) for raw, row in zip(rows, found, strict=True) if isinstance(raw.get("gpus"), list)]
    if not pairs:
        return []
    row, uses = max(pairs, key=lambda pair: pair[0].concurrency or 0)
    machine = Machine(file)
    for use in filter(lambda each: isinstance(each, dict), uses):
        index, share, power_w = use.get("gpu"), _share(use.get("utilisation")), _share(use.get("power_w"), 1e5)
        if isinstance(index, int) and share is not None and power_w is not None:
            values = {"utilisation_percent": 100 * share, "power_w": power_w}
            machine.add(GpuSample(index, row.source, name=str(use.get("name") or "") or None, values=values))
    machine.flush()
    return list(machine.gpus.values())


def _seconds(use: Any, window_s: float) -> dict[str, float] | None:
    if not isinstance(use, dict) or not isinstance(use.get("idle"), dict):
        return None
    busy, host = _share(use.get("busy")), _share(use.get("host")) or 0.0
    if busy is None:
        return None
    idle = {str(cause): share * window_s for cause, value in use["idle"].items() if (share := _share(value))}
    if busy * window_s + sum(idle.values()) > _WHOLE * window_s:
        return None  # damaged: causes add up to the window
    return {"compute": max(busy - host, 0.0) * window_s, "host": host * window_s, **idle}


def _share(value: Any, most: float = 1.001) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= most else None


def _layers(server: Mapping[str, Any]) -> list[int]:
    layers = server.get("layers_per_stage")
    return layers if isinstance(layers, list) and all(isinstance(n, int) and n > 0 for n in layers) else []


def server_of(rows: Sequence[dict[str, Any]], source: Source) -> ServerInfo | None:
    """The settings that all levels agree on."""
    servers = [row["server"] for row in rows if isinstance(row.get("server"), dict)]
    if not servers:
        return None
    first = servers[0]
    agreed = {name: value for name, value in first.items() if all(other.get(name) == value for other in servers)}
    info = ServerInfo("fullbore", source, version=str(agreed["version"]) if "version" in agreed else None)
    for name, value in agreed.items():
        if isinstance(value, list):
            value = ",".join(str(entry) for entry in value)
        if name not in _NO_SETTINGS and isinstance(value, str | int | float | bool):
            info.settings[name] = info.given[name] = Reading(name, value, source)
    info.stage_layers = _layers(agreed)
    limit = agreed.get("in_flight_limit")
    info.in_flight_limit = limit if isinstance(limit, int) else None
    return info


def note_what_differs(rows: Sequence[BenchRow]) -> None:
    """Settings in which the servers of these measurements differ are what was varied."""
    served = [row for row in rows if row.server]
    names = {name for row in served for name in row.server} - set(_NO_SETTINGS)
    for name in sorted(names):
        if len({str(row.server.get(name)) for row in served}) > 1:
            for row in served:
                value = row.server.get(name)
                row.varied[name] = value if isinstance(value, str | int | float) else str(value)

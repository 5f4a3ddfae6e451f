"""Replies of /server_info (SGLang, fullbore, vLLM): settings given at the top, resolved ones inside."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fullbore.explain.facts import Reading, Source


@dataclass
class ServerInfo:
    engine: str
    source: Source
    version: str | None = None
    settings: dict[str, Reading] = field(default_factory=dict)  # as resolved
    given: dict[str, Reading] = field(default_factory=dict)
    stage_layers: list[int] = field(default_factory=list)
    in_flight_limit: int | None = None


def is_server_info(tree: Any) -> bool:
    if not isinstance(tree, dict):
        return False
    if "internal_states" in tree or "vllm_config" in tree:
        return True
    return "pp_size" in tree and ("model_path" in tree or "model" in tree) and len(tree) > 10


def read(tree: dict[str, Any], file: str, text: str) -> ServerInfo:
    """Resolved settings win over given ones; null ones are left out."""
    lines = text.splitlines()
    if "vllm_config" in tree:
        return _read_vllm(tree, file)
    engine = "fullbore" if "in_flight_limit" in tree or "kv_capacity_tokens" in tree else "sglang"
    info = ServerInfo(engine, Source(file), version=_text(tree.get("version")))
    states = tree.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    for name, value in tree.items():
        if _is_setting(value):
            info.given[name] = Reading(name, value, Source(file, _line(lines, name, last=False)))
    info.settings = dict(info.given)
    for name, value in inner.items():
        if _is_setting(value):
            reading = Reading(f"internal_states.{name}", value, Source(file, _line(lines, name, last=True)))
            info.settings[name] = reading
    _read_stages(tree, info)
    return info


def _read_stages(tree: dict[str, Any], info: ServerInfo) -> None:
    stages = tree.get("stages")
    if isinstance(stages, list):
        for stage in stages:
            layers = stage.get("layers") if isinstance(stage, dict) else None
            if isinstance(layers, list) and len(layers) == 2 and all(isinstance(n, int) for n in layers):
                info.stage_layers.append(layers[1] - layers[0])
    limit = tree.get("in_flight_limit")
    info.in_flight_limit = limit if isinstance(limit, int) else None


def _read_vllm(tree: dict[str, Any], file: str) -> ServerInfo:
    info = ServerInfo("vllm", Source(file))
    config = tree["vllm_config"]
    if isinstance(config, str):
        for name, value in re.findall(r"\b(\w+)=('[^']*'|None|True|False|-?[\d.]+)", config):
            info.settings[name] = Reading(name, value.strip("'"), Source(file))
    elif isinstance(config, dict):
        for section, values in config.items():
            for name, value in values.items() if isinstance(values, dict) else [(section, values)]:
                if _is_setting(value):
                    info.settings[name] = Reading(name, value, Source(file))
    info.version = _text(tree.get("version"))
    return info


def _is_setting(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _line(lines: list[str], name: str, *, last: bool) -> int | None:
    if len(lines) < 3:
        return 1 if lines else None
    numbers = [number for number, line in enumerate(lines, 1) if f'"{name}"' in line]
    return numbers[-1 if last else 0] if numbers else None

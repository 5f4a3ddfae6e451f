"""Own devices and links, from a TOML file; docs/planning.md has the format."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from fullbore.errors import ConfigError
from fullbore.plan.device_table import Device
from fullbore.plan.devices import DEVICES, find_device
from fullbore.plan.hardware import Hardware, parse_hardware
from fullbore.plan.links import LINKS, Link

Described = TypeVar("Described", Device, Link)


def hardware_from_toml(text: str) -> Hardware:
    """Reads an own description; docs/planning.md has the format.

    Raises:
        ConfigError: broken TOML, or a key that is missing, unknown or senseless.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The hardware file is not valid TOML: {error}.") from None
    links = dict(LINKS)
    for name, table in _tables(content, "link").items():
        links[name] = _from_table(Link, name, table, LINKS["pcie5"])
    devices = dict(DEVICES)
    for name, table in _tables(content, "device").items():
        base = find_device(table["like"]) if isinstance(table.get("like"), str) else None
        devices[name] = _device_from_table(name, table, base)
        if devices[name].link not in links:
            raise ConfigError(
                f"Hardware file: device {name} has link {devices[name].link!r}; known: {', '.join(links)}."
            )
    listed = content.get("hardware")
    if not isinstance(listed, str):
        raise ConfigError("Hardware file: give the devices as hardware = '2x my-card' at the top.")
    host_link = content.get("host_link", "ethernet-400g")
    if host_link not in links:
        raise ConfigError(f"Hardware file: host_link {host_link!r} is unknown; known: {', '.join(links)}.")
    return replace(parse_hardware(listed, devices), links=links, host_link=host_link)


def _tables(content: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    tables = content.get(key, {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise ConfigError(f"Hardware file: [{key}.NAME] must be a table for each {key}.")
    return tables


def _device_from_table(name: str, table: dict[str, Any], base: Device | None) -> Device:
    values = {key: value for key, value in table.items() if key != "like"}
    if base is None:
        required = ("memory_bytes", "bandwidth_bytes_s", "tflops")
        missing = [key for key in required if key not in values]
        if missing:
            raise ConfigError(f"Hardware file: device {name} lacks {', '.join(missing)} (or: like = 'h100').")
        values = {"link": "pcie4", "power_w": 0.0, "source": "own file", **values}
    tflops = values.get("tflops", base.tflops if base else {})
    if not isinstance(tflops, dict) or not tflops or not all(_is_positive(each) for each in tflops.values()):
        raise ConfigError(f"Hardware file: device {name}: tflops must be a table such as {{ bf16 = 100 }}.")
    unknown = set(tflops) - {"fp32", "bf16", "fp8", "fp4"}
    if unknown:
        raise ConfigError(f"Hardware file: device {name}: tflops of {', '.join(sorted(unknown))} mean nothing here.")
    return _from_table(Device, name, values, base)


def _from_table(kind: type[Described], name: str, table: dict[str, Any], base: Described | None) -> Described:
    """An instance of the dataclass with the table's values, checked, over those of `base`."""
    known = {each.name for each in fields(kind)} - {"name"}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"Hardware file: {name} has no key {key}; known are {', '.join(sorted(known))}.")
        if key.endswith(("_bytes", "_s", "_w", "_efficiency")) and not _is_positive(value, key == "power_w"):
            raise ConfigError(f"Hardware file: {name}: {key} must be a positive number, got {value!r}.")
        if key.endswith("_efficiency") and value > 1:
            raise ConfigError(f"Hardware file: {name}: {key} is a share of the peak, at most 1, got {value!r}.")
    if base is None:
        return kind(name=name, **table)
    own_source = {} if "source" in table else {"source": "own file"}
    return replace(base, name=name, **{**own_source, **table})


def _is_positive(value: object, allow_zero: bool = False) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (value > 0 or (allow_zero and value == 0)) and value < float("inf")  # type: ignore[operator]

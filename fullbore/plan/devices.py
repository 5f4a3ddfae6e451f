"""Devices by the names by which users and drivers call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from fullbore.errors import ConfigError
from fullbore.plan.device_table import TABLE, Device

DEVICES: dict[str, Device] = {device.name: device for device in TABLE}
MEASURED_DEVICES = ("rtx-pro-6000", "h100", "b200")  # whose efficiencies are their own

_ALIASES = {
    "rtx6000pro": "rtx-pro-6000",
    "rtxpro6000": "rtx-pro-6000",
    "rtxpro6000server": "rtx-pro-6000",
    "pro6000": "rtx-pro-6000",
    "a100sxm": "a100",
    "a10080gb": "a100",
    "h100sxm": "h100",
    "h10080gb": "h100",
    "h10080gbhbm3": "h100",
    "h200sxm": "h200",
    "h20sxm": "h20",
    "b200sxm": "b200",
}
_PATTERNS = [(re.compile(device.pattern, re.I), device) for device in TABLE if device.pattern]


def find_device(name: str, known: Mapping[str, Device] | None = None) -> Device:
    """The device of that name; case, spaces and punctuation do not matter.

    Raises:
        ConfigError: unknown; the message lists what is known.
    """
    known = DEVICES if known is None else known
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for prefix in ("nvidia", "amd", "geforce", "instinct"):
        plain = plain.removeprefix(prefix)
    by_plain = {re.sub(r"[^a-z0-9]", "", each.lower()): device for each, device in known.items()}
    by_plain.update({alias: known[target] for alias, target in _ALIASES.items() if target in known})
    for each in (plain, plain.removeprefix("rtx")):
        if each in by_plain:
            return by_plain[each]
    printed = device_named(name)
    if printed is not None and printed.name in known:
        return known[printed.name]
    close = get_close_matches(plain, by_plain, 1, 0.6)
    hint = f" Did you mean {by_plain[close[0]].name}?" if close else ""
    raise ConfigError(
        f"Unknown card {name!r}.{hint} Known are {', '.join(known)}; describe any other in a TOML file "
        "(see docs/planning.md)."
    )


def device_named(text: str | None) -> Device | None:
    """The card that a driver, or a user, calls so: "NVIDIA H100 80GB HBM3" -> h100. None: not in the table."""
    if not text:
        return None
    return next((device for pattern, device in _PATTERNS if pattern.search(text)), None)

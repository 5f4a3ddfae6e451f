"""Devices in order and the hosts they are in, from the text forms that users give.

`8x rtx-pro-6000`, `1x 4090 + 1x 3090` (one host), `8x h100 / 8x h100` (two hosts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fullbore.errors import ConfigError
from fullbore.plan.device_table import Device
from fullbore.plan.devices import find_device
from fullbore.plan.links import LINKS, Link

MAX_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices in order, and which of them share a host."""

    devices: tuple[Device, ...]
    hosts: tuple[int, ...]  # host of each device
    links: Mapping[str, Link] = field(default_factory=lambda: LINKS)
    host_link: str = "ethernet-400g"

    def __len__(self) -> int:
        return len(self.devices)

    def link_between(self, one: int, other: int) -> Link:
        """The slower device's link inside a host, the network between hosts."""
        if self.hosts[one] != self.hosts[other]:
            return self.links[self.host_link]
        pair = (self.links[self.devices[one].link], self.links[self.devices[other].link])
        return min(pair, key=lambda link: link.bandwidth_bytes_s)

    def describe(self) -> str:
        """The inverse of `parse_hardware`: `1x 4090 + 1x 3090`."""
        texts = []
        for host in dict.fromkeys(self.hosts):
            names: list[tuple[str, int]] = []
            for device, on in zip(self.devices, self.hosts, strict=True):
                if on == host:
                    if names and names[-1][0] == device.name:
                        names[-1] = (device.name, names[-1][1] + 1)
                    else:
                        names.append((device.name, 1))
            texts.append(" + ".join(f"{number}x {name}" for name, number in names))
        return " / ".join(texts)


def parse_hardware(text: str, known: Mapping[str, Device] | None = None) -> Hardware:
    """Reads `8x rtx-pro-6000`, `1x 4090 + 1x 3090`, `8x h100 / 8x h100`.

    Raises:
        ConfigError: not in this form, no devices, or an unknown card.
    """
    devices: list[Device] = []
    hosts: list[int] = []
    for host, on_host in enumerate(text.split("/")):
        for part in on_host.split("+"):
            match = re.fullmatch(r"\s*(?:(\d+)\s*[xX×*]\s*)?([A-Za-z0-9][\w .-]*?)\s*", part)
            if match is None:
                raise ConfigError(
                    f"--hardware {text!r} is not a list of devices; write for example '8x rtx-pro-6000' or "
                    "'1x 4090 + 1x 3090', with / between hosts."
                )
            number = int(match[1]) if match[1] else 1
            if not 1 <= number <= MAX_DEVICES:
                raise ConfigError(f"--hardware {text!r} asks for {number} devices; give between 1 and {MAX_DEVICES}.")
            devices += [find_device(match[2], known)] * number
            hosts += [host] * number
    if len(devices) > MAX_DEVICES:
        raise ConfigError(f"--hardware {text!r} asks for {len(devices)} devices; give at most {MAX_DEVICES}.")
    return Hardware(devices=tuple(devices), hosts=tuple(hosts))

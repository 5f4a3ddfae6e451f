"""Lists of devices, own devices, links."""

from __future__ import annotations

import pytest

from fullbore.errors import ConfigError
from fullbore.plan.devices import DEVICES, find_device
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.hardware_file import hardware_from_toml
from fullbore.plan.links import LINKS
from fullbore.plan.transfers import all_reduce_s, send_s

OWN = """
hardware = "2x mine + 1x 4090"
host_link = "slow"
[device.mine]
memory_bytes = 48e9
bandwidth_bytes_s = 1e12
tflops = { bf16 = 200 }
link = "mesh"
[link.mesh]
bandwidth_bytes_s = 1e11
[link.slow]
bandwidth_bytes_s = 1e9
latency_s = 1e-3
"""


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_its_figures_and_a_source(name: str) -> None:
    device = DEVICES[name]
    assert device.source
    assert device.link in LINKS
    assert 0 < device.memory_efficiency <= 1
    assert 0 < device.compute_efficiency <= 1
    assert min(device.memory_bytes, device.bandwidth_bytes_s, device.power_w, *device.tflops.values()) > 0


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("8x rtx-pro-6000", "8x rtx-pro-6000"),
        ("2 X RTX PRO 6000", "2x rtx-pro-6000"),
        ("h100", "1x h100"),
        ("1x NVIDIA GeForce RTX 4090 + 1x 3090", "1x 4090 + 1x 3090"),
        ("2x H100 SXM/2x H100", "2x h100 / 2x h100"),
    ],
)
def test_lists(text: str, described: str) -> None:
    assert parse_hardware(text).describe() == described


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x h100", "asks for 0 devices"),
        ("8x h10000", "Unknown card 'h10000'. Did you mean h100"),
        ("", "not a list of devices"),
        ("8x h100 +", "not a list of devices"),
        ("99999999x h100", "asks for 99999999 devices"),
        ("1000x h100 + 1000x h100", "at most 1024"),
    ],
)
def test_nonsense_gets_one_helpful_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hardware(text)


def test_own_devices_and_links() -> None:
    hardware = hardware_from_toml(OWN)
    assert hardware.describe() == "2x mine + 1x 4090"
    assert hardware.link_between(0, 1).bandwidth_bytes_s == 1e11
    assert hardware.link_between(1, 2).name == "pcie4", "the slower device's link"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hardware = 3", "hardware = '2x my-card'"),
        ("hardware = '", "not valid TOML"),
        ("hardware = 'h100'\n[device.x]\nmemory_bytes = 1", "lacks bandwidth_bytes_s, tflops"),
        ("hardware = 'h100'\n[device.x]\nlike = 'h100'\nmemory_bytes = -1", "must be a positive number, got -1"),
        ("hardware = 'h100'\n[device.x]\nlike = 'h100'\ncolour = 1", "no key colour"),
        ("hardware = 'h100'\n[device.x]\nlike = 'h100'\nlink = 'rope'", "link 'rope'"),
        ("hardware = 'h100'\n[device.x]\nlike = 'h100'\nmemory_efficiency = 1.5", "at most 1"),
        ("hardware = 'h100'\nhost_link = 'rope'", "host_link 'rope'"),
        ("hardware = 'h100'\n[device.x]\nlike = 'h100'\ntflops = { int1 = 3 }", "tflops of int1"),
    ],
)
def test_broken_files_get_one_helpful_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware_from_toml(text)


def test_a_wider_arithmetic_stands_in_for_a_missing_one() -> None:
    assert find_device("3090").flops("fp4") == find_device("3090").flops("bf16")


def test_devices_on_different_hosts_talk_over_the_network() -> None:
    hardware = parse_hardware("1x h100 / 1x h100")
    assert hardware.link_between(0, 1).name == "ethernet-400g"


@pytest.mark.parametrize("name", LINKS)
def test_larger_messages_and_more_ranks_never_take_less(name: str) -> None:
    link = LINKS[name]
    sizes = [2.0**power for power in range(10, 32)]
    for ranks in (2, 4, 8):
        times = [all_reduce_s(link, ranks, size) for size in sizes]
        assert times == sorted(times)
        assert all(all_reduce_s(link, ranks, size) <= all_reduce_s(link, 2 * ranks, size) for size in sizes)
    assert send_s(link, 1e6) < send_s(link, 1e9)
    assert all_reduce_s(link, 1, 1e9) == 0

"""Devices: published figures, each with its source, and the names by which users call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fullbore.errors import ConfigError
from fullbore.plan.formats import Arithmetic

GB, MIB, TERA = 1e9, 2.0**20, 1e12


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. `tflops`: dense, without structured sparsity, accumulating in fp32 where that is slower."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    tflops: Mapping[str, float]  # by arithmetic; a missing one runs as the next wider one
    link: str
    power_w: float
    source: str
    memory_efficiency: float = 0.857  # share of `bandwidth_bytes_s` that reading weights reaches
    compute_efficiency: float = 0.72  # share of `tflops` that large matrix products reach
    attention_efficiency: float = 0.9  # of prefill attention against those
    kernel_s: float = 3.0e-6  # a kernel's start and tail inside a CUDA graph
    has_graphs: bool = True  # launches can be recorded and replayed

    def flops(self, arithmetic: Arithmetic) -> float:
        """Peak operations per second in that arithmetic, or in the next wider one that the device has."""
        order = ("fp4", "fp8", "bf16", "fp32")
        for each in order[order.index(arithmetic) :]:
            if each in self.tflops:
                return self.tflops[each] * TERA
        return max(self.tflops.values()) * TERA

    def runs_natively(self, arithmetic: Arithmetic) -> bool:
        return arithmetic in self.tflops


def _gpu(
    name: str, memory: float, bandwidth_gb_s: float, link: str, power_w: float, source: str, **more: Any
) -> Device:
    efficiencies = {
        key: more.pop(key)
        for key in ("memory_efficiency", "compute_efficiency", "attention_efficiency", "kernel_s")
        if key in more
    }
    return Device(
        name=name,
        memory_bytes=memory,
        bandwidth_bytes_s=bandwidth_gb_s * GB,
        tflops=more,
        link=link,
        power_w=power_w,
        source=source,
        **efficiencies,
    )


# Efficiencies. RTX PRO 6000: measured layer times of LLMServingSim 2.0 (a matrix product's time against its bytes is a
# straight line of 1.536 TB/s; 2,048 tokens run at 0.8 of peak, their attention at 200-270 TFLOPS). H100, B200: decode
# and prefill in the tables of aiconfigurator 0.12. The others take the values of their generation.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "rtx-pro-6000", 97887 * MIB, 1792, "pcie5", 600,
            "NVIDIA RTX PRO 6000 Blackwell datasheet; 467.8 TFLOPS at the 2,430 MHz of the Server Edition",
            bf16=467.8, fp8=935.6, fp4=1871.2, fp32=117.0,
            compute_efficiency=0.82, attention_efficiency=0.65, kernel_s=3.5e-6,
        ),
        _gpu(
            "5090", 32607 * MIB, 1792, "pcie5", 575,
            "NVIDIA RTX Blackwell GPU architecture white paper",
            bf16=209.5, fp8=419.0, fp4=1676.0, fp32=104.8, compute_efficiency=0.85, attention_efficiency=0.65,
        ),
        _gpu(
            "4090", 24564 * MIB, 1008, "pcie4", 450,
            "NVIDIA Ada GPU architecture white paper", bf16=165.2, fp8=330.3, fp32=82.6, compute_efficiency=0.85,
        ),
        _gpu(
            "3090", 24576 * MIB, 936, "pcie4", 350,
            "NVIDIA Ampere GA102 GPU architecture white paper", bf16=71.0, fp32=35.6, compute_efficiency=0.85,
        ),
        _gpu(
            "l40s", 46068 * MIB, 864, "pcie4", 350,
            "NVIDIA L40S datasheet", bf16=362.05, fp8=733.0, fp32=91.6, compute_efficiency=0.6,
        ),
        _gpu(
            "l4", 23034 * MIB, 300, "pcie4", 72,
            "NVIDIA L4 datasheet", bf16=121.0, fp8=242.0, fp32=30.3, compute_efficiency=0.5,
        ),
        _gpu(
            "a100", 81920 * MIB, 2039, "nvlink3", 400,
            "NVIDIA A100 80GB SXM datasheet", bf16=312.0, fp32=19.5,
        ),
        _gpu(
            "a100-40gb", 40960 * MIB, 1555, "nvlink3", 400,
            "NVIDIA A100 40GB SXM datasheet", bf16=312.0, fp32=19.5,
        ),
        _gpu(
            "h100", 81559 * MIB, 3350, "nvlink4", 700,
            "NVIDIA H100 SXM datasheet", bf16=989.4, fp8=1978.9, fp32=67.0,
        ),
        _gpu(
            "h200", 143771 * MIB, 4800, "nvlink4", 700,
            "NVIDIA H200 SXM datasheet", bf16=989.4, fp8=1978.9, fp32=67.0,
        ),
        _gpu(
            "h20", 97871 * MIB, 4000, "nvlink4", 500,
            "NVIDIA H20, as published by server makers",
            bf16=148.0, fp8=296.0, fp32=44.0, compute_efficiency=0.95,  # little arithmetic for its bandwidth
        ),
        _gpu(
            "b200", 183359 * MIB, 8000, "nvlink5", 1000,
            "NVIDIA HGX B200 datasheet", bf16=2250.0, fp8=4500.0, fp4=9000.0, fp32=80.0,
            memory_efficiency=0.78, compute_efficiency=0.66,
        ),
        _gpu(
            "gb300", 288e9, 8000, "nvlink5", 1400,
            "NVIDIA GB300 NVL72 datasheet", bf16=2500.0, fp8=5000.0, fp4=15000.0, fp32=80.0,
            memory_efficiency=0.78, compute_efficiency=0.6,
        ),
        _gpu(
            "mi300x", 192e9, 5300, "infinity-fabric", 750,
            "AMD Instinct MI300X datasheet", bf16=1307.4, fp8=2614.9, fp32=163.4,
            memory_efficiency=0.75, compute_efficiency=0.45,
        ),
        Device(
            name="cpu",  # one core of a current server with AVX2, the engine's default without GPUs
            memory_bytes=8 * GB,
            bandwidth_bytes_s=12 * GB,
            tflops={"fp32": 0.1},
            link="local",
            power_w=15,
            source="one core, 3 GHz, two 256-bit FMA units; use --calibrate for a machine at hand",
            memory_efficiency=0.8,
            compute_efficiency=0.7,
            kernel_s=15e-6,
            has_graphs=False,
        ),
    )
}  # fmt: skip

MEASURED_DEVICES = ("rtx-pro-6000", "h100", "b200")  # whose efficiencies are their own

_ALIASES = {
    "rtx6000pro": "rtx-pro-6000",
    "rtxpro6000": "rtx-pro-6000",
    "rtxpro6000server": "rtx-pro-6000",
    "rtxpro6000blackwell": "rtx-pro-6000",
    "rtxpro6000blackwellserveredition": "rtx-pro-6000",
    "pro6000": "rtx-pro-6000",
    "rtx5090": "5090",
    "rtx4090": "4090",
    "rtx3090": "3090",
    "a100sxm": "a100",
    "a10080gb": "a100",
    "h100sxm": "h100",
    "h10080gb": "h100",
    "h10080gbhbm3": "h100",
    "h200sxm": "h200",
    "h20sxm": "h20",
    "b200sxm": "b200",
}


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
    if plain in by_plain:
        return by_plain[plain]
    close = get_close_matches(plain, by_plain, 1, 0.6)
    hint = f" Did you mean {by_plain[close[0]].name}?" if close else ""
    raise ConfigError(
        f"Unknown card {name!r}.{hint} Known are {', '.join(known)}; describe any other in a TOML file "
        "(see docs/planning.md)."
    )

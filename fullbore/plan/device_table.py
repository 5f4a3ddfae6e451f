"""Accelerators' published figures: what drivers call them, memory, bandwidth, links, clock, power, arithmetic.

`pcie` is the slot's generation and width; `boost_mhz` the clock that streaming multiprocessors reach under load. The
first pattern that fits a name wins, so special variants stand before the general card.

Efficiencies. RTX PRO 6000: measured layer times of LLMServingSim 2.0 (a matrix product's time against its bytes is a
straight line of 1.536 TB/s; 2,048 tokens run at 0.8 of peak, their attention at 200-270 TFLOPS). H100, B200: decode
and prefill in the tables of aiconfigurator 0.12. The others take the values of their generation.

Sources name the vendor's sheet and, as a link, the public page that the figures were compared with; "unconfirmed" are
those that no page at hand repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullbore.plan.formats import Arithmetic

GB, MIB, GIB, TERA = 1e9, 2.0**20, 2.0**30, 1e12


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
    shares_memory: bool = False  # with the others of its host, as the cores of a processor do
    pattern: str = ""  # regular expression for what drivers and users call it
    boost_mhz: float = 0.0
    pcie: tuple[int, int] | None = None  # generation and width; None: not behind PCIe, whatever the driver reports
    decode_power_w: float | None = None  # while decoding, where it is far below `power_w`

    def flops(self, arithmetic: Arithmetic) -> float:
        """Peak operations per second in that arithmetic, or in the next wider one that the device has."""
        order = ("fp4", "fp8", "bf16", "fp32")
        for each in order[order.index(arithmetic) :]:
            if each in self.tflops:
                return self.tflops[each] * TERA
        return max(self.tflops.values()) * TERA

    def runs_natively(self, arithmetic: Arithmetic) -> bool:
        return arithmetic in self.tflops

    @property
    def bandwidth_gb_s(self) -> float:
        return self.bandwidth_bytes_s / GB


_FIGURES = ("memory_efficiency", "compute_efficiency", "attention_efficiency", "kernel_s", "decode_power_w")
_HBM3E: dict[str, Any] = {"memory_efficiency": 0.78, "compute_efficiency": 0.66}
_GEFORCE: dict[str, Any] = {"compute_efficiency": 0.85}
_PRO: dict[str, Any] = {"compute_efficiency": 0.82, "attention_efficiency": 0.65, "kernel_s": 3.5e-6}
_CDNA: dict[str, Any] = {"memory_efficiency": 0.75, "compute_efficiency": 0.45}


def _gpu(
    name: str, pattern: str, memory_bytes: float, bandwidth_gb_s: float, link: str, pcie: int | None,
    boost_mhz: float, power_w: float, source: str, width: int = 16, **more: Any,
) -> Device:  # fmt: skip
    figures = {key: more.pop(key) for key in _FIGURES if key in more}
    return Device(
        name=name, pattern=pattern, memory_bytes=memory_bytes, bandwidth_bytes_s=bandwidth_gb_s * GB, tflops=more,
        link=link, pcie=None if pcie is None else (pcie, width), boost_mhz=boost_mhz, power_w=power_w, source=source,
        **figures,
    )  # fmt: skip


_BLACKWELL_PRO = (
    "NVIDIA RTX PRO Blackwell datasheets; https://blog.us.fixstars.com/what-kind-of-gpu-is-the-nvidia-rtx-pro-6000-"
    "blackwell-max-q and https://www.svethardware.cz/nvidia-uvedla-72gb-verzi-karty-rtx-pro-5000/62241 (2,064 AI TOPS: "
    "FP4 with sparsity, twice the dense figure)"
)
_GEFORCE_50 = (
    "NVIDIA RTX Blackwell GPU architecture white paper; https://www.spheron.network/blog/nvidia-rtx-5090-specs/; "
    "the others' tensor figures unconfirmed, but in the same proportion to clock and cores"
)
_GEFORCE_40 = (
    "NVIDIA Ada GPU architecture white paper; https://github.com/nicejunjie/nicejunjie.github.io (bandwidths, fp32); "
    "165 TFLOPS of the 4090: https://gist.github.com/mikasenghaas/d63ded03f1f0417b1677627119bacc0d; other tensor "
    "figures unconfirmed"
)
_GEFORCE_30 = (
    "NVIDIA Ampere GA102 GPU architecture white paper; https://github.com/nicejunjie/nicejunjie.github.io (bandwidths, "
    "fp32); tensor figures unconfirmed, twice fp32 when accumulating in fp32"
)
_ADA_PRO = (
    "NVIDIA L4, L20, L40, L40S and RTX 6000 Ada datasheets; https://github.com/winston-zhang-orz/gpu-specs (L4, L40S); "
    "L20, L40 and RTX 6000 Ada unconfirmed"
)
_AMPERE_PRO = (
    "NVIDIA A10, A16, A30, A40 and RTX A6000 datasheets; https://github.com/winston-zhang-orz/gpu-specs (A10), "
    "https://hmc-tech.com/gpu/nvidia-a40-vs-nvidia-grid-a100b (A40); A16 and A30 unconfirmed"
)
_PASCAL = "NVIDIA Tesla P40 and P100 datasheets; https://github.com/stillwater-sc/kpu-sim (P40); P100 unconfirmed"
_B300 = "https://verda.com/blog/gb300-nvl72-architecture"
_CDNA4 = (
    "AMD Instinct MI350 series: https://www.tomshardware.com/pc-components/gpus/amds-instinct-mi355x-accelerator-will-"
    "consume-1-400-watts (FP4 with sparsity 18.45 and 20.1 PFLOPS, twice the dense figures)"
)

# name, pattern, memory, GB/s, link, PCIe generation, boost MHz, W
TABLE: tuple[Device, ...] = (
    _gpu("rtx-pro-6000-max-q", r"RTX PRO 6000.*Max-?Q", 97887 * MIB, 1792, "pcie5", 5, 2280, 300, _BLACKWELL_PRO,
         bf16=438.9, fp8=877.9, fp4=1755.7, fp32=109.7, **_PRO),
    _gpu("rtx-pro-6000", r"RTX PRO 6000", 97887 * MIB, 1792, "pcie5", 5, 2430, 600,
         "NVIDIA RTX PRO 6000 Blackwell datasheet; 467.8 TFLOPS at the 2,430 MHz of the Server Edition",
         bf16=467.8, fp8=935.6, fp4=1871.2, fp32=117.0, **_PRO),
    _gpu("rtx-pro-5000", r"RTX PRO 5000", 48935 * MIB, 1344, "pcie5", 5, 2290, 300, _BLACKWELL_PRO,
         bf16=258.0, fp8=516.0, fp4=1032.0, fp32=65.0, **_PRO),
    _gpu("5090", r"\b5090\b", 32607 * MIB, 1792, "pcie5", 5, 2407, 575, _GEFORCE_50,
         bf16=209.5, fp8=419.0, fp4=1676.0, fp32=104.8, attention_efficiency=0.65, **_GEFORCE),
    _gpu("5080", r"\b5080\b", 16303 * MIB, 960, "pcie5", 5, 2617, 360, _GEFORCE_50,
         bf16=112.6, fp8=225.1, fp4=900.4, fp32=56.3, attention_efficiency=0.65, **_GEFORCE),
    _gpu("5070-ti", r"\b5070 ?Ti\b", 16303 * MIB, 896, "pcie5", 5, 2452, 300, _GEFORCE_50,
         bf16=87.9, fp8=175.8, fp4=703.0, fp32=43.9, attention_efficiency=0.65, **_GEFORCE),
    _gpu("5070", r"\b5070\b", 12227 * MIB, 672, "pcie5", 5, 2512, 250, _GEFORCE_50,
         bf16=61.7, fp8=123.5, fp4=494.0, fp32=30.9, attention_efficiency=0.65, **_GEFORCE),
    _gpu("5060-ti", r"\b5060 ?Ti\b", 16311 * MIB, 448, "pcie5", 5, 2572, 180, _GEFORCE_50, width=8,
         bf16=47.4, fp8=94.9, fp4=379.5, fp32=23.7, attention_efficiency=0.65, **_GEFORCE),
    _gpu("4090", r"\b4090\b", 24564 * MIB, 1008, "pcie4", 4, 2520, 450, _GEFORCE_40,
         bf16=165.2, fp8=330.3, fp32=82.6, **_GEFORCE),
    _gpu("4080", r"\b4080\b", 16376 * MIB, 717, "pcie4", 4, 2505, 320, _GEFORCE_40,
         bf16=97.5, fp8=194.9, fp32=48.7, **_GEFORCE),
    _gpu("4070-ti-super", r"\b4070 ?Ti ?S", 16376 * MIB, 672, "pcie4", 4, 2610, 285, _GEFORCE_40,
         bf16=88.2, fp8=176.4, fp32=44.1, **_GEFORCE),
    _gpu("4070", r"\b4070\b", 12282 * MIB, 504, "pcie4", 4, 2475, 200, _GEFORCE_40,
         bf16=58.3, fp8=116.6, fp32=29.1, **_GEFORCE),
    _gpu("4060-ti", r"\b4060 ?Ti\b", 8188 * MIB, 288, "pcie4", 4, 2535, 165, _GEFORCE_40, width=8,
         bf16=44.1, fp8=88.3, fp32=22.1, **_GEFORCE),
    _gpu("3090-ti", r"\b3090 ?Ti\b", 24564 * MIB, 1008, "pcie4", 4, 1860, 450, _GEFORCE_30,
         bf16=80.0, fp32=40.0, **_GEFORCE),
    _gpu("3090", r"\b3090\b", 24576 * MIB, 936, "pcie4", 4, 1695, 350, _GEFORCE_30, bf16=71.0, fp32=35.6, **_GEFORCE),
    _gpu("3080-ti", r"\b3080 ?Ti\b", 12288 * MIB, 912, "pcie4", 4, 1665, 350, _GEFORCE_30,
         bf16=68.2, fp32=34.1, **_GEFORCE),
    _gpu("3080", r"\b3080\b", 10240 * MIB, 760, "pcie4", 4, 1710, 320, _GEFORCE_30, bf16=59.5, fp32=29.8, **_GEFORCE),
    _gpu("3070", r"\b3070\b", 8192 * MIB, 448, "pcie4", 4, 1725, 220, _GEFORCE_30, bf16=40.6, fp32=20.3, **_GEFORCE),
    _gpu("3060-ti", r"\b3060 ?Ti\b", 8192 * MIB, 448, "pcie4", 4, 1665, 200, _GEFORCE_30,
         bf16=32.4, fp32=16.2, **_GEFORCE),
    _gpu("3060", r"\b3060\b", 12288 * MIB, 360, "pcie4", 4, 1777, 170, _GEFORCE_30, bf16=25.5, fp32=12.7, **_GEFORCE),
    _gpu("2080-ti", r"\b2080 ?Ti\b", 11264 * MIB, 616, "pcie3", 3, 1545, 250,
         "NVIDIA Turing GPU architecture white paper; fp16 for bf16; unconfirmed", bf16=53.8, fp32=13.4, **_GEFORCE),
    _gpu("rtx-6000-ada", r"RTX 6000 Ada", 49140 * MIB, 960, "pcie4", 4, 2505, 300, _ADA_PRO,
         bf16=364.2, fp8=728.5, fp32=91.1, compute_efficiency=0.6),
    _gpu("l40s", r"\bL40S\b", 46068 * MIB, 864, "pcie4", 4, 2520, 350, _ADA_PRO,
         bf16=362.05, fp8=733.0, fp32=91.6, compute_efficiency=0.6),
    _gpu("l40", r"\bL40\b", 46068 * MIB, 864, "pcie4", 4, 2490, 300, _ADA_PRO,
         bf16=181.0, fp8=362.0, fp32=90.5, compute_efficiency=0.6),
    _gpu("l20", r"\bL20\b", 46068 * MIB, 864, "pcie4", 4, 2520, 275, _ADA_PRO, bf16=119.5, fp8=239.0, fp32=59.8),
    _gpu("l4", r"\bL4\b", 23034 * MIB, 300, "pcie4", 4, 2040, 72, _ADA_PRO,
         bf16=121.0, fp8=242.0, fp32=30.3, compute_efficiency=0.5),
    _gpu("a6000", r"\bA6000\b", 49140 * MIB, 768, "pcie4", 4, 1800, 300, _AMPERE_PRO, bf16=154.8, fp32=38.7),
    _gpu("a40", r"\bA40\b", 46068 * MIB, 696, "pcie4", 4, 1740, 300, _AMPERE_PRO, bf16=149.7, fp32=37.4),
    _gpu("a30", r"\bA30\b", 24576 * MIB, 933, "pcie4", 4, 1440, 165, _AMPERE_PRO, bf16=165.0, fp32=10.3),
    _gpu("a16", r"\bA16\b", 15356 * MIB, 200, "pcie4", 4, 1695, 63, _AMPERE_PRO, bf16=18.0, fp32=4.5),
    _gpu("a10g", r"\bA10G\b", 23028 * MIB, 600, "pcie4", 4, 1710, 300,
         "AWS's A10: https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/ (memory, fewer tensor "
         "operations); 70 TFLOPS unconfirmed", bf16=70.0, fp32=35.0),
    _gpu("a10", r"\bA10\b", 23028 * MIB, 600, "pcie4", 4, 1695, 150, _AMPERE_PRO, bf16=125.0, fp32=31.2),
    _gpu("t4", r"\bT4\b", 15360 * MIB, 320, "pcie3", 3, 1590, 70, "NVIDIA T4 datasheet; fp16 for bf16; https://github.com/kentjliu/acml-project1",
         bf16=65.0, fp32=8.1, compute_efficiency=0.5),
    _gpu("v100", r"\bV100\b", 16384 * MIB, 900, "pcie3", 3, 1530, 300, "NVIDIA V100 SXM2 datasheet; fp16 for bf16; https://github.com/winston-zhang-orz/gpu-specs",
         bf16=125.0, fp32=15.7),
    _gpu("p100", r"\bP100\b", 16384 * MIB, 732, "pcie3", 3, 1328, 250, _PASCAL, bf16=18.7, fp32=9.3),
    _gpu("p40", r"\bP40\b", 24576 * MIB, 347, "pcie3", 3, 1531, 250, _PASCAL, bf16=11.8, fp32=11.8),
    _gpu("a100-40gb", r"\bA[18]00[- ].*40 ?GB", 40960 * MIB, 1555, "nvlink3", 4, 1410, 400,
         "NVIDIA A100 40GB SXM datasheet; https://github.com/winston-zhang-orz/gpu-specs", bf16=312.0, fp32=19.5),
    _gpu("a100-pcie", r"\bA[18]00[- ]PCIE?.*80 ?GB|\bA[18]00 80 ?GB PCIe", 81920 * MIB, 1935, "pcie4", 4, 1410, 300,
         "NVIDIA A100 80GB PCIe datasheet; https://github.com/winston-zhang-orz/gpu-specs", bf16=312.0, fp32=19.5),
    _gpu("a100", r"\bA[18]00\b", 81920 * MIB, 2039, "nvlink3", 4, 1410, 400, "NVIDIA A100 80GB SXM datasheet; https://github.com/winston-zhang-orz/gpu-specs",
         bf16=312.0, fp32=19.5),
    _gpu("h100-nvl", r"\bH100 NVL\b", 95830 * MIB, 3900, "nvlink4", 5, 1785, 400,
         "NVIDIA H100 NVL datasheet; tensor figures unconfirmed",
         bf16=835.5, fp8=1671.0, fp32=60.0),
    _gpu("h100-pcie", r"\bH100 PCIe\b", 81559 * MIB, 2000, "pcie5", 5, 1755, 350, "NVIDIA H100 PCIe datasheet; https://github.com/winston-zhang-orz/gpu-specs",
         bf16=756.5, fp8=1513.0, fp32=51.0),
    _gpu("h100", r"\bH[18]00\b", 81559 * MIB, 3350, "nvlink4", 5, 1980, 700, "NVIDIA H100 SXM datasheet; https://lzwjava.github.io/nvidia-h200-gpu-specs-en",
         bf16=989.4, fp8=1978.9, fp32=67.0),
    _gpu("h200-nvl", r"\bH200 NVL\b", 143771 * MIB, 4800, "nvlink4", 5, 1785, 600,
         "NVIDIA H200 NVL datasheet; tensor figures unconfirmed",
         bf16=835.5, fp8=1671.0, fp32=60.0),
    _gpu("gh200", r"\bGH200\b", 97871 * MIB, 4000, "nvlink4", 5, 1980, 700,
         "NVIDIA GH200 datasheet, 96 GB; unconfirmed",
         bf16=989.4, fp8=1978.9, fp32=67.0),
    _gpu("h200", r"\bH200\b", 143771 * MIB, 4800, "nvlink4", 5, 1980, 700, "NVIDIA H200 SXM datasheet; https://lzwjava.github.io/nvidia-h200-gpu-specs-en",
         bf16=989.4, fp8=1978.9, fp32=67.0),
    _gpu("h20", r"\bH20\b", 97871 * MIB, 4000, "nvlink4", 5, 1980, 400,
         "https://www.tweaktown.com/news/95224/nvidias-tweaked-h20-ai-gpu-enters-mass-production-in-q2-2024-destined-"
         "for-china/index.html",
         bf16=148.0, fp8=296.0, fp32=44.0, compute_efficiency=0.95),  # little arithmetic for its bandwidth
    _gpu("gb200", r"\bGB200\b", 186e9, 8000, "nvlink5", 6, 1965, 1200, "NVIDIA GB200 NVL72 datasheet; https://glennklockwood.com/garden/processors/B200",
         bf16=2500.0, fp8=5000.0, fp4=10000.0, fp32=80.0, **_HBM3E),
    _gpu("b200", r"\bB200\b", 183359 * MIB, 8000, "nvlink5", 6, 1965, 1000, "NVIDIA HGX B200 datasheet; https://glennklockwood.com/garden/processors/B200",
         bf16=2250.0, fp8=4500.0, fp4=9000.0, fp32=80.0, **_HBM3E),
    _gpu("gb300", r"\bGB300\b", 279e9, 8000, "nvlink5", 6, 1965, 1400, f"NVIDIA GB300 NVL72 datasheet; {_B300}",
         bf16=2500.0, fp8=5000.0, fp4=15000.0, fp32=80.0, memory_efficiency=0.78, compute_efficiency=0.6),
    _gpu("b300", r"\bB300\b", 270e9, 7700, "nvlink5", 6, 1965, 1100, f"NVIDIA HGX B300 datasheet; {_B300}",
         bf16=2250.0, fp8=4500.0, fp4=14000.0, fp32=75.0, memory_efficiency=0.78, compute_efficiency=0.6),
    _gpu("gb10", r"\bGB10\b|DGX Spark", 128e9, 273, "ethernet-400g", None, 2411, 140, "NVIDIA DGX Spark hardware guide; https://huggingface.co/hardware/gb10",
         bf16=125.0, fp8=250.0, fp4=500.0, fp32=31.0, decode_power_w=45.0, **_GEFORCE),
    _gpu("mi355x", r"\bMI355X?\b", 288e9, 8000, "infinity-fabric", 5, 2400, 1400, _CDNA4,
         bf16=2516.6, fp8=5033.2, fp4=10066.3, fp32=157.3, **_CDNA),
    _gpu("mi350x", r"\bMI350X?\b", 288e9, 8000, "infinity-fabric", 5, 2200, 1000, _CDNA4,
         bf16=2306.9, fp8=4613.7, fp4=9227.5, fp32=144.2, **_CDNA),
    _gpu("mi325x", r"\bMI325X?\b", 256e9, 6000, "infinity-fabric", 5, 2100, 1000,
         "AMD Instinct MI325X datasheet; unconfirmed",
         bf16=1307.4, fp8=2614.9, fp32=163.4, **_CDNA),
    _gpu("mi300x", r"\bMI300X?\b", 192e9, 5300, "infinity-fabric", 5, 2100, 750, "AMD Instinct MI300X datasheet; https://github.com/alpharomercoma/MI300X-vs-H200",
         bf16=1307.4, fp8=2614.9, fp32=163.4, **_CDNA),
    _gpu("mi250x", r"\bMI250X?\b", 128e9, 3277, "infinity-fabric", 4, 1700, 560,
         "AMD Instinct MI250X datasheet, both dies, which drivers show as two devices; unconfirmed",
         bf16=383.0, fp32=47.9, **_CDNA),
    Device(
        name="cpu",  # one core of a current server with AVX2, the engine's default without GPUs
        memory_bytes=8 * GB,
        bandwidth_bytes_s=20 * GB,
        tflops={"fp32": 0.1},
        link="local",
        power_w=15,
        source="one core, 3 GHz, two 256-bit FMA units; use --calibrate for a machine at hand",
        memory_efficiency=0.8,
        compute_efficiency=0.8,
        kernel_s=4e-6,
        has_graphs=False,
        shares_memory=True,
    ),
)  # fmt: skip

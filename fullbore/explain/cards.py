"""What cards can do, from their makers' data sheets. Only what rules need: memory bandwidth, clock, power, link.

Sources: NVIDIA data sheets and architecture white papers (H100, H200, B200/GB200, GB300, A100, A10/A30/A40, L4, L40S,
T4, V100, P100/P40, RTX 20/30/40/50, RTX A6000, RTX 6000 Ada, RTX PRO 6000 Blackwell), DGX Spark hardware overview
(GB10), AMD Instinct data sheets (MI250X, MI300X, MI325X). H20's figures are as published by resellers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Bytes per second of one lane in one direction, after encoding.
_LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9, 7: 15.1e9}


@dataclass(frozen=True)
class Card:
    """`boost_mhz`: what SM clocks reach under load; `power_w`: the board's rated power."""

    name: str
    memory_gb_s: float
    boost_mhz: float
    power_w: float
    bf16_tflops: float  # dense
    link_gen: int
    link_width: int = 16
    link_is_meaningful: bool = True  # False: the GPU is not behind PCIe, whatever the driver reports
    busy_power_w: float | None = None  # decoding, where it is far below `power_w`


def _card(name: str, pattern: str, *values: float | int, **more: bool | float) -> tuple[re.Pattern[str], Card]:
    bandwidth, boost, power, tflops, gen = values
    card = Card(name, bandwidth, boost, power, tflops, int(gen), **more)  # type: ignore[arg-type]
    return re.compile(pattern, re.I), card


# The first pattern that fits wins: special variants stand before the general name.
_CARDS = [
    _card("GB300", r"\bGB300\b|\bB300\b", 8000, 1965, 1400, 2500, 6),
    _card("GB200", r"\bGB200\b", 8000, 1965, 1200, 2500, 6),
    _card("B200", r"\bB200\b", 7700, 1965, 1000, 2250, 6),
    _card("GB10", r"\bGB10\b|DGX Spark", 273, 2411, 140, 125, 5, link_is_meaningful=False, busy_power_w=45.0),
    _card("GH200", r"\bGH200\b", 4000, 1980, 700, 989, 5),
    _card("H200 NVL", r"\bH200 NVL\b", 4800, 1785, 600, 835, 5),
    _card("H200", r"\bH200\b", 4800, 1980, 700, 989, 5),
    _card("H20", r"\bH20\b", 4000, 1980, 500, 148, 5),
    _card("H100 NVL", r"\bH100 NVL\b", 3900, 1785, 400, 835, 5),
    _card("H100 PCIe", r"\bH100 PCIe\b", 2000, 1755, 350, 756, 5),
    _card("H100", r"\bH[18]00\b", 3350, 1980, 700, 989, 5),
    _card("A100 40 GB", r"\bA[18]00[- ].*40 ?GB", 1555, 1410, 400, 312, 4),
    _card("A100 80 GB PCIe", r"\bA[18]00[- ]PCIE?.*80 ?GB|\bA[18]00 80GB PCIe", 1935, 1410, 300, 312, 4),
    _card("A100 80 GB", r"\bA[18]00\b", 2039, 1410, 400, 312, 4),
    _card("RTX A6000", r"\bA6000\b(?! Ada)", 768, 1800, 300, 155, 4),
    _card("RTX 6000 Ada", r"RTX 6000 Ada", 960, 2505, 300, 364, 4),
    _card("RTX PRO 6000 Max-Q", r"RTX PRO 6000.*Max-?Q", 1792, 2280, 300, 400, 5),
    _card("RTX PRO 6000", r"RTX PRO 6000", 1792, 2430, 600, 500, 5),
    _card("RTX PRO 5000", r"RTX PRO 5000", 1344, 2400, 300, 300, 5),
    _card("A40", r"\bA40\b", 696, 1740, 300, 150, 4),
    _card("A30", r"\bA30\b", 933, 1440, 165, 165, 4),
    _card("A10", r"\bA10G?\b", 600, 1695, 150, 125, 4),
    _card("A16", r"\bA16\b", 200, 1695, 63, 36, 4),
    _card("L40S", r"\bL40S\b", 864, 2520, 350, 362, 4),
    _card("L40", r"\bL40\b", 864, 2490, 300, 181, 4),
    _card("L20", r"\bL20\b", 864, 2520, 275, 119, 4),
    _card("L4", r"\bL4\b", 300, 2040, 72, 121, 4, link_width=16),
    _card("T4", r"\bT4\b", 320, 1590, 70, 65, 3),
    _card("V100", r"\bV100\b", 900, 1530, 300, 125, 3),
    _card("P100", r"\bP100\b", 732, 1328, 250, 19, 3),
    _card("P40", r"\bP40\b", 347, 1531, 250, 12, 3),
    _card("RTX 5090 D", r"\b5090 ?D\b", 1792, 2407, 575, 209, 5),
    _card("RTX 5090", r"\b5090\b", 1792, 2407, 575, 209, 5),
    _card("RTX 5080", r"\b5080\b", 960, 2617, 360, 113, 5),
    _card("RTX 5070 Ti", r"\b5070 ?Ti\b", 896, 2452, 300, 88, 5),
    _card("RTX 5070", r"\b5070\b", 672, 2512, 250, 62, 5),
    _card("RTX 5060 Ti", r"\b5060 ?Ti\b", 448, 2572, 180, 47, 5),
    _card("RTX 4090", r"\b4090\b", 1008, 2520, 450, 165, 4),
    _card("RTX 4080", r"\b4080\b", 717, 2505, 320, 97, 4),
    _card("RTX 4070 Ti Super", r"\b4070 ?Ti ?S", 672, 2610, 285, 88, 4),
    _card("RTX 4070", r"\b4070\b", 504, 2475, 200, 58, 4),
    _card("RTX 4060 Ti", r"\b4060 ?Ti\b", 288, 2535, 165, 44, 4, link_width=8),
    _card("RTX 3090 Ti", r"\b3090 ?Ti\b", 1008, 1860, 450, 80, 4),
    _card("RTX 3090", r"\b3090\b", 936, 1695, 350, 71, 4),
    _card("RTX 3080 Ti", r"\b3080 ?Ti\b", 912, 1665, 350, 68, 4),
    _card("RTX 3080", r"\b3080\b", 760, 1710, 320, 60, 4),
    _card("RTX 3070", r"\b3070\b", 448, 1725, 220, 41, 4),
    _card("RTX 3060 Ti", r"\b3060 ?Ti\b", 448, 1665, 200, 32, 4),
    _card("RTX 3060", r"\b3060\b", 360, 1777, 170, 26, 4),
    _card("RTX 2080 Ti", r"\b2080 ?Ti\b", 616, 1545, 250, 54, 3),
    _card("MI325X", r"\bMI325X?\b", 6000, 2100, 1000, 1307, 5),
    _card("MI300X", r"\bMI300X?\b", 5300, 2100, 750, 1307, 5),
    _card("MI250X", r"\bMI250X?\b", 3277, 1700, 560, 383, 4),
]


def find_card(name: str | None) -> Card | None:
    """The card of that name as the driver, or a user, writes it."""
    if not name:
        return None
    return next((card for pattern, card in _CARDS if pattern.search(name)), None)


def link_bytes_s(gen: float, width: float) -> float:
    """Payload bandwidth of a PCIe link in one direction, before protocol overhead."""
    return _LANE_BYTES_S.get(round(gen), 0.25e9) * width

"""clock-throttle: the GPU runs, but slowly: SM clocks far below what the card reaches under load.

From heat, a power limit, a locked clock, or a stuck power state (spark-vllm-docker#334: GB10 at 702 MHz instead of 2398
until mains power was cut). A GPU that idles also lowers its clock: only samples under load count.
"""

from __future__ import annotations

import re

from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain
from fullbore.plan.devices import device_named

_LOW = 0.6  # of the card's boost clock, of its neighbours', or of what it was
_LOW_WITH_HISTORY = 0.8
_WORKING_PERCENT = 30.0
_LOW_POWER_LIMIT = 0.7  # of the board's rating
_AT_LIMIT = 0.93
_CLOCK_BEFORE = re.compile(r"clock|mhz", re.I)
_SPEED_BEFORE = re.compile(r"(?:last|before|previous|normal|healthy|expected|usual|was|old|baseline)", re.I)
_REASONS = {
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "heat",
    "thermal_violation": "heat",
    "hw_slowdown": "the board",
    "hw_power_brake_slowdown": "the power supply",
    "sw_power_cap": "the power limit",
    "power_violation": "the power limit",
}
_STUCK = 0.5  # of the normal clock
# Known stuck states: card, what was seen, where.
_KNOWN = {
    "gb10": "seen before on GB10: about 702 MHz instead of 2398 MHz under load, half the tokens/s, not cured by a "
    "reboot but by cutting mains power for some minutes (spark-vllm-docker#334)"
}


def clock_throttle(s: Situation) -> Finding | None:
    if s.progress.is_frozen:
        return None
    slow = [(gpu, reference) for gpu in s.gpus if (reference := _reference(s, gpu)) is not None]
    if not slow:
        return None
    worst, (reference_mhz, why, is_history) = min(
        slow, key=lambda entry: entry[0].load.sm_clock_mhz.median / entry[1][0]
    )
    clock = worst.load.sm_clock_mhz.median
    share = clock / reference_mhz
    facts = (
        [_clock_fact(gpu) for gpu, _ in slow[:8]] + [why] + _reason_facts(slow) + _speed_facts(s) + _temperature(worst)
    )
    strength = 0.85 if share < 0.5 or is_history else 0.7
    if (is_history and share < _LOW) or (len(slow) > 1 and share < 0.5 and _speed_facts(s)):
        strength = 0.95
    known = _known(worst, share)
    who = "All GPUs run" if len(slow) == len(s.gpus) and len(s.gpus) > 1 else f"{worst.label} runs"
    return Finding(
        "clock-throttle",
        strength,
        f"{who} at {show(clock)} MHz under load where {show(reference_mhz)} MHz is normal ({share:.0%}): slow clocks, "
        "not idle stages. "
        f"{'A pipeline runs at the pace of its slowest stage.' if (s.P or 1) > 1 else ''}".strip(),
        evidence=facts + ([Fact(known)] if known else []),
        fix=_fix(worst, known is not None),
        gain=Gain(
            f"{show(1 + (1 / share - 1) * 0.3)} to {show(1 / share)} × tokens/s",
            1 + (1 / share - 1) * 0.3,
            1 / share,
            assumes="work bound by memory gains less from the clock than work bound by computing",
        ),
        verify="nvidia-smi --query-gpu=clocks.sm,clocks_event_reasons.active,power.draw,temperature.gpu "
        "--format=csv -l 1 under load",
        precedent="spark-vllm-docker#334",
        unexplained="" if _reason_facts(slow) else "why the clock is low: the samples carry no throttle reasons",
    )


def _reference(s: Situation, gpu: Gpu) -> tuple[float, Fact, bool] | None:
    """(MHz that would be normal, why, is it this machine's own past) if the GPU is clearly below."""
    if (
        not gpu.load.sm_clock_mhz
        or not gpu.load.utilisation_percent
        or gpu.load.utilisation_percent.mean < _WORKING_PERCENT
    ):
        return None
    clock = gpu.load.sm_clock_mhz.median
    if clock <= 0:
        return None
    history = _noted_clock(s)
    if history is not None and clock < _LOW_WITH_HISTORY * history.number:
        return history.number, history, True
    if _is_at_rated_power(gpu):
        return None  # a card at its rated power chooses its clock: that is normal
    card = device_named(gpu.name)
    normal = card.boost_mhz if card is not None else gpu.max_sm_clock_mhz
    if normal and clock < _LOW * normal:
        where = (
            f"{card.name.upper()} reaches {show(normal)} MHz (data sheet)"
            if card is not None
            else f"its maximum is {show(normal)} MHz"
        )
        return normal, Fact(where, normal, gpu.where), False
    others = [
        o for o in s.gpus if o is not gpu and o.name == gpu.name and o.load.sm_clock_mhz and o.load.utilisation_percent
    ]
    fastest = max((o.load.sm_clock_mhz.median for o in others), default=0.0)
    if fastest and clock < _LOW * fastest:
        return (
            fastest,
            Fact(f"GPUs of the same model beside it run at {show(fastest)} MHz", fastest, others[0].where),
            False,
        )
    return None


def _is_at_rated_power(gpu: Gpu) -> bool:
    card = device_named(gpu.name)
    if not gpu.load.power_w or not gpu.power_limit_w or gpu.load.power_w.mean < _AT_LIMIT * gpu.power_limit_w:
        return False
    rated = gpu.default_power_limit_w or (card.power_w if card is not None else gpu.power_limit_w)
    return gpu.power_limit_w >= _LOW_POWER_LIMIT * rated


def _noted_clock(s: Situation) -> Fact | None:
    for path, note in s.evidence.notes.items():
        numbers = [n for n in numbers_in(note.value) if 100 <= n <= 4000]
        if _CLOCK_BEFORE.search(path) and numbers and "mem" not in path and not re.search(r"now|current|today", path):
            return Fact(f"{path}: {show(numbers[0])}", numbers[0], note.source)
    return None


def _clock_fact(gpu: Gpu) -> Fact:
    power = f", {show(round(gpu.load.power_w.mean))} W" if gpu.load.power_w else ""
    text = (
        f"{gpu.label}: SM clock {show(gpu.load.sm_clock_mhz.median)} MHz at "
        f"{show(round(gpu.load.utilisation_percent.mean))} % utilisation{power}"
    )
    return Fact(text, gpu.load.sm_clock_mhz.median, gpu.where)


def _reason_facts(slow: list[tuple[Gpu, tuple[float, Fact, bool]]]) -> list[Fact]:
    facts = []
    for gpu, _ in slow:
        for reason, source in gpu.throttle_reasons.items():
            facts.append(Fact(f"{gpu.label}: {reason} active ({_REASONS.get(reason, 'the driver')})", reason, source))
        card = device_named(gpu.name)
        rated = gpu.default_power_limit_w or (card.power_w if card is not None else None)
        if rated and gpu.power_limit_w and gpu.power_limit_w < _LOW_POWER_LIMIT * rated:
            text = f"{gpu.label}: power limit {show(gpu.power_limit_w)} W, rated {show(rated)} W"
            facts.append(Fact(text, gpu.power_limit_w, gpu.where))
    return facts[:8]


def _speed_facts(s: Situation) -> list[Fact]:
    """Now and before, as noted and measured."""
    facts = []
    for path, note in s.evidence.notes.items():
        if _SPEED_BEFORE.search(path) and re.search(r"tok_?s|tps|tokens", path):
            facts.append(note.fact(f"{path}: {note.value}"))
    if facts and s.speed.tok_s is not None:
        facts.append(s.speed.tok_s)
    if facts and s.progress.tok_s is not None:
        facts.append(s.progress.tok_s)
    return facts


def _temperature(gpu: Gpu) -> list[Fact]:
    if not gpu.load.temperature_c:
        return []
    return [
        Fact(f"{gpu.label}: up to {show(gpu.load.temperature_c.maximum)} °C", gpu.load.temperature_c.maximum, gpu.where)
    ]


def _known(gpu: Gpu, share: float) -> str | None:
    """A state that this card is known to get stuck in: less than half of its clock, for no reason that it gives."""
    card = device_named(gpu.name)
    has_reason = any(_REASONS.get(reason) for reason in gpu.throttle_reasons)
    return _KNOWN.get(card.name) if card is not None and share < _STUCK and not has_reason else None


def _fix(gpu: Gpu, is_stuck: bool) -> list[str]:
    card = device_named(gpu.name)
    lines = []
    if any(_REASONS.get(reason) == "heat" for reason in gpu.throttle_reasons):
        lines.append("cool it: airflow, fans, thermal pads; clocks recover below the slowdown temperature")
    if any(_REASONS.get(reason) == "the power limit" for reason in gpu.throttle_reasons) or (
        card is not None and gpu.power_limit_w is not None and gpu.power_limit_w < _LOW_POWER_LIMIT * card.power_w
    ):
        lines.append(
            f"sudo nvidia-smi -i {gpu.index} -pl {show(card.power_w) if card else 'WATTS'}   (the rated power limit)"
        )
    lines.append(
        "sudo nvidia-smi -rgc && sudo nvidia-smi -rac   (undo locked and application clocks), and persistence mode: "
        "-pm 1"
    )
    if is_stuck:
        lines.append(
            "full power cycle: shut down, cut mains power for some minutes, start again (a reboot is not enough)"
        )
    else:
        lines.append("if it stays: full power cycle, power cables and supply, BIOS and driver versions")
    return lines

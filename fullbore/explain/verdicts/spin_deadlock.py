"""spin-deadlock: requests are held, no token comes out, and receives spin at the power of an idle GPU.

Utilisation says that a kernel is resident, not that it works; /health answers all the while. Frozen tokens together
with held requests and low power are the test (spark-vllm-docker#260, vllm#37729).
"""

from __future__ import annotations

from fullbore.explain.busy import is_low_power
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_SPINS = 60.0  # percent


def spin_deadlock(s: Situation) -> Finding | None:
    if not s.progress.frozen or s.progress.moving:
        return None
    hot, cool = _power_facts(s)
    dead = s.evidence.logs.marks.get("killed", "engine-dead", "out-of-memory")
    finding = Finding(
        "spin-deadlock",
        0.75,
        "No token has come out although requests are running: the pipeline is stuck (frozen, zero progress), each "
        "stage waiting for another.",
        evidence=[*s.progress.frozen, *cool],
        against=hot,
        fix=_fix(s),
        gain=Gain("from nothing to normal speed, until it happens again"),
        verify="two dumps of /metrics 30 s apart under load: the generated-tokens counter must grow; watch that "
        "and power draw, not /health or utilisation",
        precedent="spark-vllm-docker#260, vllm#37729, vllm#46195",
    )
    if cool:
        finding.summary += (
            " Utilisation is high but power is that of idle GPUs: receive kernels spin, nothing computes."
        )
        finding.strength = 0.95
    elif len(s.progress.frozen) > 1:
        finding.strength = 0.85
    if hot:
        finding.strength -= 0.3  # work without tokens is more likely one long prompt
    if dead is not None:
        finding.evidence.insert(0, dead.fact())
        finding.summary += " One process has died; its peers wait for it."
    finding.unexplained = "which stage stopped first, and why: stacks of all ranks (py-spy dump) tell"
    noted = _noted_power(s)
    if noted is not None:
        finding.evidence.append(noted)
    return finding


def _power_facts(s: Situation) -> tuple[list[Fact], list[Fact]]:
    """(GPUs that draw power as if they worked, GPUs that are utilised but cool)."""
    hot, cool = [], []
    for gpu in s.gpus:
        if not gpu.has_load or not gpu.load.power_w:
            continue
        fact = _power_fact(gpu)
        if is_low_power(gpu):
            cool.append(fact)
        elif is_low_power(gpu) is False and gpu.load.utilisation_percent.mean > _SPINS:
            hot.append(Fact(f"{fact.text}: that is work", None, gpu.where))
    spins = any(gpu.has_load and gpu.load.utilisation_percent.mean > _SPINS and is_low_power(gpu) for gpu in s.gpus)
    return hot, cool if spins else []


def _power_fact(gpu: Gpu) -> Fact:
    text = (
        f"{gpu.label}: {show(round(gpu.load.utilisation_percent.mean))} % utilised at "
        f"{show(round(gpu.load.power_w.mean))} W power draw"
    )
    return Fact(text, gpu.load.power_w.mean, gpu.where)


def _noted_power(s: Situation) -> Fact | None:
    for path, note in s.evidence.notes.items():
        if "power" in path and "healthy" in path:
            return note.fact(f"{path}: {note.value}")
    return None


def _fix(s: Situation) -> list[str]:
    lines = [
        "take evidence before restarting: py-spy dump --pid PID for the process of every stage, and the logs of all "
        "ranks",
        "restart the engine; have a watchdog restart it when generated tokens stay unchanged while requests run",
    ]
    if s.engine == "vllm":
        lines.append(
            "--distributed-executor-backend mp where all stages are on one machine; a newer release (vllm#37729, "
            "vllm#46195)"
        )
        if (dtype := s.settings.reading("kv_cache_dtype")) is not None and "fp8" in str(dtype.value):
            lines.append(
                "without --kv-cache-dtype fp8, or with --no-enable-prefix-caching: both are implicated in vllm#37729"
            )
    if s.engine == "sglang":
        lines.append("--watchdog-timeout 60 and --dist-timeout 120, so that a hang ends in minutes; a newer release")
    return lines

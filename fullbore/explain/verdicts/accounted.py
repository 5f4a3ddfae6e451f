"""What fullbore's own account says: every idle stage-second has one cause, and the largest one is the verdict."""

from __future__ import annotations

from fullbore.explain.evidence.account import Account
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import more_kv, more_requests, partition, spread_over_micro_batches
from fullbore.explain.gains import Run, simulated_factor
from fullbore.explain.physics import balanced_partition, stage_costs
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_WORTH_SAYING = 0.1  # of all stage-seconds
_VERDICTS = {
    "few-requests": "few-requests",
    "packed": "packed-slot",
    "depth": "ring-order",
    "imbalance": "imbalance",
    "transfer": "slow-link",
    "control": "control-plane-latency",
    "memory": "kv-limited",
}
_SUMMARIES = {
    "few-requests": "Stages idle because fewer requests run than there are stages.",
    "packed": "Stages idle because the requests travel in too few micro-batches.",
    "depth": "Stages idle because the limit on micro-batches in flight holds back work that could run.",
    "imbalance": "Stages idle because they wait for a slower one, which sets the pace.",
    "transfer": "Stages idle because hidden states are still on their way.",
    "control": "Stages idle because they wait for the driver: for results to come back and plans to go out.",
    "memory": "Stages idle because no KV blocks are free for requests that wait.",
}


def accounted(s: Situation) -> Finding | None:
    """The largest cause of idle time in the newest account, if it is worth saying."""
    if not s.evidence.accounts:
        return None
    account = s.evidence.accounts[-1]
    cause = account.largest()
    share = account.share(cause)
    if share < _WORTH_SAYING or cause not in _VERDICTS:
        return None
    return Finding(
        _VERDICTS[cause],
        0.95,
        f"{_SUMMARIES[cause]} That takes {share:.0%} of all stage-seconds.",
        evidence=[
            Fact(f"{share:.0%} of all stage-seconds: {cause}", share, account.source),
            *_other_causes(account, cause),
        ],
        fix=_fix(s, account, cause),
        gain=_gain(s, account, cause, share),
        verify=f"`{cause}` in a new account should shrink",
        precedent="docs/accounting.md",
    )


def _other_causes(account: Account, largest: str) -> list[Fact]:
    shares = [(cause, account.share(cause)) for cause in ("compute", "host", *_VERDICTS, "uneven", "fill-drain")]
    listed = ", ".join(f"{cause} {share:.0%}" for cause, share in shares if cause != largest and share >= 0.005)
    return [Fact(f"the rest: {listed}", None, account.source)] if listed else []


def _fix(s: Situation, account: Account, cause: str) -> list[str]:
    count = max(round(account.running or s.load.most or s.P or 1), 1)
    if cause == "few-requests":
        return more_requests(s, count)
    if cause == "packed":
        return spread_over_micro_batches(s, count)
    if cause == "imbalance":
        after = _balanced(account)
        return partition(s, after) if after else ["leave out --pp-layer-partition: fullbore then divides by cost"]
    if cause == "memory":
        return more_kv(s)
    if cause == "depth":
        return ["--pp-async-batch-depth auto, or one more than now"]
    if cause == "control":
        return ["--pp-async-batch-depth auto; keep the driver's core free of other work (see /timeline)"]
    return ["the link between the stages: measure its latency and bandwidth; neighbouring stages on one machine"]


def _gain(s: Situation, account: Account, cause: str, share: float) -> Gain:
    """Two simulations where the recording has the stages' times; else what removing the idle time could bring."""
    factor = _simulated(account, cause)
    if factor is not None:
        return Gain(
            f"{show(factor)} × tokens/s in a simulation of these stages without it",
            min(factor, 1.0 + (factor - 1.0) * 0.8),
            factor,
            assumes="stage times as recorded, at the load that was recorded",
        )
    stages = s.P or len(account.stages)
    if cause == "few-requests" and s.load.most:
        high = stages / max(s.load.most, 1)
        return Gain(f"up to {show(high)} × tokens/s of all requests together with {stages} in flight", 1.0, high)
    high = 1 / (1 - share) if share < 0.95 else float(stages)
    return Gain(
        f"up to {show(high)} × tokens/s",
        1.0,
        high,
        assumes="stages use the time for work that waits, and a micro-batch costs what it costs now",
    )


def _simulated(account: Account, cause: str) -> float | None:
    """Tokens/s without the cause over tokens/s with it."""
    if not account.stage_s or account.running is None or not account.micro_batch:
        return None
    requests = max(round(account.running), 1)
    count = max(round(requests / account.micro_batch), 1)
    now = Run(lambda size: 1.0, account.stage_s, requests, micro_batches=count, hops_s=account.hops_s)
    if cause == "transfer":
        return simulated_factor(now, now.changed(hops_s=[0.0] * len(account.hops_s)))
    if cause == "imbalance" and (after := _balanced(account)):
        return simulated_factor(now, now.changed(stage_factors=stage_costs(_layer_costs(account), after)))
    if cause == "packed" and len(account.sizes_s) > 1:
        sizes = sorted(account.sizes_s)
        first, last = sizes[0], sizes[-1]
        slope = (account.sizes_s[last] - account.sizes_s[first]) / (last - first)
        total = sum(account.stage_s)
        curve = Run(
            lambda size: max(account.sizes_s[first] + slope * (size - first), account.sizes_s[first]) / total,
            account.stage_s,
            requests,
            micro_batches=count,
            hops_s=account.hops_s,
        )
        return simulated_factor(curve, curve.changed(micro_batches=None))
    return None


def _balanced(account: Account) -> list[int]:
    """Layers per stage with equal times, from each stage's time per layer."""
    if not account.stage_s or len(account.layers) != len(account.stage_s) or min(account.layers) < 1:
        return []
    return balanced_partition(_layer_costs(account), len(account.stage_s))


def _layer_costs(account: Account) -> list[float]:
    """Each layer at its stage's time divided by the stage's layers."""
    pairs = zip(account.stage_s, account.layers, strict=True)
    return [time / layers for time, layers in pairs for _ in range(layers)]

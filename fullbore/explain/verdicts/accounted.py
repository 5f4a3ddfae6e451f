"""What fullbore's own account says: every idle stage-second has one cause, and the largest one is the verdict."""

from __future__ import annotations

from fullbore.explain.evidence.account import Account
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import more_kv, more_requests, partition, spread_over_micro_batches
from fullbore.explain.recorded_fixes import LEAST_FACTOR, Fixes, fixes_of
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_WORTH_SAYING = 0.1  # of all stage-seconds
_UNSURE = 0.1  # of a simulated gain
_FULL = 0.8  # of the time: what a stage loses to arrivals and ends of requests is no fault
_VERDICTS = {
    "few-requests": "few-requests",
    "packed": "packed-slot",
    "depth": "ring-order",
    "imbalance": "imbalance",
    "transfer": "slow-link",
    "control": "control-plane-latency",
    "memory": "kv-limited",
}
ACCOUNTED = frozenset(_VERDICTS.values())  # what an account decides
_SUMMARIES = {
    "few-requests": "Stages idle because fewer requests run than there are stages.",
    "packed": "Stages idle because the requests travel in too few micro-batches.",
    "depth": "Stages idle because the limit on micro-batches in flight holds back work that could run.",
    "imbalance": "Stages idle because they wait for a slower one, which sets the pace.",
    "transfer": "Stages idle because hidden states are still on their way.",
    "control": "Stages idle because they wait for the driver: for results to come back and plans to go out.",
    "memory": "Stages idle because no KV blocks are free for requests that wait.",
}
_WITH = {
    "few-requests": " with {stages} requests in flight; none for one request by itself",
    "packed": ", their requests spread over more micro-batches",
    "depth": " with automatic depth",
    "imbalance": " with that partition",
    "transfer": " on links that take no time",
    "control": " with a driver that takes no time",
    "memory": " with room for all requests",
}


def accounted(s: Situation) -> Finding | None:
    """The largest cause of idle time in the newest account whose end would bring tokens/s."""
    if not s.evidence.accounts:
        return None
    account = s.evidence.accounts[-1]
    causes = [cause for cause in _VERDICTS if account.share(cause) >= _WORTH_SAYING]
    causes.sort(key=account.share, reverse=True)
    fixes = fixes_of(account)
    for cause in causes:
        if (gain := _gain(s, account, fixes, cause)) is not None:
            return _finding(s, account, fixes, cause, gain)
    return _nothing_wrong(account, fixes, causes)


def _finding(s: Situation, account: Account, fixes: Fixes, cause: str, gain: Gain) -> Finding:
    share = account.share(cause)
    return Finding(
        _VERDICTS[cause],
        0.95,
        f"{_SUMMARIES[cause]} That takes {share:.0%} of all stage-seconds.",
        evidence=[
            Fact(f"{share:.0%} of all stage-seconds: {cause}", share, account.source),
            *_other_causes(account, cause),
        ],
        fix=_fix(s, account, fixes, cause),
        gain=gain,
        verify=f"`{cause}` in a new account should shrink",
        precedent="docs/accounting.md",
    )


def _nothing_wrong(account: Account, fixes: Fixes, causes: list[str]) -> Finding | None:
    """The stages work, or idle for causes whose end would bring nothing."""
    working = account.share("compute") + account.share("host")
    if account.share("host") >= account.share("compute") or (working < _FULL and not causes):
        return None
    useless = [
        Fact(
            f"{account.share(cause):.0%} of all stage-seconds are {cause}, but without it there would be "
            f"{show(factor)} × the tokens/s: it raises utilisation only",
            factor,
            account.source,
        )
        for cause in causes
        if (factor := fixes.factor(cause)) is not None
    ]
    return Finding(
        "at-roofline",
        0.9 if working >= _FULL else 0.7,
        f"Nothing is wrong with the pipeline: its stages work {working:.0%} of the time in which there are requests, "
        "and no setting would bring more tokens/s from this load.",
        evidence=[
            Fact(f"{account.share('compute'):.0%} of all stage-seconds: compute", None, account.source),
            *useless,
            *_other_causes(account, "compute"),
        ],
        unexplained="whether the stages compute as fast as their hardware can: an account counts a slow stage as busy",
        fix=["for more tokens/s: more requests at once, as far as a larger micro-batch costs little more"],
        verify="`fullbore bench` at more requests at once",
        precedent="docs/accounting.md",
    )


def _other_causes(account: Account, largest: str) -> list[Fact]:
    shares = [(cause, account.share(cause)) for cause in ("compute", "host", *_VERDICTS, "uneven", "fill-drain")]
    listed = ", ".join(f"{cause} {share:.0%}" for cause, share in shares if cause != largest and share >= 0.005)
    return [Fact(f"the rest: {listed}", None, account.source)] if listed else []


def _fix(s: Situation, account: Account, fixes: Fixes, cause: str) -> list[str]:
    count = max(round(account.running or s.load.most or s.P or 1), 1)
    if cause == "few-requests":
        return more_requests(s, count)
    if cause == "packed":
        return spread_over_micro_batches(s, count)
    if cause == "imbalance":
        after = fixes.balanced
        return partition(s, after) if after else ["leave out --pp-layer-partition: fullbore then divides by cost"]
    if cause == "memory":
        return more_kv(s)
    if cause == "depth":
        return ["--pp-async-batch-depth auto, or one more than now"]
    if cause == "control":
        return ["--pp-async-batch-depth auto; keep the driver's core free of other work (see /timeline)"]
    return ["the link between the stages: measure its latency and bandwidth; neighbouring stages on one machine"]


def _gain(s: Situation, account: Account, fixes: Fixes, cause: str) -> Gain | None:
    """Simulated where there is a recording; else what removing the idle time could bring. None: nothing."""
    factor = fixes.factor(cause)
    if factor is not None:
        gained = factor - 1.0
        if factor < LEAST_FACTOR:
            return None
        return Gain(
            f"{show(factor)} × tokens/s in a simulation of the recorded stages{_WITH[cause].format(stages=s.P)}",
            1.0 + (1 - _UNSURE) * gained,
            1.0 + (1 + _UNSURE) * gained,
            assumes="stage times and length of the requests as recorded",
        )
    stages, share = s.P or len(account.stages), account.share(cause)
    if cause == "few-requests" and s.load.most:
        high = stages / max(s.load.most, 1)
        if high < LEAST_FACTOR:
            return None  # as many requests as stages: what is idle are the moments between two requests
        return Gain(f"up to {show(high)} × tokens/s of all requests together with {stages} in flight", 1.0, high)
    high = 1 / (1 - share) if share < 0.95 else float(stages)
    return Gain(
        f"up to {show(high)} × tokens/s",
        1.0,
        high,
        assumes="stages use the time for work that waits, and a micro-batch costs what it costs now",
    )

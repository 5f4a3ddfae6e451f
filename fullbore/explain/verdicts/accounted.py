"""What fullbore's own account says: every idle stage-second has one cause, and the largest one is the verdict."""

from __future__ import annotations

from math import ceil

from fullbore.explain.evidence.account import Account
from fullbore.explain.facts import Fact, show
from fullbore.explain.fixes import more_kv, more_requests, partition, spread_over_micro_batches
from fullbore.explain.recorded_fixes import LEAST_FACTOR, Fixes, fixes_of
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_WORTH_SAYING = 0.1  # of all stage-seconds
_CLOSE = 0.75  # as much as the largest cause
_SURELY = 1.2  # times the tokens/s, by a closed form
_LARGE = 0.2  # of all stage-seconds: a fault also where nothing tells what its end would bring
_UNSURE = 0.1  # of a simulated gain
_FULL = 0.8  # of the time: what a stage loses to arrivals and ends of requests is no fault
_FULL_UNRECORDED = 0.75  # the same where the end of what remains cannot be simulated
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
_MOST_STAGES = 16
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
    """The largest cause of idle time in the most telling account whose end would bring tokens/s."""
    account = s.evidence.account
    if account is None:
        return None
    causes = [cause for cause in _VERDICTS if account.share(cause) >= _WORTH_SAYING]
    causes.sort(key=account.share, reverse=True)
    fixes = fixes_of(account)
    if account.replay is None:
        causes = [cause for cause in causes if cause != "packed" or not _spreads_by_itself(s)]
        if _is_full(account) and not any(account.share(cause) >= _LARGE for cause in causes):
            return _nothing_wrong(s, account, fixes, causes)
    for cause in causes:
        if (gain := _gain(s, account, fixes, cause)) is not None:
            return _finding(s, account, fixes, cause, gain)
    return _nothing_wrong(s, account, fixes, causes)


def _is_full(account: Account) -> bool:
    least = _FULL if account.replay is not None else _FULL_UNRECORDED
    return account.share("compute") + account.share("host") >= least


def _spreads_by_itself(s: Situation) -> bool:
    """Nothing limits how requests are spread: they are in few micro-batches as the scheduler found that fastest."""
    readings = [s.settings.reading(name) for name in ("num_micro_batches", "micro_batch_cap")]
    return all(reading is not None and str(reading.value) == "auto" for reading in readings)


def _strength(account: Account, share: float, gain: Gain, *, is_computed: bool) -> float:
    """What is recorded is simulated; shares alone say how much is lost, not how much of it a fix brings back."""
    if account.replay is not None:
        return 0.95
    if gain.low is not None and gain.low >= _SURELY:
        return 0.9
    if is_computed and gain.high is not None and gain.high >= _SURELY:
        return 0.8
    return 0.9 if share >= 1.5 * _LARGE else 0.8 if share >= _LARGE else 0.55


def _finding(s: Situation, account: Account, fixes: Fixes, cause: str, gain: Gain) -> Finding:
    share = account.share(cause)
    return Finding(
        _VERDICTS[cause],
        _strength(account, share, gain, is_computed=cause == "imbalance" and bool(fixes.balanced)),
        f"{_SUMMARIES[cause]} That takes {share:.0%} of all stage-seconds{_when(account)}{_rival(account, cause)}.",
        evidence=[
            Fact(f"{share:.0%} of all stage-seconds: {cause} {_by_stage(account, cause)}", share, account.source),
            *_other_causes(account, cause),
            *_settings(s, account, cause),
        ],
        unexplained="" if account.replay is not None else _UNRECORDED,
        fix=_fix(s, account, fixes, cause),
        gain=gain,
        verify=f"`{cause}` in a new account should shrink",
        precedent="docs/accounting.md",
    )


_UNRECORDED = (
    "how long the steps on each stage take: with a recording the fix is simulated (fullbore record --url URL --seconds "
    "10 -o run.fbr, under the same load)"
)


def _when(account: Account) -> str:
    return f" at concurrency {account.concurrency}" if account.concurrency is not None else ""


def _rival(account: Account, cause: str) -> str:
    """A second cause that costs nearly as much, where nothing but shares tells them apart."""
    others = [other for other in _VERDICTS if other != cause]
    second = max(others, key=account.share)
    if account.replay is not None or account.share(second) < _CLOSE * account.share(cause):
        return ""
    return f"; {second} takes {account.share(second):.0%}"


def _by_stage(account: Account, cause: str) -> str:
    """The field, and each stage's share."""
    shares = ", ".join(f"{share:.0%}" for share in account.shares(cause)[:_MOST_STAGES])
    more = ", …" if len(account.stages) > _MOST_STAGES else ""
    field = f"stages.idle.{cause}" if account.kind == "bench" else "by stage"
    return f"({field}: {shares}{more})"


def _settings(s: Situation, account: Account, cause: str) -> list[Fact]:
    """The settings that bring the cause about."""
    names = {
        "packed": ("num_micro_batches", "micro_batch_cap"),
        "depth": ("depth",),
        "transfer": ("depth",),
        "control": ("depth",),
        "imbalance": ("partition",),
        "memory": ("kv_tokens",),
        "few-requests": ("max_running",),
    }[cause]
    found = [s.settings.fact(name) for name in names]
    return [fact for fact in found if fact is not None] if account.kind != "account" else []


def _nothing_wrong(s: Situation, account: Account, fixes: Fixes, causes: list[str]) -> Finding | None:
    """The stages work, or idle for causes whose end would bring nothing."""
    working = account.share("compute") + account.share("host")
    is_known = _is_full(account) or (account.replay is not None and causes)
    if account.share("host") >= account.share("compute") or not is_known:
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
        0.7 if not _is_full(account) else 0.9 if account.replay is not None else 0.8,
        f"Nothing is wrong with the pipeline: its stages work {working:.0%} of the time in which there are requests"
        f"{_when(account)}, and "
        + (
            "no setting would bring more tokens/s from this load."
            if account.replay is not None
            else f"no cause of idle time takes {_LARGE:.0%}."
        ),
        evidence=[
            Fact(f"{account.share('compute'):.0%} of all stage-seconds: compute", None, account.source),
            *useless,
            *_other_causes(account, "compute"),
            *_scaling(s, account),
        ],
        unexplained="whether the stages compute as fast as their hardware can: an account counts a slow stage as busy",
        fix=["for more tokens/s: more requests at once, as far as a larger micro-batch costs little more"],
        verify="`fullbore bench` at more requests at once",
        precedent="docs/accounting.md",
    )


def _scaling(s: Situation, account: Account) -> list[Fact]:
    """What more clients brought in the same sweep."""
    lower = [
        row
        for row in s.evidence.bench
        if row.source.file == account.source.file and row.output_tok_s and row.concurrency and account.concurrency
        if row.concurrency < account.concurrency
    ]
    if not lower or not account.tok_s or not account.concurrency:
        return []
    before = max(lower, key=lambda row: row.concurrency or 0)
    clients = account.concurrency / (before.concurrency or 1)
    factor = account.tok_s / (before.output_tok_s or 1.0)
    text = (
        f"{show(factor)} × the tokens/s with {show(clients)} × the clients ({before.concurrency} to "
        f"{account.concurrency}: {show(before.output_tok_s)} to {show(account.tok_s)} tokens/s)"
    )
    return [Fact(text, factor, account.source)]


def _other_causes(account: Account, largest: str) -> list[Fact]:
    shares = [(cause, account.share(cause)) for cause in ("compute", "host", *_VERDICTS, "uneven", "fill-drain")]
    listed = ", ".join(f"{cause} {share:.0%}" for cause, share in shares if cause != largest and share >= 0.005)
    return [Fact(f"the rest: {listed}", None, account.source)] if listed else []


def _fix(s: Situation, account: Account, fixes: Fixes, cause: str) -> list[str]:
    count = max(round(account.running or account.concurrency or s.load.most or s.P or 1), 1)
    if cause == "few-requests":
        return more_requests(s, count)
    if cause == "packed":
        return spread_over_micro_batches(s, count)
    if cause == "imbalance":
        after = fixes.balanced
        return partition(s, after) if after else ["leave out --pp-layer-partition: fullbore then divides by cost"]
    if cause == "memory":
        return _more_kv(s, count)
    if cause == "depth":
        return ["--pp-async-batch-depth auto, or one more than now"]
    deeper = "--pp-async-batch-depth auto"
    cover = f"{2 * (s.P or 1)} requests or more at once: what computes meanwhile covers the wait"
    if cause == "control":
        return [f"{deeper}, and {cover}", "keep the driver's core free of other work (see /timeline)"]
    return [
        "the link between the stages: measure its latency and bandwidth; neighbouring stages on one machine",
        f"{deeper}, and {cover}",
    ]


def _more_kv(s: Situation, count: int) -> list[str]:
    """With the tokens that so many requests need, where their length is known."""
    now, tokens = s.settings.number("kv_tokens"), (s.load.input_tokens, s.load.output_tokens)
    if now is None or tokens[0] is None or tokens[1] is None:
        return more_kv(s)
    length = ceil(tokens[0].number + tokens[1].number)
    if count * length <= now.number:
        return more_kv(s)
    text = f"{count} requests of {show(length)} tokens; now {show(now.number)}"
    return [f"--max-total-tokens {count * length}   ({text})", "--mem-fraction-static higher, where memory lacks"]


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
    if cause == "imbalance" and fixes.balanced:
        return _balanced_gain(account, fixes.balanced_factor)
    requests = account.concurrency or s.load.known
    if cause == "few-requests" and requests:
        high = stages / requests
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


def _balanced_gain(account: Account, factor: float) -> Gain | None:
    """The slowest stage sets the pace where there is work for all; in few micro-batches the sum of all counts too."""
    if factor < LEAST_FACTOR:
        return None
    how = f"{show(factor)} × tokens/s: so much less work on the slowest stage"
    assumes = "layers cost what they cost now"
    if account.share("packed") < _WORTH_SAYING:
        return Gain(f"about {how}", factor, factor, assumes=assumes)
    return Gain(f"up to {how}", 1.0, factor, assumes=f"{assumes}, and requests are spread over more micro-batches")

"""The account in a fullbore server's /metrics: how busy each stage was since the scrape before, and why it was idle."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.explain.evidence.account import Account
from fullbore.explain.evidence.prometheus import MetricsDump
from fullbore.explain.facts import Source

_IDLE, _BUSY = "fullbore_stage_idle_seconds_total", "fullbore_stage_busy_ratio"


def account_of(dumps: Sequence[MetricsDump]) -> Account | None:
    """Shares of one second. Between the two last dumps, or of one: what happened before it.

    A counter of idle seconds grows only when somebody asks; so does the ratio start anew. Between two dumps both are of
    the same time, unless somebody else asked as well.
    """
    dumps = sorted((dump for dump in dumps if dump.by_stage(_BUSY)), key=lambda dump: dump.file)
    if not dumps:
        return None
    last = dumps[-1]
    busy = last.by_stage(_BUSY)
    idle_s = [_idle(last, stage) for stage in range(len(busy))]
    if len(dumps) > 1 and _is_later(dumps[-2], last):
        before = [_idle(dumps[-2], stage) for stage in range(len(busy))]
        idle_s = [
            {cause: max(seconds - old.get(cause, 0.0), 0.0) for cause, seconds in new.items()}
            for new, old in zip(idle_s, before, strict=True)
        ]
    if sorted(busy) != list(range(len(busy))) or not any(share > 0 for share, _ in busy.values()):
        return None
    stages = [_shares(min(busy[stage][0], 1.0), causes) for stage, causes in enumerate(idle_s)]
    return Account(Source(last.file, busy[0][1]), 1.0, stages, kind="metrics")


def _idle(dump: MetricsDump, stage: int) -> dict[str, float]:
    samples = [sample for sample in dump.get(_IDLE) if sample.labels.get("stage") == str(stage)]
    return {sample.labels.get("cause", ""): sample.value for sample in samples}


def _is_later(before: MetricsDump, after: MetricsDump) -> bool:
    """The counters of one run of the server only grow."""
    first, second = (sum(sample.value for sample in dump.get(_IDLE)) for dump in (before, after))
    return 0 < first < second


def _shares(busy: float, idle_s: dict[str, float]) -> dict[str, float]:
    total_s = sum(idle_s.values())
    scale = (1.0 - busy) / total_s if total_s > 0 else 0.0
    return {"compute": busy, **{cause: seconds * scale for cause, seconds in idle_s.items()}}

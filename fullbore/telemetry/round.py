"""One round of the pipe as a formula, and what each of its faults is worth in idle time. Pure.

With m micro-batches in flight, μ_q the mean step of stage q, and transfers H, the driver's share C and unevenness U on
the way round, a round lasts

    λ = max( Σ μ_q + U + H + C ,  m · max μ_q )         of which stage i idles         1 - m · μ_i / λ

A fault is taken away by H, C or U = 0, all μ equal to their mean, or m = P. Of two faults each of which alone would
idle the stage as long as both do, neither is worth nothing: each is taken away first and last, and the mean counts.
"""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = ("transfer", "control", "uneven", "imbalance", "missing")
_ALL: frozenset[str] = frozenset(FAULTS)
_NONE: frozenset[str] = frozenset()
_ONLY = {fault: frozenset([fault]) for fault in FAULTS}
_ALL_BUT = {fault: _ALL - _ONLY[fault] for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the pipe as one stage sees it; times in nanoseconds."""

    micro_batches: int  # in flight
    transfer_ns: float  # all hops
    control_ns: float  # the driver's share
    uneven_ns: float  # what the steps on the way take beyond the means
    means_ns: tuple[float, ...]  # each stage's mean step
    own_ns: float  # this stage's

    def worth(self) -> dict[str, float]:
        """How much of the round's idle time each fault is worth: mean of removing it first and removing it last."""
        actual, ideal = self.idle(_ALL), self.idle(_NONE)
        worth = {}
        for fault in FAULTS:
            saved_first = actual - self.idle(_ALL_BUT[fault])
            saved_last = self.idle(_ONLY[fault]) - ideal
            worth[fault] = max((saved_first + saved_last) / 2, 0.0)
        return worth

    def idle(self, faults: frozenset[str]) -> float:
        """The fraction of the round in which the stage waits, if of its faults only these remain."""
        latency_ns = sum_ns = sum(self.means_ns)
        if "transfer" in faults:
            latency_ns += self.transfer_ns
        if "control" in faults:
            latency_ns += self.control_ns
        if "uneven" in faults:
            latency_ns += self.uneven_ns
        slowest_ns = own_ns = sum_ns / len(self.means_ns)
        if "imbalance" in faults:
            slowest_ns, own_ns = max(self.means_ns), self.own_ns
        micro_batches = self.micro_batches if "missing" in faults else max(self.micro_batches, len(self.means_ns))
        return 1 - micro_batches * own_ns / max(latency_ns, micro_batches * slowest_ns, 1.0)

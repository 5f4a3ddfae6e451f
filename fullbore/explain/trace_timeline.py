"""Traces of several ranks on one clock: how busy each stage is, how many compute at once, what lies between."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from fullbore.explain.evidence.trace import Interval, TraceRank

_NOISE_US = 1.0
_MOST_RANKS = 4096


@dataclass
class Timeline:
    """`busy`: share of the window in which a stage works: computes, or exchanges with its tensor ranks.

    Receives from another stage are not work, whether they spin or block.
    """

    ranks: dict[int, TraceRank]  # stage -> the trace of one of its ranks
    num_stages: int
    missing_ranks: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    concurrent_mean: float = 0.0  # stages computing at once, over the window
    concurrent_max: int = 0
    nobody: float = 0.0  # share of the window in which no stage computes
    stage_us: list[float] = field(default_factory=list)  # median stretch of work
    period_us: float = 0.0  # median from one stretch to the next on the first stage
    kernel_density: float = 1.0  # computing or exchanging within a stretch of work
    exchange_share: float = 0.0  # of a stretch of work, on the rank that waits least, of the stage that exchanges most
    exchange_share_most: float = 0.0  # ... on the rank that waits most
    exchanges_per_step: float = 0.0
    has_tensor_peers: bool = False  # every stage's share is of two ranks or more
    window_us: float = 0.0
    hops_us: list[float] = field(default_factory=list)  # median from a stage's end to the next stage's start
    return_us: float | None = None  # median from the last stage's end to the first stage's next start
    batch_size: float | None = None
    launches_per_step: float = 0.0
    is_extend: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.missing_ranks


def build_timeline(traces: list[TraceRank], tp_size: int, pp_size: int | None) -> Timeline | None:
    """None when the traces say nothing about which rank they are of."""
    known = [rank for rank in traces if rank.rank is not None or rank.stage is not None]
    if not known:
        return None
    known = [rank for rank in known if 0 <= (rank.rank or 0) < _MOST_RANKS and (rank.world_size or 0) <= _MOST_RANKS]
    if not known:
        return None
    by_rank = {rank.rank if rank.rank is not None else (rank.stage or 0) * tp_size: rank for rank in known}
    world = max((rank.world_size or 0 for rank in known), default=0) or (pp_size or 0) * tp_size
    world = max(world, max(by_rank) + 1)
    num_stages = pp_size or max(world // tp_size, 1)
    by_stage: dict[int, TraceRank] = {}
    peers: dict[int, list[TraceRank]] = {}
    for number, rank in sorted(by_rank.items()):
        stage = rank.stage if rank.stage is not None else number // tp_size
        by_stage.setdefault(stage, rank)
        peers.setdefault(stage, []).append(rank)
    missing = [stage * tp_size for stage in range(num_stages) if stage not in by_stage]
    timeline = Timeline(by_stage, num_stages, missing)
    if timeline.is_complete:
        _measure(timeline)
        _measure_exchanges(timeline, list(peers.values()))
    return timeline


def _measure(timeline: Timeline) -> None:
    ranks = [timeline.ranks[stage] for stage in range(timeline.num_stages)]
    origin = min(rank.base_us for rank in ranks)
    working = [[_shift(i, rank.base_us - origin) for i in rank.kernels_us()] for rank in ranks]
    blobs = [[_shift(i, rank.base_us - origin) for i in rank.blobs()] for rank in ranks]
    begin = max(intervals[0][0] for intervals in blobs)
    end = min(intervals[-1][1] for intervals in blobs)
    if end <= begin:  # not of the same time, or not on one clock: only each stage by itself
        timeline.busy = [rank.kernel_us / rank.window_us if rank.window_us else 0.0 for rank in ranks]
        timeline.window_us = max(rank.window_us for rank in ranks)
    else:
        timeline.window_us = end - begin
        timeline.busy = [_covered(intervals, begin, end) / (end - begin) for intervals in working]
        _count_concurrent(timeline, blobs, begin, end)
        _measure_gaps(timeline, blobs)
    timeline.stage_us = [median(e - b for b, e in intervals) for intervals in blobs]
    starts = [b for b, _ in blobs[0]]
    periods = [later - earlier for earlier, later in pairwise(starts)]
    timeline.period_us = median(periods) if periods else 0.0
    worked = sum(e - b for intervals in blobs for b, e in intervals)
    timeline.kernel_density = min(sum(rank.kernel_us for rank in ranks) / worked, 1.0) if worked else 1.0
    sizes = [rank.batch_sizes.median for rank in ranks if rank.batch_sizes]
    timeline.batch_size = max(sizes) if sizes else None
    timeline.launches_per_step = sum(rank.launches for rank in ranks) / max(sum(len(b) for b in blobs), 1)
    timeline.is_extend = sum(rank.extend_steps for rank in ranks) > sum(rank.decode_steps for rank in ranks)


def _measure_exchanges(timeline: Timeline, peers: list[list[TraceRank]]) -> None:
    """Ranks of a stage wait for the last of them in every exchange: the one that waits least shows what it takes."""
    timeline.exchange_share = max(min(_exchange_share(rank) for rank in ranks) for ranks in peers)
    timeline.exchange_share_most = max(_exchange_share(rank) for ranks in peers for rank in ranks)
    timeline.has_tensor_peers = all(len(ranks) > 1 for ranks in peers)
    steps = sum(len(rank.blobs()) for ranks in peers for rank in ranks)
    timeline.exchanges_per_step = sum(rank.exchange_kernels for ranks in peers for rank in ranks) / max(steps, 1)


def _exchange_share(rank: TraceRank) -> float:
    """Of the rank's stretches of work, outside its own computing."""
    worked = sum(e - b for b, e in rank.blobs())
    return max(rank.kernel_us - rank.compute_us, 0.0) / worked if worked else 0.0


def _shift(interval: Interval, by_us: float) -> Interval:
    return interval[0] + by_us, interval[1] + by_us


def _covered(intervals: list[Interval], begin: float, end: float) -> float:
    return sum(max(min(e, end) - max(b, begin), 0.0) for b, e in intervals)


def _count_concurrent(timeline: Timeline, blobs: list[list[Interval]], begin: float, end: float) -> None:
    """A sweep over the edges of all stretches of work."""
    edges: list[tuple[float, int]] = []
    for intervals in blobs:
        for b, e in intervals:
            if e > begin and b < end:
                edges += [(max(b, begin), 1), (min(e, end), -1)]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    now, at, nobody, weighted = 0, begin, 0.0, 0.0
    longest_at: dict[int, float] = {}
    for time, change in edges:
        weighted += now * (time - at)
        longest_at[now] = longest_at.get(now, 0.0) + time - at
        if now == 0:
            nobody += time - at
        now, at = now + change, time
    timeline.concurrent_mean = weighted / (end - begin)
    timeline.nobody = nobody / (end - begin)
    worth_counting = 0.02 * (end - begin)
    timeline.concurrent_max = max((n for n, time in longest_at.items() if time > worth_counting), default=0)


def _measure_gaps(timeline: Timeline, blobs: list[list[Interval]]) -> None:
    """From the end of a stage's stretch to the next stage's next start; meaningful with one micro-batch in flight."""
    gaps = [_gaps(blobs[stage], blobs[stage + 1]) for stage in range(len(blobs) - 1)]
    timeline.hops_us = [median(g) if g else 0.0 for g in gaps]
    returns = _gaps(blobs[-1], blobs[0])
    timeline.return_us = median(returns) if returns else None


def _gaps(earlier: list[Interval], later: list[Interval]) -> list[float]:
    gaps = []
    position = 0
    for _, end in earlier:
        while position < len(later) and later[position][0] < end - _NOISE_US:
            position += 1
        if position == len(later):
            break
        gaps.append(later[position][0] - end)
    return gaps

"""stage-divergence: stages form different batches, and then wait for each other for ever.

Every SGLang rank runs its own scheduler and must decide the same. Aborts, timeouts and readiness that each rank sees at
its own time break that (sglang#34572, sglang#30476). Align each rank's batches by order of appearance, not by time.
"""

from __future__ import annotations

from typing import NamedTuple

from fullbore.explain.evidence.batch_sequence import Batch, BatchSequence
from fullbore.explain.evidence.sglang_log import RankLog
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation
from fullbore.explain.verdicts.finding import Finding, Gain

_MOST_OFFSET = 64  # batches that one rank's log may begin later than another's
_LEAST_ALIKE = 3  # batches in a row that two ranks must share to be comparable
_MOST_LOST = 4  # lines that a log may lack


class _Split(NamedTuple):
    """The first batch in which ranks differ, counted from 1."""

    ordinal: int
    formed: list[int]  # ranks that formed `batch`
    other: list[int]  # ranks that formed another one, or none
    batch: Batch
    other_batch: Batch | None
    queues: dict[int, int]  # rank -> #queue-req at the last batch that all formed
    facts: list[Fact]


def stage_divergence(s: Situation) -> Finding | None:
    ranks = [rank for _, rank in sorted(s.evidence.logs.sglang.ranks.items()) if len(rank.batches)]
    if len(ranks) < 2:
        return None
    split = _first_split(ranks)
    if split is None:
        return None
    is_missing = split.other_batch is None
    if is_missing and not (s.progress.is_frozen and _saw_different_requests(ranks, split)):
        return None  # later stages may simply not have come to it yet, or a hang has another cause
    formed, other = _names(split.formed), _names(split.other)
    instead = f"formed another ({split.other_batch})" if split.other_batch is not None else "never did"
    finding = Finding(
        "stage-divergence",
        0.9 if is_missing else 0.95,
        f"The stages disagree about what to run. Up to batch {split.ordinal - 1} all ranks formed the same ones; "
        f"batch {split.ordinal} ({split.batch}) was formed by {formed} while {other} {instead}. From there on each "
        "waits for data that the other does not send.",
        evidence=split.facts + _queue_facts(split, ranks) + _abort_facts(ranks) + s.progress.frozen,
        fix=_fix(s),
        gain=Gain("from a standstill to normal service"),
        verify="align the `Prefill batch` and `Decode batch` lines of all ranks by order: they must be equal for "
        "as long as it runs",
        precedent="sglang#34572, sglang#30476, sglang#29405",
    )
    if not s.progress.is_frozen:
        finding.unexplained = "whether it still runs: the logs do not show a standstill"
    return finding


def _first_split(ranks: list[RankLog]) -> _Split | None:
    """Compares all ranks with the first; batches before the first common one are skipped."""
    reference = ranks[0].batches
    aligned = {}
    for rank in ranks:
        offset = _offset(reference, rank.batches)
        if offset is not None:
            aligned[rank.rank] = (rank, offset)
    if len(aligned) < 2:
        return None
    start = max(max(offset, 0) for _, offset in aligned.values())
    longest = max(len(rank.batches) + offset for rank, offset in aligned.values())
    for position in range(start, longest):
        found = {number: _at(rank.batches, position - offset) for number, (rank, offset) in aligned.items()}
        compositions = {batch.composition if batch is not None else None for batch in found.values()}
        if len(compositions) > 1:
            if any(_only_lost_lines(reference, rank.batches, position, offset) for rank, offset in aligned.values()):
                return None
            return _split(position - start + 1, found, aligned, position)
    return None


def _only_lost_lines(reference: BatchSequence, other: BatchSequence, position: int, offset: int) -> bool:
    """Do the two go on alike after a few batches that one of the logs lacks? Stages that diverge do not meet again."""
    for lost in range(1, _MOST_LOST + 1):
        for here, there in ((position + lost, position - offset), (position, position - offset + lost)):
            pairs = [(_at(reference, here + n), _at(other, there + n)) for n in range(_LEAST_ALIKE)]
            if all(a is not None and b is not None and a.composition == b.composition for a, b in pairs):
                first, second = _at(reference, position), _at(other, position - offset)
                if first is not None and second is not None and first.composition != second.composition:
                    return True
    return False


def _saw_different_requests(ranks: list[RankLog], split: _Split) -> bool:
    """Different queues at the same batch, or different aborts: histories differ, not only positions."""
    return len(set(split.queues.values())) > 1 or len({rank.aborts for rank in ranks}) > 1


def _offset(reference: BatchSequence, other: BatchSequence) -> int | None:
    """Position in `reference` of the first batch of `other` (negative: it began earlier); None if none fits."""
    for distance in range(_MOST_OFFSET + 1):
        for offset in {distance, -distance}:
            if _alike(reference, other, offset) >= _LEAST_ALIKE:
                return offset
    return None


def _alike(reference: BatchSequence, other: BatchSequence, offset: int) -> int:
    """Equal batches in a row from where both have one."""
    begin = max(offset, 0)
    count = 0
    for position in range(begin, min(len(reference), len(other) + offset)):
        if reference.batch(position).composition != other.batch(position - offset).composition:
            break
        count += 1
    return count


def _at(batches: BatchSequence, position: int) -> Batch | None:
    return batches.batch(position) if 0 <= position < len(batches) else None


def _split(
    ordinal: int, found: dict[int, Batch | None], aligned: dict[int, tuple[RankLog, int]], position: int
) -> _Split | None:
    batch = next((b for b in found.values() if b is not None), None)
    if batch is None:
        return None
    formed = [n for n, b in found.items() if b is not None and b.composition == batch.composition]
    other = [n for n in found if n not in formed]
    other_batch = next((found[n] for n in other if found[n] is not None), None)
    before = {n: _at(rank.batches, position - offset - 1) for n, (rank, offset) in aligned.items()}
    queues = {n: b.queued for n, b in before.items() if b is not None}
    facts = []
    for number in (formed[-1], other[0]):
        rank, offset = aligned[number]
        here = _at(rank.batches, position - offset)
        if here is not None:
            facts.append(Fact(f"PP{number}, batch {ordinal}: {here}", None, rank.batches.source(position - offset)))
        else:
            last = len(rank.batches) - 1
            facts.append(
                Fact(
                    f"PP{number} ends after batch {ordinal - 1}: {rank.batches.batch(last)}",
                    None,
                    rank.batches.source(last),
                )
            )
    return _Split(ordinal, formed, other, batch, other_batch, queues, facts)


def _queue_facts(split: _Split, ranks: list[RankLog]) -> list[Fact]:
    if len(set(split.queues.values())) < 2:
        return []
    listed = ", ".join(f"PP{number}: {count}" for number, count in split.queues.items())
    return [Fact(f"#queue-req at the same batch, {split.ordinal - 1}, differs: {listed}", None, ranks[0].last_at)]


def _abort_facts(ranks: list[RankLog]) -> list[Fact]:
    aborts = {rank.rank: rank.aborts for rank in ranks if rank.aborts}
    if not aborts:
        return []
    listed = ", ".join(f"PP{number}: {aborts.get(number, 0)}" for number in sorted({rank.rank for rank in ranks}))
    source = next(rank.aborts_at for rank in ranks if rank.aborts_at is not None)
    different = " (ranks saw different ones)" if len(set(aborts.values())) > 1 or len(aborts) < len(ranks) else ""
    return [Fact(f"aborted requests: {listed}{different}", None, source)]


def _names(ranks: list[int]) -> str:
    """PP0-PP3."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"PP{ranks[0]}-PP{ranks[-1]}"
    return ", ".join(f"PP{rank}" for rank in ranks)


def _fix(s: Situation) -> list[str]:
    lines = [
        "restart the engine (it does not recover; the NCCL watchdog ends it only after its time-out)",
        "a release with the ordered bootstrap decisions of sglang#34569 and #34568, where prefill is disaggregated",
    ]
    if s.settings.is_on("hierarchical_cache") is not None:
        lines.append(
            "without --enable-hierarchical-cache: readiness of its prefetches is seen by each rank at its own time"
        )
    if s.load.prefill_side is not None:
        ranks = (s.P or 1) * s.tp
        lines.append(f"or no pipeline on the prefill side: --tp-size {show(ranks)} --pp-size 1")
    lines.append("keep routers from replaying and clients from cancelling in bursts until then (sglang#34570)")
    return lines

"""Measures the stages before the first request comes: what decode micro-batches of every size cost, and how long plans,
hidden states and results are under way. It warms everything up, too: the first steps on new memory are slow ones.

One synthetic micro-batch at a time goes through the real pipeline. Its runs read and write KV where nothing is kept
yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from math import ceil
from statistics import median
from typing import NamedTuple

from fullbore.scheduler.cost import CostModel, sizes_to_measure
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling
from fullbore.telemetry.spans import StageRecord

DECODE_BUDGET_S = 1.0  # no further sizes once this is spent
LOOK_AGAIN_BUDGET_S = 0.5
PREFILL_BUDGET_S = 0.5
CONTEXT_REQUESTS = 4
CONTEXT_TOKENS = 2048  # that each of them reads: far more than what a step costs anyhow, to be told from noise
REPETITIONS = 2  # the least counts: what disturbs a measurement only makes it longer
_MOST_REPETITIONS = 4  # until the two least agree
_AGREEMENT = 1.2
_STANDS_OUT = 1.1  # times what the sizes beside it let one expect
_FIRST_ID = -2  # downwards; -1 is the transport's ping
_AS_API_DEFAULT = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=0, choice=0, position=1)


class Passage(NamedTuple):
    """One micro-batch that had the pipeline to itself."""

    launched_ns: int
    records: Sequence[StageRecord]  # of all stages, in order
    returned_ns: int  # when the driver had the result


class Probe:
    """Fills a cost model.

    Args:
        run_alone: sends a micro-batch through the empty pipeline.
        num_blocks: KV blocks that runs may write to.
        page_size: tokens in one of them.
    """

    def __init__(
        self, costs: CostModel, run_alone: Callable[[MicroBatch], Passage], num_blocks: int, page_size: int
    ) -> None:
        self._costs = costs
        self._run_alone = run_alone
        self._num_blocks = num_blocks
        self._page_size = page_size
        self._ids = count(_FIRST_ID, -1)
        # Per stage, requests -> seconds, like the decode curves but without sampling, which depends on what is asked.
        self.compute_s: list[dict[int, float]] = [{} for _ in costs.decode]

    def measure_decode(self, most_requests: int, budget_s: float = DECODE_BUDGET_S) -> None:
        """Micro-batches of 1, 2, 4, 8, …, then 3, 6, 12, … requests while the budget lasts; of 1 and 2 in any case."""
        end_s = time.monotonic() + budget_s
        passages: dict[int, list[Passage]] = {}
        for size in sizes_to_measure(max(most_requests, 2)):
            if len(passages) >= 2 and time.monotonic() >= end_s:
                break
            passages[size] = self._run_until_agreed(partial(self._decode, size))
        self._look_again(passages)
        self._take_ways([passage for group in passages.values() for passage in group])
        for size in sorted(passages):
            for stage in range(len(self._costs.decode)):
                self._costs.seed_decode(stage, size, _busy_s(passages[size], stage))
                self.compute_s[stage][size] = _compute_s(passages[size], stage)

    def measure_prefill(self, chunk_tokens: int, budget_s: float = PREFILL_BUDGET_S) -> None:
        """Prompt chunks of up to `chunk_tokens`, from small ones on, as far as they fit into the budget."""
        end_s = time.monotonic() + budget_s
        tokens = max(chunk_tokens // 8, 2)
        while tokens <= chunk_tokens:
            start_s = time.monotonic()
            passages = self._run_until_agreed(partial(self._chunk, tokens))
            for stage in range(len(self._costs.prefill)):
                self._costs.observe(stage, 0, tokens, float(tokens**2), _busy_s(passages, stage))
            now_s = time.monotonic()
            if now_s + 2 * (now_s - start_s) > end_s:
                return
            tokens *= 2

    def measure_context(self, most_requests: int, context_length: int) -> None:
        """A micro-batch of requests that read as many cached tokens as there is room for, at most CONTEXT_TOKENS each.

        Comes after `measure_decode`.
        """
        size = min(CONTEXT_REQUESTS, most_requests)
        context = min(CONTEXT_TOKENS, context_length - 1, self._num_blocks * self._page_size // size - 1)
        if context < 1:
            return
        passages = self._run_until_agreed(partial(self._decode, size, context))
        for stage in range(len(self._costs.decode)):
            self._costs.seed_context(stage, size, size * context, _busy_s(passages, stage))

    def _look_again(self, passages: dict[int, list[Passage]]) -> None:
        """Repeats what stands out above its neighbours, once. A size that seems dear is never run, and would seem so
        for ever.
        """
        end_s = time.monotonic() + LOOK_AGAIN_BUDGET_S
        for low, size, high in _triples(sorted(passages)):
            low_ns, own_ns, high_ns = (min(map(_total_ns, passages[each])) for each in (low, size, high))
            between_ns = low_ns + (high_ns - low_ns) * (size - low) / (high - low)
            if own_ns > _STANDS_OUT * between_ns and time.monotonic() < end_s:
                passages[size] += [self._run_alone(self._decode(size)) for _ in range(REPETITIONS)]

    def _run_until_agreed(self, make: Callable[[], MicroBatch]) -> list[Passage]:
        """Repeats a measurement; more often where something seems to have disturbed it."""
        passages: list[Passage] = []
        while len(passages) < _MOST_REPETITIONS:
            passages.append(self._run_alone(make()))
            times_ns = sorted(_total_ns(passage) for passage in passages)
            if len(passages) >= REPETITIONS and times_ns[1] <= _AGREEMENT * times_ns[0]:
                break
        return passages

    def _take_ways(self, passages: list[Passage]) -> None:
        """The times that are no stage's: to the first stage, from stage to stage, and back to the driver."""
        costs = self._costs
        costs.plan_s = _median_s(p.records[0].plan_received_ns - p.launched_ns for p in passages)
        for stage in range(1, len(costs.decode)):
            hops_ns = (p.records[stage].receive_end_ns - p.records[stage - 1].sample_end_ns for p in passages)
            costs.hops_s[stage] = _median_s(hops_ns)
        costs.return_s = _median_s(p.returned_ns - p.records[-1].sample_end_ns for p in passages)

    def _decode(self, num_requests: int, context: int = 0) -> MicroBatch:
        length = context // self._page_size + 1  # blocks of one request
        runs = []
        for k in range(num_requests):
            blocks = [block % self._num_blocks for block in range(k * length, (k + 1) * length)]
            runs.append(Run(~k, 0, context, [0], blocks, _AS_API_DEFAULT))
        return self._micro_batch(runs)

    def _chunk(self, num_tokens: int) -> MicroBatch:
        blocks = [block % self._num_blocks for block in range(ceil(num_tokens / self._page_size))]
        return self._micro_batch([Run(-1, 0, 0, [0] * num_tokens, blocks, _AS_API_DEFAULT)])

    def _micro_batch(self, runs: list[Run]) -> MicroBatch:
        return MicroBatch(next(self._ids), runs, "request-arrived", 0.0)


def _triples(sizes: list[int]) -> Iterable[tuple[int, int, int]]:
    """Each but the first and the last, between its neighbours."""
    return zip(sizes, sizes[1:], sizes[2:], strict=False)


def _total_ns(passage: Passage) -> int:
    return sum(record.sample_end_ns - record.compute_start_ns for record in passage.records)


def _busy_s(passages: Sequence[Passage], stage: int) -> float:
    return min(p.records[stage].sample_end_ns - p.records[stage].compute_start_ns for p in passages) * 1e-9


def _compute_s(passages: Sequence[Passage], stage: int) -> float:
    return min(p.records[stage].compute_end_ns - p.records[stage].compute_start_ns for p in passages) * 1e-9


def _median_s(times_ns: Iterable[int]) -> float:
    return max(median(times_ns) * 1e-9, 0.0)

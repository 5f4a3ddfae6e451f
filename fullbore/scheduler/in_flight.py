"""Micro-batches between launch and result: what is in them, and what the stages' records of them tell about costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.micro_batch import Run
from fullbore.scheduler.request import Request
from fullbore.telemetry.spans import StageRecord


@dataclass(eq=False, slots=True)
class InFlight:
    """A micro-batch that is being put together, or is under way."""

    launched_s: float
    requests: list[Request] = field(default_factory=list)  # of each run
    runs: list[Run] = field(default_factory=list)
    num_decodes: int = 0
    context_tokens: int = 0  # cached tokens that the decodes read
    prefill_tokens: int = 0
    prefill_token_pairs: int = 0  # Σ (context + tokens)² - context² over the prompt chunks
    num_sampled: int = 0
    stage_end_ns: dict[int, int] = field(default_factory=dict)  # stage -> end of its work


class CostFeedback:
    """Hands what the stages' records tell to the cost model."""

    def __init__(self, costs: CostModel, num_stages: int) -> None:
        self._costs = costs
        self._stage_end_ns = [0] * num_stages  # of each stage's latest record
        self._last_stage = num_stages - 1

    def observe(self, entry: InFlight | None, record: StageRecord) -> None:
        """Takes in a stage's record of a micro-batch; None: of one that is not in flight, such as a probe."""
        stage = record.stage
        free_ns = self._stage_end_ns[stage]
        self._stage_end_ns[stage] = record.sample_end_ns
        if entry is None:
            return
        # Work of the stage: it cannot take the next micro-batch meanwhile. Waiting for the send is not part of it.
        busy_s = (record.sample_end_ns - record.compute_start_ns) * 1e-9
        pairs = float(entry.prefill_token_pairs)
        self._costs.observe(stage, entry.num_decodes, entry.prefill_tokens, pairs, busy_s, entry.context_tokens)
        self._observe_way_to(entry, record, free_ns)
        entry.stage_end_ns[stage] = record.sample_end_ns

    def _observe_way_to(self, entry: InFlight, record: StageRecord, free_ns: int) -> None:
        """How long the plan (first stage) or the hidden states (the others) were under way.

        `free_ns` is when the stage was done with the micro-batch before. What came while it was still busy was seen
        only then: the way took so long at most.
        """
        if record.stage == 0:
            way_s = record.plan_received_ns * 1e-9 - entry.launched_s
            self._costs.observe_plan(way_s, is_exact=free_ns * 1e-9 <= entry.launched_s)
            return
        sent_ns = entry.stage_end_ns.get(record.stage - 1)
        if sent_ns is not None:
            is_exact = max(free_ns, record.receive_posted_ns) <= sent_ns
            self._costs.observe_hop(record.stage, (record.receive_end_ns - sent_ns) * 1e-9, is_exact)

    def observe_return(self, entry: InFlight, now_s: float) -> None:
        """How long the result was under way to the driver, where it is now."""
        end_ns = entry.stage_end_ns.get(self._last_stage)
        if end_ns is not None:
            self._costs.observe_return(now_s - end_ns * 1e-9)

"""What the comparison policies share: fullbore's bookkeeping of requests, memory and results, without its choices."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.plan.policy_settings import Scheduling, config_of
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import InFlight, Scheduler


class ComparisonScheduler(Scheduler):
    """Subclasses decide in `next_micro_batch` who travels together."""

    def __init__(self, settings: Scheduling) -> None:
        super().__init__(config_of(settings))
        self.settings = settings

    def _empty(self, now_s: float) -> InFlight:
        self._now_s = now_s
        return InFlight([], [], now_s, 0, 0, 0, 0)

    def _take_decodes(self, entry: InFlight, requests: Sequence[Request]) -> None:
        """Puts the next token of these ready requests into the micro-batch, as far as there are blocks for them."""
        chosen = {request.request_id for request in requests}
        kept = [request for request in self._ready if request.request_id not in chosen]
        self._ready.clear()
        self._ready.extend(kept)
        for request in sorted(requests, key=lambda request: request.arrival_order):
            # A request may have been preempted to make room for one before it.
            if request.request_id in self._running and self._make_room_for_decode(request):
                self._append_run(entry, request, 1)
                entry.num_decodes += 1

    def _append_prompt(self, entry: InFlight, request: Request, tokens: int) -> None:
        """Puts the request's next prompt tokens, for which there are blocks, into the micro-batch."""
        context = request.num_launched_tokens
        is_last = context + tokens == request.num_tokens
        self._append_run(entry, request, tokens)
        entry.prefill_tokens += tokens
        entry.prefill_token_pairs += (context + tokens) ** 2 - context**2
        self._waiting_tokens -= tokens
        if is_last:
            self._prefilling = None
            self._num_decoding += 1

    def _launched(self, entry: InFlight) -> MicroBatch:
        micro_batch = MicroBatch(self._next_id, entry.runs, *self._launch_reason(entry))
        self._next_id += 1
        self._in_flight[micro_batch.id] = entry
        self._num_sampling_in_flight += entry.num_sampled > 0
        return micro_batch

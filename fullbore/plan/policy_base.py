"""What the comparison policies share: fullbore's bookkeeping of requests, memory and results, without its choices."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.plan.policy_settings import Scheduling, config_of
from fullbore.scheduler.in_flight import InFlight
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import Scheduler


class ComparisonScheduler(Scheduler):
    """Subclasses decide in `next_micro_batch` who travels together."""

    def __init__(self, settings: Scheduling) -> None:
        super().__init__(config_of(settings))
        self.settings = settings

    def _take_decodes(self, entry: InFlight, requests: Sequence[Request]) -> None:
        """Takes these ready requests out of the queue and puts their next tokens into the micro-batch."""
        chosen = {request.request_id for request in requests}
        kept = [request for request in self._ready if request.request_id not in chosen]
        self._ready.clear()
        self._ready.extend(kept)
        self._append_decodes(entry, list(requests))

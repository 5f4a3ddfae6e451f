"""A model of vLLM's batches under pipeline parallelism, to compare with. Facts from vLLM 0.33; see docs/planning.md.

Up to pp_size batches are in flight (one more with asynchronous scheduling). Each batch takes every running request that
is not in flight, then prompt tokens up to the token budget; requests that start together therefore travel together. The
next chunk of a prompt waits for the one before to come back from the last stage.
"""

from __future__ import annotations

from fullbore.plan.policy_base import ComparisonScheduler
from fullbore.plan.policy_settings import Scheduling
from fullbore.scheduler.in_flight import InFlight
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import Request


class VllmScheduler(ComparisonScheduler):
    """fullbore's scheduler with vLLM's choice of who travels together; memory, results and ends are the same."""

    def __init__(self, settings: Scheduling) -> None:
        super().__init__(settings)
        depth = 0 if settings.depth == "auto" else min(settings.depth, 1)
        self.in_flight_limit = settings.pp + depth
        if settings.exchanges_first:
            self.in_flight_limit = max(settings.pp - 1, 1)
        self._paused: list[Request] = []  # admitted, their newest chunk still in flight

    def next_micro_batch(self, now_s: float) -> MicroBatch | None:
        """All that is ready, and prompts up to the budget."""
        self._now_s = now_s
        if len(self._in_flight) >= self.in_flight_limit:
            self._blocked_on = "slot"
            return None
        entry = InFlight(now_s)
        cap = self._max_requests()
        self._take_decodes(entry, list(self._ready)[: min(cap, self.config.chunked_prefill_size)])
        self._fill_to_budget(entry, self.config.chunked_prefill_size - entry.num_decodes, cap)
        return self._launch(entry) if entry.runs else None

    def _fill_to_budget(self, entry: InFlight, room: int, cap: int) -> None:
        while room > 0 and len(entry.requests) < cap:
            request = self._resumed() or self._admit()
            if request is None:
                return
            remaining = request.num_tokens - request.num_launched_tokens
            tokens = min(remaining, room)
            self._prefilling = request
            if not self._make_room(request, tokens):
                self._pause(request)
                return
            room -= tokens
            self._append_chunk(entry, request, tokens)
            if tokens < remaining:
                self._pause(request)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for the next chunk, preempting newer requests for it if need be."""
        while not self._make_room_for_prefill(request, tokens):
            newest = next(reversed(self._running.values()))
            if newest is request:
                return False
            self._preempt(newest)
        return True

    def _pause(self, request: Request) -> None:
        self._paused.append(request)
        self._prefilling = None

    def _resumed(self) -> Request | None:
        """The oldest paused request whose chunk has come back."""
        travelling = {id(request) for entry in self._in_flight.values() for request in entry.requests}
        for request in self._paused:
            if id(request) not in travelling:
                self._paused.remove(request)
                return request
        return None

    def _detach(self, request: Request) -> None:
        if request in self._paused:
            self._paused.remove(request)
            self._waiting_tokens -= request.num_tokens - request.num_launched_tokens
        else:
            super()._detach(request)

"""A model of SGLang's pipeline slots, to compare with. Facts from SGLang 0.5.11 and 0.5.23; see docs/planning.md.

There are L = pp_size + pp_async_batch_depth slots, visited in turn. A request is prefilled in one slot and decodes
there until it ends; nobody moves it. A slot that has room (at most max_running / pp_size requests) and finds requests
waiting runs a prefill batch, else it decodes all its requests. Chunks of one prompt may run in successive slots.
Nothing balances slots, so a burst that fits into one prefill batch stays in one slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.plan.policy_base import ComparisonScheduler
from fullbore.plan.policy_settings import Scheduling
from fullbore.scheduler.in_flight import InFlight
from fullbore.scheduler.logprobs import MicroBatchLogprobs
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.policy import chunk_tokens
from fullbore.scheduler.request import Request, TokenOutput

DYNAMIC_SMOOTHING = 0.75


class SglangScheduler(ComparisonScheduler):
    """fullbore's scheduler with SGLang's choice of who travels together; memory, results and ends are the same."""

    def __init__(self, settings: Scheduling) -> None:
        super().__init__(settings)
        depth = 0 if settings.depth == "auto" else settings.depth
        self.num_slots = settings.pp + depth
        # Outputs are exchanged after launching at depth 0, before it otherwise.
        self.in_flight_limit = settings.pp if depth == 0 else settings.pp + depth - 1
        if settings.exchanges_first:
            self.in_flight_limit = max(self.num_slots - 1, 1)
        cap = settings.max_micro_batch
        self.slot_cap = max(settings.max_running // settings.pp, 1) if cap == "auto" else cap
        self._slot_of: dict[int, int] = {}  # request -> slot, from its first prefill batch on
        self._slot_in_flight: dict[int, int] = {}  # slot -> micro-batch
        self._next_slot = 0

    def next_micro_batch(self, now_s: float) -> MicroBatch | None:
        """The next slot's batch; None while the next slot with work is still in flight."""
        self._now_s = now_s
        if len(self._in_flight) >= self.in_flight_limit:
            self._blocked_on = "slot"
            return None
        for _ in range(self.num_slots):
            slot = self._next_slot
            if slot in self._slot_in_flight:
                self._blocked_on = "slot"
                return None
            self._next_slot = (slot + 1) % self.num_slots
            entry = InFlight(now_s)
            self._fill_slot_with_prompts(entry, slot)
            if not entry.runs:
                self._fill_slot_with_decodes(entry, slot)
            if entry.runs:
                micro_batch = self._launch(entry)
                self._slot_in_flight[slot] = micro_batch.id
                return micro_batch
        return None

    def complete(
        self,
        micro_batch_id: int,
        token_ids: Sequence[int | None],
        now_s: float,
        logprobs: MicroBatchLogprobs | None = None,
    ) -> list[TokenOutput]:
        slot = next(slot for slot, current in self._slot_in_flight.items() if current == micro_batch_id)
        del self._slot_in_flight[slot]
        return super().complete(micro_batch_id, token_ids, now_s, logprobs)

    def _fill_slot_with_prompts(self, entry: InFlight, slot: int) -> None:
        room = self.config.chunked_prefill_size
        members = sum(self._slot_of.get(request_id) == slot for request_id in self._running)
        while room > 0:
            if self._prefilling is None and members >= self.slot_cap:
                return
            request = self._prefilling or self._admit()
            if request is None:
                return
            remaining = request.num_tokens - request.num_launched_tokens
            tokens = min(remaining, room, self._chunk_tokens(request.num_launched_tokens))
            if not self._make_room_for_prefill(request, tokens):
                return
            room -= tokens
            members += self._slot_of.get(request.request_id) != slot
            self._slot_of[request.request_id] = slot  # of its last chunk
            self._append_chunk(entry, request, tokens)
            if tokens < remaining:
                return

    def _chunk_tokens(self, context: int) -> int:
        """The fixed size; or what takes as long as a first chunk, smoothed, and a quarter of it at least."""
        size = self.config.chunked_prefill_size
        if not self.settings.dynamic_chunks:
            return size
        equal = chunk_tokens(self.costs, size, context)
        return max(round(DYNAMIC_SMOOTHING * equal + (1 - DYNAMIC_SMOOTHING) * size), size // 4, 1)

    def _fill_slot_with_decodes(self, entry: InFlight, slot: int) -> None:
        mine = [request for request in self._ready if self._slot_of.get(request.request_id) == slot]
        self._take_decodes(entry, mine)

    def _forget(self, request: Request, reason: object) -> None:
        self._slot_of.pop(request.request_id, None)
        super()._forget(request, reason)  # type: ignore[arg-type]

"""The scheduler: decides who runs next, with which tokens, in which KV blocks, and when a request ends.

One object, driven by the engine (real stages), the simulator (virtual clock) and the tests (random traffic) alike. It
has no clock: every call that needs the time is given it, in seconds on any monotonic clock. Stages only obey.

A request is in exactly one of these places:

    waiting ──admit──► prefilling ──last chunk launched──► in flight ◄──► ready ──► ended
       ▲                   │                                  │             │
       └───────────────────┴──────── preempted ───────────────┴─────────────┘

At most one request is prefilling: the next is admitted when the last chunk of the one before is launched.

Bound on waiting (no starvation): requests are admitted and prefilled in order of arrival, and only newer requests are
ever preempted for older ones. A prompt of n tokens with W prompt tokens waiting ahead of it is therefore fully
launched after at most the micro-batches that those W + n tokens need, plus the time until enough older requests end
for it to have blocks; nothing that arrives later can delay it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat, takewhile
from math import ceil
from operator import attrgetter
from typing import Literal

from fullbore.errors import RequestError
from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.in_flight import CostFeedback, InFlight
from fullbore.scheduler.kv_blocks import ROOT, BlockPool
from fullbore.scheduler.logprobs import Logprobs, MicroBatchLogprobs, join
from fullbore.scheduler.micro_batch import LaunchReason, MicroBatch, Run
from fullbore.scheduler.policy import (
    best_micro_batches,
    chunk_tokens,
    cut_tokens,
    prefill_depth,
    prefill_quota_tokens,
    rounded_context,
)
from fullbore.scheduler.request import FinishReason, Request, TokenOutput
from fullbore.telemetry.spans import DriverRecord, StageRecord

_ARRIVAL = attrgetter("arrival_order")
_READY = attrgetter("ready_since_s")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know. `num_micro_batches` forces m, for experiments."""

    num_kv_blocks: int
    pp_size: int = 1
    pp_async_batch_depth: int | Literal["auto"] = "auto"
    pp_max_micro_batch_size: int | Literal["auto"] = "auto"
    num_micro_batches: int | Literal["auto"] = "auto"
    chunked_prefill_size: int = 512
    max_running_requests: int = 256
    page_size: int = 16
    context_length: int = 1 << 30
    enable_prefix_cache: bool = True

    @property
    def in_flight_limit(self) -> int:
        """L = pp_size + pp_async_batch_depth. Automatic depth may go up to pp_size: m* decides how much is used."""
        depth = self.pp_size if self.pp_async_batch_depth == "auto" else self.pp_async_batch_depth
        return self.pp_size + depth


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A snapshot: gauges now, and counters since the start."""

    running: int
    waiting: int
    in_flight: int
    used_blocks: int
    free_blocks: int
    preemptions: int
    micro_batches: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int


class Scheduler:
    """See the module's docstring. Not thread-safe; calls must come in the order in which things happen."""

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.costs = costs if costs is not None else CostModel(config.pp_size)
        self._feedback = CostFeedback(self.costs, config.pp_size)
        self.pool = BlockPool(config.num_kv_blocks, config.page_size, config.enable_prefix_cache)
        self.in_flight_limit = config.in_flight_limit
        self._min_chunk_tokens = min(2 * config.page_size, config.chunked_prefill_size)

        self._requests: dict[int, Request] = {}  # every request that has not ended
        self._waiting: deque[Request] = deque()  # in order of arrival; preempted ones come back to their place
        self._running: dict[int, Request] = {}  # admitted; insertion order is order of arrival (see _preempt)
        self._prefilling: Request | None = None  # the newest running request, while it has prompt tokens to launch
        self._ready: deque[Request] = deque()  # one token to launch, none in flight
        self._num_decoding = 0  # past their last chunk: ready or in flight
        self._decoding_tokens = 0  # of those, prompt and output
        self._content: dict[int, tuple[int, int]] = {}  # request -> (registered blocks, content id of the last)
        self._deadlines: list[tuple[float, int]] = []  # heap; entries of requests that ended are skipped
        self._refused_with: tuple[int, int, int] | None = None  # what memory last refused admission for, see _admit
        self._in_flight: dict[int, InFlight] = {}
        self._num_sampling_in_flight = 0
        self._next_id = 0
        self._next_arrival = 0

        self._waiting_tokens = 0  # prompt tokens still to launch: waiting and prefilling
        self._quota_tokens = config.chunked_prefill_size
        self._micro_batch_memo: dict[tuple[int, int], int] = {}
        self._memo_version = -1

        self._now_s = 0.0  # of the latest call that told the time
        self._slot_freed_s = 0.0
        self._memory_freed_s = 0.0
        self._blocked_on: Literal["slot", "memory"] | None = None
        self._is_memory_short = False  # the last attempt to admit or to go on prefilling lacked blocks

        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: if it can never fit the context or the KV cache, or its id is taken.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use.")
        if not request.prompt_token_ids:
            raise RequestError("The prompt is empty; send at least one token.", param="prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}.", param="max_tokens")
        longest = len(request.prompt_token_ids) + request.max_tokens
        capacity = min(self.config.context_length, self.pool.num_blocks * self.config.page_size)
        if longest > capacity:
            raise RequestError(
                f"The prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.max_tokens}, "
                f"together more than the {capacity} tokens that one request may have.",
                param="max_tokens",
            )
        request.ready_since_s = request.arrival_s
        request.arrival_order = self._next_arrival
        self._next_arrival += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if request.deadline_s is not None:
            heappush(self._deadlines, (request.deadline_s, request.request_id))
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        self._add_waiting_tokens(request)

    def abort(self, request_id: int) -> TokenOutput | None:
        """Ends a request at once, wherever it is; None if it is unknown or has ended already."""
        return self._cut(request_id, "abort")

    def expire(self, now_s: float) -> list[TokenOutput]:
        """Ends every request whose deadline has passed."""
        ends: list[TokenOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_s is not None and request.deadline_s <= now_s:
                ends += filter(None, [self._cut(request_id, "timeout")])
        return ends

    @property
    def is_idle(self) -> bool:
        """No request left and nothing in flight."""
        return not self._requests and not self._in_flight

    def state(self) -> SchedulerState:
        counts = self._counts
        return SchedulerState(
            running=len(self._running),
            waiting=len(self._waiting),
            in_flight=len(self._in_flight),
            used_blocks=self.pool.num_used,
            free_blocks=self.pool.num_free,
            preemptions=counts["preemptions"],
            micro_batches=self._next_id,
            generated_tokens=counts["generated_tokens"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
        )

    def record(self, event: str, now_ns: int, micro_batch: MicroBatch | None = None) -> DriverRecord:
        """The driver's record of an event that has just happened: a launch or result of `micro_batch`, or another."""
        record = DriverRecord(
            at_ns=now_ns,
            event=event,
            micro_batch_id=-1 if micro_batch is None else micro_batch.id,
            running=len(self._running),
            waiting=len(self._waiting),
            ready=len(self._ready),
            in_flight=len(self._in_flight),
            free_blocks=self.pool.num_free,
            is_memory_short=self._is_memory_short and bool(self._waiting or self._prefilling),
        )
        if event == "launch" and micro_batch is not None:
            entry = self._in_flight[micro_batch.id]
            record.reason = micro_batch.launch_reason
            record.reason_since_ns = round(micro_batch.launch_reason_since_s * 1e9)
            record.num_requests = len(entry.runs)
            record.num_decodes = entry.num_decodes
            record.prefill_tokens = entry.prefill_tokens
        return record

    # -------------------------------------------------------------------------------------------------- launch

    def next_micro_batch(self, now_s: float) -> MicroBatch | None:
        """The micro-batch to launch now; None if nothing can or should be launched before the next event."""
        self._now_s = now_s
        if len(self._in_flight) >= self.in_flight_limit:
            self._blocked_on = "slot"
            return None
        entry = InFlight(now_s)
        self._fill_with_decodes(entry)
        self._fill_with_prompts(entry)
        return self._launch(entry) if entry.runs else None

    def _launch(self, entry: InFlight) -> MicroBatch:
        micro_batch = MicroBatch(self._next_id, entry.runs, *self._launch_reason(entry))
        self._next_id += 1
        self._in_flight[micro_batch.id] = entry
        self._num_sampling_in_flight += entry.num_sampled > 0
        return micro_batch

    def _fill_with_decodes(self, entry: InFlight) -> None:
        """Takes this micro-batch's share of the ready requests, so that the shares in flight differ by at most one."""
        if not self._ready:
            return
        num_micro_batches = self._num_micro_batches(self._num_decoding)
        slots = num_micro_batches - self._num_sampling_in_flight
        if slots <= 0:
            self._blocked_on = "slot"
            return
        share, num_larger = divmod(self._num_decoding, num_micro_batches)  # so many shares are larger by one
        if num_larger > sum(entry.num_sampled > share for entry in self._in_flight.values()):
            share += 1
        # The second bound keeps all m micro-batches in use while they are being filled.
        share = min(max(share, 1), ceil(len(self._ready) / slots), self._max_requests())
        while self._ready and not entry.runs:  # again if all those chosen had to be preempted
            chosen = [self._ready.popleft() for _ in range(min(share, len(self._ready)))]
            self._append_decodes(entry, chosen)

    def _fill_with_prompts(self, entry: InFlight) -> None:
        """Adds prompt tokens up to the quota, in order of arrival; alone only while the pipeline is not full."""
        if self._prefilling is None and not self._waiting:
            return
        if not entry.runs and self._is_full_for_prefill():
            self._blocked_on = "slot"
            return
        room_tokens = self._prefill_room_tokens()
        while room_tokens > 0 and len(entry.requests) < self._max_requests():
            request = self._prefilling or self._admit()
            if request is None:
                return
            remaining_tokens = request.num_tokens - request.num_launched_tokens
            quota_tokens = chunk_tokens(self.costs, self._quota_tokens, request.num_launched_tokens)
            tokens = cut_tokens(
                remaining_tokens,
                room_tokens,
                quota_tokens,
                entry.prefill_tokens,
                self.config.chunked_prefill_size,
                self._min_chunk_tokens,
            )
            if tokens == 0 or not self._make_room_for_prefill(request, tokens):
                return
            room_tokens -= max(tokens, self._quota_tokens * tokens // quota_tokens)
            self._append_chunk(entry, request, tokens)
            if tokens < remaining_tokens:
                return  # what follows in this prompt is the next micro-batch's

    def _is_full_for_prefill(self) -> bool:
        """Whether prompt tokens had better wait for the next decodes and ride along than travel on their own."""
        coming = min(self._num_decoding + len(self._waiting) + 1, self.config.max_running_requests)
        if self._num_sampling_in_flight >= max(self.config.pp_size, self._num_micro_batches(coming)):
            return True
        depth = prefill_depth(self.costs, self.config.pp_size, self._quota_tokens, self.in_flight_limit)
        return len(self._in_flight) >= depth

    def _append_decodes(self, entry: InFlight, requests: list[Request]) -> None:
        """Puts the next token of each of these requests into the micro-batch, as far as there are blocks for them."""
        # Oldest first: whoever must be preempted for memory is then never a request already placed.
        for request in sorted(requests, key=_ARRIVAL):
            if request.request_id in self._running and self._make_room_for_decode(request):
                entry.context_tokens += request.num_launched_tokens
                self._append_run(entry, request, 1)
                entry.num_decodes += 1

    def _append_chunk(self, entry: InFlight, request: Request, tokens: int) -> None:
        """Puts the next `tokens` tokens of the prefilling request, for which there are blocks, into the micro-batch."""
        context = request.num_launched_tokens
        self._append_run(entry, request, tokens)
        entry.prefill_tokens += tokens
        entry.prefill_token_pairs += (context + tokens) ** 2 - context**2
        self._waiting_tokens -= tokens
        if request.num_launched_tokens == request.num_tokens:
            self._prefilling = None
            self._num_decoding += 1
            self._decoding_tokens += request.num_tokens

    def _append_run(self, entry: InFlight, request: Request, tokens: int) -> None:
        """Puts the request's next `tokens` tokens, for which there are blocks, into the micro-batch."""
        start = request.num_launched_tokens
        end = start + tokens
        sampling = None
        if end == request.num_tokens:
            sampling = request.sampling(end)
            entry.num_sampled += 1
        run = Run(request.request_id, request.epoch, start, request.tokens(start, end), request.block_ids, sampling)
        if request.num_prompt_logprobs is not None:
            run.prompt_logprobs = request.prompt_logprobs_due(request.num_prompt_logprobs, end)
        entry.requests.append(request)
        entry.runs.append(run)
        request.num_launched_tokens = end
        if end // self.config.page_size > start // self.config.page_size and self.pool.enable_prefix_cache:
            self._register_blocks(request)

    # ------------------------------------------------------------------------------------------------- results

    def observe(self, record: StageRecord) -> None:
        """Takes in a stage's record of a micro-batch in flight; the last stage's must come before `complete`."""
        self._feedback.observe(self._in_flight.get(record.micro_batch_id), record)

    def complete(
        self,
        micro_batch_id: int,
        token_ids: Sequence[int | None],
        now_s: float,
        logprobs: MicroBatchLogprobs | None = None,
    ) -> list[TokenOutput]:
        """Applies a result: one token for each run that was to be sampled, in the plan's order; None: not finite.

        Args:
            logprobs: None if no run was to report any.

        Returns:
            The new tokens, and the ends that follow from them. Results of requests that were aborted or preempted
            since the launch are dropped.

        Raises:
            ValueError: for a micro-batch that is not in flight, or the wrong number of tokens.
        """
        entry = self._in_flight.get(micro_batch_id)
        if entry is None:
            raise ValueError(f"micro-batch {micro_batch_id} is not in flight")
        if len(token_ids) != entry.num_sampled:
            raise ValueError(f"micro-batch {micro_batch_id}: {entry.num_sampled} tokens due, got {len(token_ids)}")
        del self._in_flight[micro_batch_id]
        self._num_sampling_in_flight -= entry.num_sampled > 0
        self._slot_freed_s = self._now_s = now_s
        self._feedback.observe_return(entry, now_s)

        outputs: list[TokenOutput] = []
        if logprobs is not None:
            _keep_prompt_logprobs(entry, logprobs)
        results = zip(token_ids, repeat(None) if logprobs is None else logprobs.sampled, strict=False)
        for request, run in zip(entry.requests, entry.runs, strict=True):
            if run.sampling is None:
                continue
            token, of_token = next(results)
            if _is_stale(request, run):
                continue
            if token is not None:
                outputs.append(self._append_token(request, token, of_token, now_s))
            else:
                outputs += filter(None, [self._fail(request)])
        return outputs

    def _append_token(self, request: Request, token: int, logprobs: Logprobs | None, now_s: float) -> TokenOutput:
        request.output_token_ids.append(token)
        if request.shaper is not None:
            request.shaper.add(token)
        self._decoding_tokens += 1
        request.ready_since_s = now_s
        self._counts["generated_tokens"] += 1
        reason: FinishReason | None = None
        if request.constraint is not None:
            reason = request.constraint.accept(token)
        if token in request.stop_token_ids and reason != "grammar":  # then an end token was the only one left
            reason = "stop"
        elif reason is None and len(request.output_token_ids) >= request.max_tokens:
            reason = "length"
        if reason is None:
            self._ready.append(request)
        else:
            self._num_decoding -= 1
            self._decoding_tokens -= request.num_tokens
            self._forget(request, reason)
        output = TokenOutput(request.request_id, token, reason, request.num_cached_tokens, logprobs)
        if request.prompt_logprobs:
            output.prompt_logprobs = join(request.prompt_logprobs)
            request.prompt_logprobs.clear()
        return output

    # ----------------------------------------------------------------------------------------- ends, preemption

    def _fail(self, request: Request) -> TokenOutput | None:
        """Ends a request whose logits are not finite; None: it gets another chance, without the prefix cache.

        One token whose keys are NaN spoils, since 0 * NaN is NaN, all tokens that are computed together with it, also
        those before it. A request that took over such a block is not at fault and must not suffer.
        """
        self.pool.forget(request.block_ids)
        if request.num_shared_blocks == 0:
            return self._cut(request.request_id, "error")
        request.may_share_blocks = False
        self._preempt(request)
        return None

    def _cut(self, request_id: int, reason: FinishReason) -> TokenOutput | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._detach(request)
        self._forget(request, reason)
        return TokenOutput(request_id, None, reason, request.num_cached_tokens)

    def _detach(self, request: Request) -> None:
        """Takes a live request out of the queue that it is in."""
        remaining = request.num_tokens - request.num_launched_tokens
        if request.request_id not in self._running:
            self._waiting.remove(request)
            self._waiting_tokens -= remaining
        elif request is self._prefilling:
            self._prefilling = None
            self._waiting_tokens -= remaining
        else:
            self._num_decoding -= 1
            self._decoding_tokens -= request.num_tokens
            if request in self._ready:
                self._ready.remove(request)

    def _forget(self, request: Request, reason: FinishReason) -> None:
        """The last step of every end: from here on nothing of the request is left in the scheduler."""
        request.finish_reason = reason
        self._release(request)
        self._running.pop(request.request_id, None)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []  # a new list: plans in flight still refer to the old one
        self._content.pop(request.request_id, None)
        self._memory_freed_s = self._now_s

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks; it will be computed again from its tokens, none of them sampled again."""
        self._detach(request)
        self._release(request)
        del self._running[request.request_id]
        request.epoch += 1
        request.num_launched_tokens = 0
        request.prompt_logprobs.clear()
        # To its place in the order of arrival. That is the front (admission is in order, the newest is preempted),
        # unless older ones wait that `_fail` set back.
        older = takewhile(lambda waiting: waiting.arrival_order < request.arrival_order, self._waiting)
        self._waiting.insert(sum(1 for _ in older), request)
        self._add_waiting_tokens(request)
        self._counts["preemptions"] += 1

    # -------------------------------------------------------------------------------------------------- memory

    def _make_room_for_decode(self, request: Request) -> bool:
        """Gives the request a block for its next token, preempting from the newest on; False if it was itself.

        The oldest request can thus always get on, and with it everything.
        """
        if len(request.block_ids) * self.config.page_size > request.num_launched_tokens:
            return True
        while (blocks := self.pool.allocate(1)) is None:
            newest = next(reversed(self._running.values()))
            self._preempt(newest)
            if newest is request:
                return False
        request.block_ids.extend(blocks)
        return True

    def _make_room_for_prefill(self, request: Request, tokens: int) -> bool:
        """Gives the request blocks for its next `tokens` tokens if there are any left; it is the newest and waits."""
        missing = ceil((request.num_launched_tokens + tokens) / self.config.page_size) - len(request.block_ids)
        blocks = self.pool.allocate(max(missing, 0))
        self._is_memory_short = blocks is None
        if blocks is None:
            self._blocked_on = "memory"
            return False
        request.block_ids.extend(blocks)
        return True

    def _admit(self) -> Request | None:
        """Moves the oldest waiting request to prefilling if it has a place and, as things stand, memory to the end."""
        if not self._waiting or len(self._running) >= self.config.max_running_requests:
            return None
        request = self._waiting[0]
        asked = (request.request_id, self.pool.num_free, self._num_decoding)
        if self._refused_with == asked:
            self._blocked_on = "memory"
            return None  # as short as before; looking up a long prefix again and again would only take time
        # The last token is always computed: its logits are what the first sample needs.
        most = request.num_tokens - 1 if request.may_share_blocks else 0
        blocks, content = self.pool.match_prefix(request.tokens(0, request.num_tokens), most)
        missing = ceil(request.num_tokens / self.config.page_size) - len(blocks)
        # Decoding requests will want a block each before long; admitting into their room only buys preemption.
        if self._running and missing + self._num_decoding > self.pool.num_free:
            self.pool.release(blocks)
            self._refused_with = asked
            self._blocked_on = "memory"
            self._is_memory_short = True
            return None
        self._waiting.popleft()
        request.block_ids = blocks
        request.num_shared_blocks = len(blocks)
        cached = len(blocks) * self.config.page_size
        request.num_launched_tokens = cached
        self._waiting_tokens -= cached
        if request.epoch == 0:
            request.num_cached_tokens = cached
            self._counts["cached_tokens"] += cached
        self._content[request.request_id] = (len(blocks), content)
        self._running[request.request_id] = request
        if not request.may_share_blocks:  # set back by _fail, it may be older than others that run
            self._running = dict(sorted(self._running.items(), key=lambda item: item[1].arrival_order))
        self._prefilling = request
        return request

    def _register_blocks(self, request: Request) -> None:
        """Makes the blocks that launched runs have filled findable for later launches."""
        size = self.config.page_size
        registered, content = self._content.get(request.request_id, (0, ROOT))
        while (registered + 1) * size <= request.num_launched_tokens:
            start = registered * size
            tokens = request.tokens(start, start + size)
            content = self.pool.register(request.block_ids[registered], content, tokens)
            registered += 1
        self._content[request.request_id] = (registered, content)

    # -------------------------------------------------------------------------------------------------- policy

    def _max_requests(self) -> int:
        cap = self.config.pp_max_micro_batch_size
        return self.config.max_running_requests if cap == "auto" else cap

    def _num_micro_batches(self, num_requests: int) -> int:
        """m* for so many decoding requests."""
        if self.config.num_micro_batches != "auto":
            return min(self.config.num_micro_batches, self.in_flight_limit)
        if self._memo_version != self.costs.version:
            self._micro_batch_memo.clear()
            self._memo_version = self.costs.version
        context = self._mean_context()
        found = self._micro_batch_memo.get((num_requests, context))
        if found is None:
            found = best_micro_batches(
                self.costs, num_requests, self.config.pp_size, self.in_flight_limit, self._max_requests(), context
            )
            self._micro_batch_memo[num_requests, context] = found
        return found

    def _mean_context(self) -> int:
        return rounded_context(self._decoding_tokens // self._num_decoding) if self._num_decoding else 0

    def _add_waiting_tokens(self, request: Request) -> None:
        """Counts the request's tokens as waiting, and spreads all that wait anew."""
        self._waiting_tokens += request.num_tokens
        self._quota_tokens = prefill_quota_tokens(
            self.costs,
            self._waiting_tokens,
            len(self._waiting) + (self._prefilling is not None),
            self._num_decoding,
            ceil(self._num_decoding / self._num_micro_batches(self._num_decoding)),
            self.config.pp_size,
            self.config.chunked_prefill_size,
            self._min_chunk_tokens,
            self._mean_context(),
        )

    def _prefill_room_tokens(self) -> int:
        """Prompt tokens for this micro-batch: the quota, less where decodes are about to need the last blocks."""
        if not self._num_decoding:
            return self._quota_tokens
        free = self.pool.num_free / self.pool.num_blocks
        # Throttled by free KV (gLLM, arXiv 2504.14775), but only when it is getting short.
        throttled = int(self.config.chunked_prefill_size * min(1.0, 4 * free))
        return min(self._quota_tokens, max(throttled, self._min_chunk_tokens))

    def _launch_reason(self, entry: InFlight) -> tuple[LaunchReason, float]:
        """Which precondition became true last, and when."""
        decoding, prefilling = entry.requests[: entry.num_decodes], entry.requests[entry.num_decodes :]
        token_s = max(map(_READY, decoding), default=-1.0)
        arrival_s = max(map(_READY, prefilling), default=-1.0)
        reasons: list[tuple[float, LaunchReason]] = [(token_s, "token-returned"), (arrival_s, "request-arrived")]
        if self._blocked_on == "slot":
            reasons.append((self._slot_freed_s, "slot-freed"))
        elif self._blocked_on == "memory":
            reasons.append((self._memory_freed_s, "memory-freed"))
        self._blocked_on = None
        since_s, reason = max(reasons)
        return reason, since_s


def _is_stale(request: Request, run: Run) -> bool:
    """Whether the request was preempted or has ended since the run's launch."""
    return request.epoch != run.epoch or request.finish_reason is not None


def _keep_prompt_logprobs(entry: InFlight, logprobs: MicroBatchLogprobs) -> None:
    """Gives each request those of its chunk."""
    found = iter(logprobs.prompt)
    for request, run in zip(entry.requests, entry.runs, strict=True):
        if run.prompt_logprobs is not None:
            part = next(found)
            if not _is_stale(request, run):
                request.prompt_logprobs.append(part)

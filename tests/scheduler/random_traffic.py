"""Drives a scheduler with random traffic and holds it to everything that must always be true.

Stages are played in earnest: in the order of launches they write each token into its KV slot and read every earlier
position of the request back, so a block that is reused too early or shared wrongly is found out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from fullbore.plan.pipeline import Journey, Pipeline, Stages
from fullbore.scheduler.micro_batch import MicroBatch, Run
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig

STOP_TOKEN = 9
LONGEST_PROMPT, MOST_TOKENS = 200, 30
MOST_STEPS_TO_DRAIN = 20_000


def next_token(request_id: int, position: int) -> int:
    """What the model says; STOP_TOKEN every now and then."""
    return (request_id * 31 + position * 7) % 23


@dataclass
class Client:
    """What a client asked for and has heard."""

    request: Request
    heard: list[int] = field(default_factory=list)
    next_start: dict[int, int] = field(default_factory=dict)  # epoch -> where its next run must start


@dataclass
class Launched:
    """A micro-batch as the stages got it: lists are copied, as sending them would do."""

    micro_batch: MicroBatch
    block_ids: list[list[int]]
    journey: Journey


class _AnyCosts:
    """Not asked: the traffic brings its own stage times."""

    def seconds(self, load: object) -> list[float]:
        raise NotImplementedError


class Traffic:
    """One scheduler under random requests, aborts, deadlines and stage times. Every step checks the invariants."""

    def __init__(self, config: SchedulerConfig, seed: int, has_records: bool = True) -> None:
        self.config = config
        self.random = Random(seed)
        self.has_records = has_records
        self.scheduler = Scheduler(config)
        self.clients: dict[int, Client] = {}
        self.in_flight: deque[Launched] = deque()
        self.now_s = 0.0
        self.steps = 0
        self.failures = 0
        self.next_id = 0
        self.kv: dict[tuple[int, int], int] = {}
        pipeline = Pipeline(num_stages=config.pp_size, costs=_AnyCosts())
        self.stages = Stages(pipeline)
        self.stage_speed = [self.random.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(config.pp_size)]

    # ------------------------------------------------------------------------------------------------- steps

    def run(self, steps: int) -> None:
        """Random steps, then nothing new until all is at rest."""
        for _ in range(steps):
            self.step()
        self.drain()

    def step(self) -> None:
        self.steps += 1
        what = self.random.random()
        if what < 0.14:
            self.add()
        elif what < 0.17:
            self.abort()
        elif what < 0.6:
            self.launch()
        else:
            self.take_result()
        self.expire()
        self.check_state()

    def drain(self) -> None:
        """No more arrivals: every request must come to its end."""
        for _ in range(MOST_STEPS_TO_DRAIN):
            self.steps += 1
            while self.launch():
                pass
            self.take_result()
            self.expire()
            self.check_state()
            if not self.clients and not self.in_flight:
                break
        state = self.scheduler.state()
        assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
        assert self.scheduler.is_idle

    def add(self) -> None:
        capacity = min(self.config.num_kv_blocks * self.config.page_size, self.config.context_length)
        prompt = self.random.randint(1, min(LONGEST_PROMPT, max(capacity // 2, 1)))
        if capacity <= prompt:
            return
        family = self.random.randint(0, 2)  # few, so that prefixes meet
        request = Request(
            self.next_id,
            [family * 7 + i % 5 for i in range(prompt)],
            self.random.randint(1, min(MOST_TOKENS, capacity - prompt)),
            arrival_s=self.now_s,
            deadline_s=self.now_s + self.random.random() * 50 if self.random.random() < 0.1 else None,
            stop_token_ids=frozenset({STOP_TOKEN}),
        )
        self.next_id += 1
        self.clients[request.request_id] = Client(request)
        self.scheduler.add(request)

    def abort(self) -> None:
        request_id = self.random.randint(0, self.next_id)  # may be unknown, or have ended
        end = self.scheduler.abort(request_id)
        assert (end is not None) == (request_id in self.clients)
        if end is not None:
            assert (end.request_id, end.token_id, end.finish_reason) == (request_id, None, "abort")
            del self.clients[request_id]
            assert self.scheduler.abort(request_id) is None

    def expire(self) -> None:
        for end in self.scheduler.expire(self.now_s):
            deadline_s = self.clients.pop(end.request_id).request.deadline_s
            assert end.finish_reason == "timeout"
            assert deadline_s is not None
            assert deadline_s <= self.now_s

    def launch(self) -> bool:
        self.now_s += self.random.random() * 0.1
        micro_batch = self.scheduler.next_micro_batch(self.now_s)
        if micro_batch is None:
            assert self.in_flight or not self.clients, "an empty pipeline and work to do, but nothing is launched"
            return False
        self.check_micro_batch(micro_batch)
        journey = Journey(micro_batch, self.now_s, micro_batch.num_sampled)
        effort = 1 + micro_batch.num_tokens * 0.1
        seconds = [speed * effort * self.random.uniform(0.5, 1.5) for speed in self.stage_speed]
        self.stages.run(journey, seconds, micro_batch.num_tokens, self.has_records)
        self.in_flight.append(Launched(micro_batch, [list(run.block_ids) for run in micro_batch.runs], journey))
        assert len(self.in_flight) <= self.config.in_flight_limit
        return True

    def take_result(self) -> None:
        if not self.in_flight:
            return
        launched = self.in_flight.popleft()
        for run, block_ids in zip(launched.micro_batch.runs, launched.block_ids, strict=True):
            assert run.block_ids[: len(block_ids)] == block_ids, "a plan was changed after its launch"
        self.execute(launched)
        self.now_s = max(self.now_s, launched.journey.ends_s[-1])
        records = launched.journey.records
        if self.random.random() < 0.1:
            self.random.shuffle(records)  # stages' messages may overtake each other …
        late = records[: len(records) // 2] if self.random.random() < 0.1 else []  # … and the result
        for record in records[len(late) :]:
            self.scheduler.observe(record)
        sampled = [run for run in launched.micro_batch.runs if run.sampling is not None]
        tokens = [self.sample(run) for run in sampled]
        for output in self.scheduler.complete(launched.micro_batch.id, tokens, self.now_s):
            self.hear(output)
        for record in late:
            self.scheduler.observe(record)

    def sample(self, run: Run) -> int | None:
        """None: the logits were not finite."""
        assert run.sampling is not None
        if self.random.random() < 0.01:
            self.failures += 1
            return None
        return next_token(run.request_id, run.sampling.position)

    def hear(self, output: TokenOutput) -> None:
        if output.finish_reason == "error":
            assert output.token_id is None
            assert self.failures > 0
            del self.clients[output.request_id]
            return
        client = self.clients[output.request_id]
        request = client.request
        assert output.token_id == next_token(output.request_id, len(request.prompt_token_ids) + len(client.heard))
        client.heard.append(output.token_id)
        is_last = output.token_id == STOP_TOKEN or len(client.heard) == request.max_tokens
        assert (output.finish_reason is not None) == is_last
        if is_last:
            assert output.finish_reason == ("stop" if output.token_id == STOP_TOKEN else "length")
            del self.clients[output.request_id]

    # ------------------------------------------------------------------------------------------------ invariants

    def execute(self, launched: Launched) -> None:
        """What every stage does: all runs write, then all runs read what came before."""
        size = self.config.page_size
        runs = list(zip(launched.micro_batch.runs, launched.block_ids, strict=True))
        written = set()
        for run, block_ids in runs:
            for position, token in enumerate(run.token_ids, start=run.start):
                slot = (block_ids[position // size], position % size)
                assert slot not in written, "two runs of one micro-batch write to the same place"
                written.add(slot)
                self.kv[slot] = token
        for run, block_ids in runs:
            client = self.clients.get(run.request_id)
            if client is None or client.request.epoch != run.epoch:
                continue  # its result will be dropped
            request = client.request
            end = run.start + len(run.token_ids)
            read = [self.kv.get((block_ids[position // size], position % size)) for position in range(end)]
            assert read == request.tokens(0, end), f"request {run.request_id} reads another's keys and values"

    def check_micro_batch(self, micro_batch: MicroBatch) -> None:
        runs, config = micro_batch.runs, self.config
        assert runs
        assert len({run.request_id for run in runs}) == len(runs), "a request twice in one micro-batch"
        if config.pp_max_micro_batch_size != "auto":
            assert len(runs) <= config.pp_max_micro_batch_size
        prompts = [run for run in runs if self.is_prompt(run)]
        assert sum(len(run.token_ids) for run in prompts) <= config.chunked_prefill_size
        for run in runs:
            self.check_run(run)

    def is_prompt(self, run: Run) -> bool:
        """Whether the run is part of a prompt, or of a preempted request's recomputation."""
        return len(run.token_ids) > 1 or run.sampling is None

    def check_run(self, run: Run) -> None:
        client = self.clients[run.request_id]
        request = client.request
        end = run.start + len(run.token_ids)
        assert run.epoch == request.epoch
        assert run.token_ids == request.tokens(run.start, end), "tokens that are not the request's"
        assert len(run.block_ids) * self.config.page_size >= end, "no block for the last token"
        expected_start = client.next_start.get(run.epoch)
        if expected_start is None:  # admitted: may start after a cached prefix
            assert run.start % self.config.page_size == 0
            assert run.start < request.num_tokens
        else:
            assert run.start == expected_start, "a token computed twice, or left out"
        client.next_start[run.epoch] = end
        assert (run.sampling is not None) == (end == request.num_tokens)
        if run.sampling is not None:
            assert run.sampling.position == request.num_tokens
            others = (other for launched in self.in_flight for other in launched.micro_batch.runs)
            assert not any(
                (other.request_id, other.epoch) == (run.request_id, run.epoch) and other.sampling for other in others
            ), "a request decodes in two micro-batches at once"

    def check_state(self) -> None:
        """Blocks are conserved, counters true, queues in order of arrival."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = [0] * pool.num_blocks
        for request in scheduler._running.values():
            for block in request.block_ids:
                held[block] += 1
        assert held == pool._references
        free = [*pool._free, *pool._evictable]
        assert sorted(free) == [block for block, count in enumerate(held) if count == 0]
        assert pool.num_used + pool.num_free == pool.num_blocks

        running, waiting = list(scheduler._running.values()), list(scheduler._waiting)
        assert {r.request_id for r in running} | {r.request_id for r in waiting} == set(self.clients)
        assert len(running) + len(waiting) == len(self.clients)
        assert len(running) <= self.config.max_running_requests
        for queue in (running, waiting) if self.failures else ([*running, *waiting],):
            order = [r.arrival_order for r in queue]
            assert order == sorted(order), "who came first is served first, and preempted last"

        prefilling = scheduler._prefilling
        assert scheduler._num_decoding == sum(r is not prefilling for r in running)
        assert scheduler._decoding_tokens == sum(r.num_tokens for r in running if r is not prefilling)
        unlaunched = [*waiting, *([prefilling] if prefilling else [])]
        assert scheduler._waiting_tokens == sum(r.num_tokens - r.num_launched_tokens for r in unlaunched)
        state = scheduler.state()
        assert (state.in_flight, state.running, state.waiting) == (len(self.in_flight), len(running), len(waiting))

"""A thousand aborts at random moments leave nothing behind, and change nothing for those who stay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from engine_helpers import expected, greedy_request, prompt_of
from loopback_helpers import SLEEP_MODEL, assert_at_rest, sleep_engine
from tiny_references import CASES, TinyModels

from fullbore.engine.loopback import LoopbackEngine
from fullbore.scheduler.request import Request

NUM_ABORTS = 1000
MOMENTS = ["before", "during prefill", "during decode", "again", "after the end", "unknown"]
MOST_REQUESTS = 16  # at a time


def moment_of(request: Request) -> str:
    """How far a live request has come."""
    if request.num_launched_tokens == 0:
        return "before"
    return "during decode" if request.output_token_ids else "during prefill"


class Storm:
    """Requests that come all the time, and aborts in bursts."""

    def __init__(self, engine: LoopbackEngine, make_request: Callable[[int], Request], seed: int) -> None:
        self.engine = engine
        self.make_request = make_request
        self.chance = random.Random(seed)
        self.live: dict[int, Request] = {}
        self.survivors: dict[int, Request] = {}
        self.aborted: list[int] = []
        self.aborts: Counter[str] = Counter()  # when they came
        self.tokens: dict[int, list[int]] = {}
        self._next_id = 0

    def run(self) -> None:
        while self.aborts.total() < NUM_ABORTS:
            self._fill_up()
            if self.chance.random() < 0.25:
                for _ in range(self.chance.randint(1, 6)):
                    self._abort_one()
            self._tick()
        while not self.engine.is_idle:
            self._tick()

    def _fill_up(self) -> None:
        while len(self.live) < MOST_REQUESTS and self.chance.random() < 0.8:
            request = self.make_request(self._next_id)
            self.engine.add(request)
            self.live[self._next_id] = request
            self.tokens[self._next_id] = []
            self._next_id += 1

    def _abort_one(self) -> None:
        moment = self.chance.choice(["live", "live", "live", "live", "again", "after the end", "unknown"])
        if moment == "live" and self.live:
            request = self.live.pop(self.chance.choice(list(self.live)))
            self.aborts[moment_of(request)] += 1
            output = self.engine.abort(request.request_id)
            assert output is not None
            assert (output.token_id, output.finish_reason) == (None, "abort")
            self.aborted.append(request.request_id)
            return
        candidates = {"again": self.aborted, "after the end": list(self.survivors), "unknown": [-1, self._next_id]}
        if candidates.get(moment):
            self.aborts[moment] += 1
            assert self.engine.abort(self.chance.choice(candidates[moment])) is None

    def _tick(self) -> None:
        for output in self.engine.tick():
            assert output.request_id in self.live, "a request that was aborted or has ended got an output"
            assert output.token_id is not None
            self.tokens[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                self.survivors[output.request_id] = self.live.pop(output.request_id)


def check(storm: Storm) -> None:
    assert not storm.live
    assert_at_rest(storm.engine)
    assert storm.aborts.total() >= NUM_ABORTS
    assert all(storm.aborts[moment] > 10 for moment in MOMENTS), storm.aborts
    assert len(storm.survivors) > 40


@pytest.mark.parametrize("seed", range(2))
def test_thousand_aborts(seed: int) -> None:
    chance = random.Random(seed)
    engine = sleep_engine(4, seed, num_kv_blocks=64, chunked_prefill_size=9)

    def make_request(request_id: int) -> Request:
        prompt = prompt_of(request_id % 50, chance.randint(1, 20))  # some begin as others do
        return greedy_request(request_id, prompt, chance.randint(1, 30))

    storm = Storm(engine, make_request, seed)
    storm.run()
    check(storm)
    for request_id, request in storm.survivors.items():
        assert storm.tokens[request_id] == expected(SLEEP_MODEL, request.prompt_token_ids, request.max_tokens)
    assert engine.scheduler.state().cached_tokens > 0


@pytest.mark.parametrize(
    "pp_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_thousand_aborts_of_a_real_model(tiny: TinyModels, pp_size: int) -> None:
    name = "LlamaForCausalLM-tied"
    reference = tiny.reference(name)
    engine = tiny.engine(name, pp_size, pp_size, num_kv_blocks=72, chunked_prefill_size=24)

    def make_request(request_id: int) -> Request:
        return CASES[request_id % len(CASES)].request(request_id, reference.eos_token_id)

    storm = Storm(engine, make_request, pp_size)
    storm.run()
    check(storm)
    for request_id in storm.survivors:
        index = request_id % len(CASES)
        reference.check(index, storm.tokens[request_id], lambda: [stage.runner for stage in engine.stages])

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_helpers import expected, greedy_request, prompt_of
from tiny_models import make_tiny_model

from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.engine.sleep_model import parse
from fullbore.engine.sleep_runner import SleepRunner
from fullbore.errors import RequestError
from fullbore.model.partition import partition_layers
from fullbore.scheduler.scheduler import SchedulerConfig

MODEL = "sleep://layers=4,layer_ms=0,vocab=1000"
PAGE_SIZE = 4


def make_engine(pp_size: int, seed: int | None = None, num_kv_blocks: int = 400, **settings: object) -> LoopbackEngine:
    model = parse(MODEL)
    partition = partition_layers([1.0] * model.layers, pp_size)
    runners = [SleepRunner(model, stage, partition, PAGE_SIZE) for stage in range(pp_size)]
    for runner in runners:
        runner.allocate_kv(num_kv_blocks)
    config = SchedulerConfig(num_kv_blocks=num_kv_blocks, pp_size=pp_size, page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]
    return LoopbackEngine(runners, config, seed)


def assert_all_counters_zero(engine: LoopbackEngine) -> None:
    state = engine.scheduler.state()
    assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
    assert all(not stage.plans and not stage.transport.inbox for stage in engine.stages)


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("seed", [None, 1])
def test_tokens_are_right_whatever_the_pipeline(pp_size: int, chunk: int, seed: int | None) -> None:
    engine = make_engine(pp_size, seed, chunked_prefill_size=chunk)
    prompts = [prompt_of(k, 1 + 13 * k % 60) for k in range(10)]
    outputs = engine.generate([greedy_request(k, prompt, 3 + k) for k, prompt in enumerate(prompts)])
    for k, prompt in enumerate(prompts):
        assert outputs[k] == expected(MODEL, prompt, 3 + k)
    assert_all_counters_zero(engine)


def test_eight_requests_keep_four_stages_full() -> None:
    engine = make_engine(4)
    engine.generate([greedy_request(k, prompt_of(k, 5), 50) for k in range(8)])
    launches = engine.records.in_flight_at_launch
    full = sum(count for in_flight, count in launches.items() if in_flight >= 4)
    assert full > 0.9 * sum(launches.values()), launches


def test_one_request_on_four_stages() -> None:
    engine = make_engine(4)
    prompt = prompt_of(1, 30)
    assert engine.generate([greedy_request(0, prompt, 12)])[0] == expected(MODEL, prompt, 12)


@pytest.mark.parametrize("seed", range(6))
def test_little_memory_costs_preemptions_but_no_token(seed: int) -> None:
    engine = make_engine(3, seed, num_kv_blocks=24, chunked_prefill_size=16)
    prompts = [prompt_of(k % 4, 10 + 2 * k) for k in range(12)]  # some share prefixes
    outputs = engine.generate([greedy_request(k, prompt, 20) for k, prompt in enumerate(prompts)])
    for k, prompt in enumerate(prompts):
        assert outputs[k] == expected(MODEL, prompt, 20)
    assert engine.scheduler.state().preemptions > 0
    assert_all_counters_zero(engine)


@pytest.mark.parametrize("seed", range(4))
def test_thousand_aborts_leave_nothing(seed: int) -> None:
    chance = random.Random(seed)
    engine = make_engine(4, seed, num_kv_blocks=60, chunked_prefill_size=9)
    alive: dict[int, list[int]] = {}
    ended: list[int] = []
    num_aborts = 0
    next_id = 0
    while num_aborts < 1000:
        if len(alive) < 12:
            prompt = prompt_of(next_id, chance.randint(1, 40))
            engine.add(greedy_request(next_id, prompt, chance.randint(1, 30)))
            alive[next_id] = prompt
            next_id += 1
        if chance.random() < 0.5:  # before, during prefill, during decode
            victim = chance.choice(list(alive))
            output = engine.abort(victim)
            assert output is not None
            assert output.finish_reason == "abort"
            del alive[victim]
            ended.append(victim)
            num_aborts += 1
        if ended and chance.random() < 0.3:  # twice, after the end, unknown
            assert engine.abort(chance.choice([*ended, -1])) is None
            num_aborts += 1
        for output in engine.tick():
            assert output.request_id in alive, "an ended request got a token"
            if output.finish_reason is not None:
                del alive[output.request_id]
                ended.append(output.request_id)
    for request_id in list(alive):
        engine.abort(request_id)
    for _ in range(1000):
        if engine.is_idle:
            break
        engine.tick()
    assert_all_counters_zero(engine)
    prompt = prompt_of(5, 33)
    assert engine.generate([greedy_request(next_id, prompt, 9)])[next_id] == expected(MODEL, prompt, 9)


def test_request_that_cannot_fit_is_refused() -> None:
    engine = make_engine(2, num_kv_blocks=4)
    with pytest.raises(RequestError, match="16 tokens"):
        engine.add(greedy_request(0, prompt_of(0, 10), 10))
    assert engine.is_idle


def test_real_stages_agree_whatever_the_pipeline(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "model")
    prompts = [[token % 250 for token in prompt_of(k, 3 + 9 * k)] for k in range(4)]
    outputs = []
    for pp_size in (1, 2, 4):
        config = SchedulerConfig(num_kv_blocks=64, pp_size=pp_size, page_size=PAGE_SIZE, chunked_prefill_size=7)
        runners = load_stages(folder, partition_layers([1.0] * 4, pp_size), 64, PAGE_SIZE)
        engine = LoopbackEngine(runners, config, seed=pp_size)
        outputs.append(engine.generate([greedy_request(k, prompt, 8) for k, prompt in enumerate(prompts)]))
        assert_all_counters_zero(engine)
    assert [len(outputs[0][k]) for k in range(4)] == [8] * 4
    assert outputs[0] == outputs[1] == outputs[2]

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import expected, greedy_request, prompt_of
from loopback_helpers import SLEEP_MODEL, assert_at_rest, sleep_engine
from tiny_models import make_tiny_model

from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.errors import RequestError
from fullbore.model.partition import partition_layers
from fullbore.scheduler.scheduler import SchedulerConfig


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("seed", [None, 1])
def test_tokens_are_right_whatever_the_pipeline(pp_size: int, chunk: int, seed: int | None) -> None:
    engine = sleep_engine(pp_size, seed, chunked_prefill_size=chunk)
    prompts = [prompt_of(k, 1 + 13 * k % 60) for k in range(10)]
    outputs = engine.generate([greedy_request(k, prompt, 3 + k) for k, prompt in enumerate(prompts)])
    for k, prompt in enumerate(prompts):
        assert outputs[k] == expected(SLEEP_MODEL, prompt, 3 + k)
    assert_at_rest(engine)


def test_eight_requests_keep_four_stages_full() -> None:
    engine = sleep_engine(4)
    engine.generate([greedy_request(k, prompt_of(k, 5), 50) for k in range(8)])
    launches = engine.records.in_flight_at_launch
    full = sum(count for in_flight, count in launches.items() if in_flight >= 4)
    assert full > 0.9 * sum(launches.values()), launches


def test_one_request_on_four_stages() -> None:
    engine = sleep_engine(4)
    prompt = prompt_of(1, 30)
    assert engine.generate([greedy_request(0, prompt, 12)])[0] == expected(SLEEP_MODEL, prompt, 12)


@pytest.mark.parametrize("seed", range(6))
def test_little_memory_costs_preemptions_but_no_token(seed: int) -> None:
    engine = sleep_engine(3, seed, num_kv_blocks=24, chunked_prefill_size=16)
    prompts = [prompt_of(k % 4, 10 + 2 * k) for k in range(12)]  # some share prefixes
    outputs = engine.generate([greedy_request(k, prompt, 20) for k, prompt in enumerate(prompts)])
    for k, prompt in enumerate(prompts):
        assert outputs[k] == expected(SLEEP_MODEL, prompt, 20)
    assert engine.scheduler.state().preemptions > 0
    assert_at_rest(engine)


def test_request_that_cannot_fit_is_refused() -> None:
    engine = sleep_engine(2, num_kv_blocks=4)
    with pytest.raises(RequestError, match="16 tokens"):
        engine.add(greedy_request(0, prompt_of(0, 10), 10))
    assert engine.is_idle


def test_real_stages_agree_whatever_the_pipeline(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "model")
    prompts = [[token % 250 for token in prompt_of(k, 3 + 9 * k)] for k in range(4)]
    outputs = []
    for pp_size in (1, 2, 4):
        config = SchedulerConfig(num_kv_blocks=64, pp_size=pp_size, page_size=4, chunked_prefill_size=7)
        runners = load_stages(folder, partition_layers([1.0] * 4, pp_size), 64, page_size=4)
        engine = LoopbackEngine(runners, config, seed=pp_size)
        outputs.append(engine.generate([greedy_request(k, prompt, 8) for k, prompt in enumerate(prompts)]))
        assert_at_rest(engine)
    assert [len(outputs[0][k]) for k in range(4)] == [8] * 4
    assert outputs[0] == outputs[1] == outputs[2]

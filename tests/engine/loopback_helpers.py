"""Shared by the tests of engines in one process."""

from __future__ import annotations

import random
from collections.abc import Iterable

from fullbore.engine.loopback import LoopbackEngine
from fullbore.engine.sleep_model import parse
from fullbore.engine.sleep_runner import SleepRunner
from fullbore.model.partition import partition_layers
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import SchedulerConfig

SLEEP_MODEL = "sleep://layers=4,layer_ms=0,vocab=1000"  # of `sleep_engine`


def sleep_engine(pp_size: int, seed: int | None = None, num_kv_blocks: int = 400, **settings: object) -> LoopbackEngine:
    """SLEEP_MODEL in this process, with 4 tokens in a block."""
    model = parse(SLEEP_MODEL)
    partition = partition_layers([1.0] * model.layers, pp_size)
    runners = [SleepRunner(model, stage, partition, page_size=4) for stage in range(pp_size)]
    for runner in runners:
        runner.allocate_kv(num_kv_blocks)
    config = SchedulerConfig(num_kv_blocks=num_kv_blocks, pp_size=pp_size, page_size=4, **settings)  # type: ignore[arg-type]
    return LoopbackEngine(runners, config, seed)


def run_to_end(
    engine: LoopbackEngine, requests: Iterable[Request], arrival_seed: int | None = None, max_ticks: int = 100_000
) -> dict[int, list[TokenOutput]]:
    """Runs requests to their ends; with a seed they arrive one by one, at random moments. Request id -> its outputs."""
    chance = None if arrival_seed is None else random.Random(arrival_seed)
    coming = list(requests)
    outputs: dict[int, list[TokenOutput]] = {request.request_id: [] for request in coming}
    for _ in range(max_ticks):
        while coming and (chance is None or chance.random() < 0.5):
            engine.add(coming.pop(0))
        for output in engine.tick():
            outputs[output.request_id].append(output)
        if not coming and engine.is_idle:
            return outputs
    raise AssertionError(f"not finished after {max_ticks} ticks: {engine.scheduler.state()}")


def assert_at_rest(engine: LoopbackEngine) -> None:
    """Every counter and queue of the scheduler, of the KV blocks and of every stage is empty."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    state = scheduler.state()
    assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
    assert (scheduler._num_decoding, scheduler._num_sampling_in_flight, scheduler._waiting_tokens) == (0, 0, 0)
    assert not scheduler._requests
    assert not scheduler._ready
    assert not scheduler._content
    assert scheduler._prefilling is None
    assert pool.num_free == pool.num_blocks
    assert not any(pool._references)
    assert engine.in_flight == 0
    for stage in engine.stages:
        assert not stage.plans
        assert not stage.transport.inbox

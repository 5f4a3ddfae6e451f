"""The engine over stages whose decode steps are padded as for CUDA graphs, and the count of those steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import greedy_request, prompt_of
from loopback_helpers import assert_at_rest
from tiny_models import make_tiny_model

from fullbore.config import EngineConfig
from fullbore.engine.loopback import LoopbackEngine
from fullbore.engine.runner import Runner, graph_requests
from fullbore.errors import ConfigError
from fullbore.model.native import backend as native_backend
from fullbore.model.partition import partition_layers
from fullbore.model.runner import StageRunner
from fullbore.scheduler.scheduler import SchedulerConfig

PAGE_SIZE = 4
NUM_BLOCKS = 80


def make_engine(folder: Path, pp_size: int, most_requests: int, seed: int | None) -> LoopbackEngine:
    partition = partition_layers([1.0] * 4, pp_size)
    runners: list[Runner] = []
    for stage in range(pp_size):
        runner = StageRunner.load(folder, stage, partition, "cpu", "float32", PAGE_SIZE, graph_requests=most_requests)
        runner.allocate_kv(NUM_BLOCKS)
        runners.append(runner)
    config = SchedulerConfig(num_kv_blocks=NUM_BLOCKS, pp_size=pp_size, page_size=PAGE_SIZE, chunked_prefill_size=16)
    return LoopbackEngine(runners, config, seed)


def test_tokens_are_the_same_and_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "load_library", lambda: None)
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "model", context_length=256)
    # Several prompts begin alike, and there is too little memory for all: blocks are shared, freed and used again.
    requests = [(k, [token % 250 for token in prompt_of(k % 4, 5 + 6 * k)], 24) for k in range(9)]

    def run(pp_size: int, most_requests: int) -> LoopbackEngine:
        engine = make_engine(folder, pp_size, most_requests, seed=pp_size)
        outputs.append(engine.generate([greedy_request(*request) for request in requests]))
        assert_at_rest(engine)
        return engine

    outputs: list[dict[int, list[int]]] = []
    eager = run(1, 0)
    assert eager.records.graph_steps == [0]
    for pp_size in (1, 2, 3):
        engine = run(pp_size, 16)
        assert engine.scheduler.state().preemptions > 0
        for graphed, counts in zip(engine.records.graph_steps, engine.records.steps_in_bucket, strict=True):
            assert 20 < graphed < sum(counts), "decode steps are from a graph, those with prompts are not"
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_graphs_are_for_gpus_and_can_be_switched_off() -> None:
    assert graph_requests(EngineConfig(), "cuda:0") == 256
    assert graph_requests(EngineConfig(max_running_requests=8), "cuda:1") == 8
    assert graph_requests(EngineConfig(pp_max_micro_batch_size=4), "cuda:0") == 4
    assert graph_requests(EngineConfig(pp_max_micro_batch_size=900), "cuda:0") == 256
    assert graph_requests(EngineConfig(disable_cuda_graph=True), "cuda:0") == 0
    assert graph_requests(EngineConfig(), "cpu") == 0


def test_one_device_per_stage() -> None:
    for device in ("auto", "cuda"):
        EngineConfig(pp_size=2, devices=("cuda:0", "cuda:0"), device=device).validate()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--device cpu and --devices cuda:0,cuda:1 contradict"):
        EngineConfig(pp_size=2, devices=("cuda:0", "cuda:1"), device="cpu").validate()
    with pytest.raises(ConfigError, match="--devices names 1 devices but --pp-size is 2"):
        EngineConfig(pp_size=2, devices=("cuda:0",)).validate()

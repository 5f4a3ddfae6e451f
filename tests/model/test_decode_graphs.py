"""Decode steps in the static, padded form that CUDA graphs need, computed anew on the CPU instead of replayed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from fullbore.model.native import backend as native_backend
from fullbore.model.native import graphs as graphs_module
from fullbore.model.native.buckets import Bucket, make_buckets
from fullbore.model.native.graphs import Step
from fullbore.model.runner import StageRunner
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

PAGE_SIZE = 8
NUM_BLOCKS = 200
MOST_REQUESTS = 7
CONTEXT_LENGTH = 700  # beyond the first width of 512 tokens
GREEDY = Sampling(0.0, 1.0, 0, 0, 0, 0)
PARTITIONS = [(4,), (1, 3), (2, 1, 1)]
BUCKETS = make_buckets(MOST_REQUESTS, CONTEXT_LENGTH, PAGE_SIZE, gathers=True)


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "load_library", lambda: None)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(request.param, path, tied=True, seed=3, context_length=CONTEXT_LENGTH)


def load(folder: Path, partition: tuple[int, ...], graph_requests: int, dtype: str = "float32") -> list[StageRunner]:
    stages = []
    for stage in range(len(partition)):
        runner = StageRunner.load(folder, stage, partition, "cpu", dtype, PAGE_SIZE, graph_requests=graph_requests)
        runner.allocate_kv(NUM_BLOCKS)
        stages.append(runner)
    return stages


def forward(stages: list[StageRunner], runs: list[Run]) -> torch.Tensor:
    micro_batch = MicroBatch(0, runs, "slot-freed", 0.0)
    hidden = None
    for stage in stages:
        hidden = stage.forward(micro_batch, hidden)
    assert hidden is not None
    return hidden


def poison(stages: list[StageRunner]) -> None:
    """What padding may read becomes NaN: the scratch block, and the static tensors of hidden states."""
    for stage in stages:
        assert stage._graphs is not None
        assert stage._cache is not None
        for tensor in (*stage._cache.keys, *stage._cache.values):
            tensor[NUM_BLOCKS:].fill_(float("nan"))
        stage._graphs._hidden.fill_(float("nan"))
        stage._graphs._output.fill_(float("nan"))


def prompts_of(lengths: list[int], generator: random.Random) -> list[Run]:
    """Prompts of these lengths in blocks of their own, with room for two tokens more."""
    free = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    runs = []
    for who, length in enumerate(lengths):
        blocks = [free.pop() for _ in range((length + 2) // PAGE_SIZE + 1)]
        runs.append(Run(who, 0, 0, [generator.randrange(VOCAB_SIZE) for _ in range(length)], blocks, GREEDY))
    return runs


def next_tokens(runs: list[Run], generator: random.Random) -> list[Run]:
    return [
        Run(run.request_id, 0, run.start + len(run.token_ids), [generator.randrange(VOCAB_SIZE)], run.block_ids, GREEDY)
        for run in runs
    ]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: f"P{len(partition)}")
def test_padded_steps_give_the_logits_and_the_cache_of_plain_ones(folder: Path, partition: tuple[int, ...]) -> None:
    plain, padded = load(folder, partition, 0), load(folder, partition, MOST_REQUESTS)
    generator = random.Random(len(partition))
    chosen: set[Bucket] = set()
    for num_requests in range(1, MOST_REQUESTS + 1):
        for longest in (30, 620):
            lengths = [longest, *[generator.choice([1, 7, 8, 9, 15, 40]) for _ in range(num_requests - 1)]]
            runs = prompts_of(lengths, generator)
            for _ in range(3):  # the prompts, which run without a graph, then two decode steps
                is_decode = all(len(run.token_ids) == 1 for run in runs)
                poison(padded)
                expected, found = forward(plain, runs), forward(padded, runs)
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
                for stage, reference in zip(padded, plain, strict=True):
                    assert stage.used_graph == is_decode
                    assert not reference.used_graph
                    assert_same_cache(stage, reference)
                if is_decode:
                    bucket = min(b for b in BUCKETS if b.requests >= num_requests and b.blocks * PAGE_SIZE > longest)
                    chosen.add(bucket)
                runs = next_tokens(runs, generator)
    assert chosen == set(BUCKETS)


def assert_same_cache(stage: StageRunner, reference: StageRunner) -> None:
    """All blocks but the scratch block."""
    assert stage._cache is not None
    assert reference._cache is not None
    for ours, theirs in zip(
        (*stage._cache.keys, *stage._cache.values), (*reference._cache.keys, *reference._cache.values), strict=True
    ):
        assert len(theirs) == NUM_BLOCKS
        torch.testing.assert_close(ours[:NUM_BLOCKS], theirs, atol=2e-5, rtol=1e-5)


def test_blocks_that_were_others_do_not_reach_their_next_owner(folder: Path) -> None:
    plain, padded = load(folder, (4,), 0), load(folder, (4,), MOST_REQUESTS)
    generator = random.Random(0)
    runs = prompts_of([PAGE_SIZE, 3], generator)
    for stages in (plain, padded):
        forward(stages, runs)
        cache = stages[0]._cache
        assert cache is not None
        for tensor in (*cache.keys, *cache.values):
            tensor[runs[0].block_ids[1]].fill_(float("nan"))  # the block that the next token begins
    runs = next_tokens(runs, generator)
    expected, found = forward(plain, runs), forward(padded, runs)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_not_all_runs_need_to_be_sampled(folder: Path) -> None:
    plain, padded = load(folder, (4,), 0), load(folder, (4,), MOST_REQUESTS)
    generator = random.Random(1)
    runs = prompts_of([1, 1, 1], generator)  # prompts of one token are decode steps like others
    runs[1].sampling = None
    expected, found = forward(plain, runs), forward(padded, runs)
    assert padded[0].used_graph
    assert len(found) == 2
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(folder: Path, dtype: str) -> None:
    plain, padded = load(folder, (1, 3), 0, dtype), load(folder, (1, 3), MOST_REQUESTS, dtype)
    generator = random.Random(2)
    runs = prompts_of([30, 5, 9], generator)
    for _ in range(3):
        expected, found = forward(plain, runs), forward(padded, runs)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 0.05 * expected.std()
        runs = next_tokens(runs, generator)


def test_more_requests_than_graphs_were_made_for(folder: Path) -> None:
    (runner,) = load(folder, (4,), 2)
    generator = random.Random(3)
    runs = prompts_of([1, 1, 1], generator)
    forward([runner], runs)
    assert not runner.used_graph
    forward([runner], runs[:2])
    assert runner.used_graph


def test_backends_without_graphs_run_without(folder: Path) -> None:
    runner = StageRunner.load(
        folder, 0, (4,), "cpu", "float32", PAGE_SIZE, backend="transformers", graph_requests=MOST_REQUESTS
    )
    runner.allocate_kv(NUM_BLOCKS)
    assert runner._graphs is None
    forward([runner], prompts_of([1], random.Random(0)))
    assert not runner.used_graph


class _Operations(TorchDispatchMode):
    """Notes operations, and refuses what a CUDA graph cannot hold."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} makes the processor wait, or copies from it"
        if name == "index":
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "how many is not known before"
        self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    steps: list[Step] = []

    def capture(step: Step) -> Step:
        steps.append(step)
        return step

    monkeypatch.setattr(graphs_module, "run_anew", capture)
    return steps


@pytest.mark.parametrize("partition", [(4,), (1, 3)], ids=lambda partition: f"P{len(partition)}")
def test_what_is_captured_can_be_captured(folder: Path, partition: tuple[int, ...], captured: list[Step]) -> None:
    """No operation that waits for the device or takes numbers from the host, and always the same ones."""
    load(folder, partition, MOST_REQUESTS)
    assert len(captured) == len(partition) * len(BUCKETS)
    for step in captured:
        with torch.inference_mode():
            step()  # as before a capture
        with torch.inference_mode(), _Operations() as first:
            step()
        with torch.inference_mode(), _Operations() as second:
            step()
        assert first.names == second.names
        assert "index_copy_" in first.names


def test_the_check_of_operations_can_fail() -> None:
    with _Operations(), pytest.raises(AssertionError, match="makes the processor wait"):
        torch.zeros(3)[0].item()
    with _Operations(), pytest.raises(AssertionError, match="copies from it"):
        torch.tensor([1, 2])
    with _Operations(), pytest.raises(AssertionError, match="how many"):
        torch.zeros(3)[torch.zeros(3, dtype=torch.bool)]


def test_tables_of_the_rotary_embedding_stay_where_they_are(folder: Path) -> None:
    (runner,) = load(folder, (4,), MOST_REQUESTS)
    rotary = runner._module._rotary  # type: ignore[attr-defined]
    address = rotary.cosines.data_ptr()
    generator = random.Random(4)
    runs = prompts_of([CONTEXT_LENGTH - 1], generator)
    forward([runner], runs)
    forward([runner], next_tokens(runs, generator))
    assert rotary.cosines.data_ptr() == address


def test_a_capture_comes_after_a_first_run_and_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch, whose names and arguments are the real ones; what they do only a GPU can tell."""
    torch_cuda = create_autospec(torch.cuda)
    torch_cuda.graph_pool_handle.return_value = (0, 1)
    for name in ("graph_pool_handle", "synchronize", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch_cuda, name))
    capture = graphs_module.CudaGraphs("cuda:0")
    for _ in range(2):
        replay = capture(torch_cuda.ipc_collect)  # stands for the step
        assert replay is torch_cuda.CUDAGraph.return_value.replay
    calls = [name for name, *_ in torch_cuda.mock_calls]
    once = ["ipc_collect", "synchronize", "CUDAGraph", "graph", "graph().__enter__", "ipc_collect"]
    once += ["graph().__exit__", "synchronize"]
    assert calls == ["graph_pool_handle", *once, *once]
    assert torch_cuda.graph.mock_calls[0].kwargs == {"pool": (0, 1)}


@pytest.mark.slow
def test_host_and_device_are_kept_apart(tmp_path: Path) -> None:
    """On a device that exists in name only; see fake_device.py."""
    model = make_tiny_model("Qwen3ForCausalLM", tmp_path, tied=True)
    script = Path(__file__).parent / "fake_device.py"
    result = subprocess.run([sys.executable, str(script), str(model)], capture_output=True, text=True, timeout=200)
    # A decode micro-batch, one larger than the graphs, and a mistake made on purpose.
    assert result.stdout.split() == ["graph", "eager", "FakeTensorDeviceMismatchError"], result.stderr

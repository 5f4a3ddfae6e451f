"""Attention by FlashInfer: what it is told, and that a model computes the same with it; with a stand-in for it."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import pytest
import torch
from tiny_models import VOCAB_SIZE, make_tiny_model

from fullbore.model.native import backend as native_backend
from fullbore.model.native import flashinfer_kernels
from fullbore.model.native.buckets import Bucket, pad
from fullbore.model.native.flashinfer_kernels import (
    FlashInferKernels,
    difference_from_torch,
    make_flashinfer_kernels,
)
from fullbore.model.native.kernels import HeadShape
from fullbore.model.native.paged_metadata import PagedMetadata, of_micro_batch, of_rows
from fullbore.model.runner import StageRunner
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

GREEDY = Sampling(0.0, 1.0, 0, 0, 0, 0)
PAGE_SIZE = 8
NUM_BLOCKS = 60
SHAPE = HeadShape(6, 2, 64)


def run_of(start: int, length: int, blocks: list[int]) -> Run:
    return Run(0, 0, start, [1] * length, blocks, None)


def test_metadata_of_prompts_and_decodes() -> None:
    runs = [run_of(0, 9, [7, 3, 5]), run_of(15, 1, [2, 4]), run_of(16, 1, [1, 6, 8, 9]), run_of(8, 8, [10, 11])]
    metadata = of_micro_batch(MicroBatch(0, runs, "slot-freed", 0.0), PAGE_SIZE)
    assert metadata.qo_indptr == [0, 9, 10, 11, 19]
    assert metadata.indptr == [0, 2, 4, 7, 9]
    assert metadata.indices == [7, 3, 2, 4, 1, 6, 8, 10, 11], "blocks held in reserve are left out"
    assert metadata.last_page_len == [1, 8, 1, 8]


def test_metadata_of_padded_rows() -> None:
    micro_batch = MicroBatch(0, [run_of(15, 1, [2, 4]), run_of(0, 1, [9])], "slot-freed", 0.0)
    metadata = of_rows(pad(micro_batch, Bucket(4, 6), PAGE_SIZE, 99), PAGE_SIZE)
    assert metadata == PagedMetadata([0, 1, 2, 3, 4], [0, 2, 3, 4, 5], [2, 4, 9, 99, 99], [8, 1, 1, 1])


def test_metadata_finds_every_token_where_it_was_stored() -> None:
    """Against the slots that the cache is written at, for random plans."""
    generator = random.Random(0)
    for _ in range(200):
        page_size = generator.choice([1, 3, 8, 16])
        free = generator.sample(range(500), 500)
        runs = []
        for _ in range(generator.randint(1, 6)):
            start, length = generator.choice([0, 0, 1, 7, 8, 40]), generator.choice([1, 1, 2, 8, 9, 30])
            blocks = [free.pop() for _ in range((start + length - 1) // page_size + 1 + generator.randint(0, 2))]
            runs.append(run_of(start, length, blocks))
        qo_indptr, indptr, indices, last_page_len = of_micro_batch(MicroBatch(0, runs, "slot-freed", 0.0), page_size)
        for row, run in enumerate(runs):
            pages = indices[indptr[row] : indptr[row + 1]]
            context = run.start + len(run.token_ids)
            assert (len(pages) - 1) * page_size + last_page_len[row] == context
            assert 1 <= last_page_len[row] <= page_size
            assert [pages[p // page_size] for p in range(context)] == [
                run.block_ids[p // page_size] for p in range(context)
            ]
            assert qo_indptr[row + 1] - qo_indptr[row] == len(run.token_ids)


@pytest.mark.parametrize("shape", [SHAPE, HeadShape(9, 3, 64), HeadShape(4, 4, 128), HeadShape(8, 1, 64)], ids=str)
def test_the_check_at_start_finds_no_difference_and_can_fail(shape: HeadShape, monkeypatch: Any) -> None:
    kernels = FlashInferKernels(torch.float32, "cpu", shape, fake_flashinfer)
    assert difference_from_torch(kernels, torch.float32, "cpu", shape) < 1e-5
    shifted = lambda *arguments: of_micro_batch(*arguments)._replace(last_page_len=[1] * 2)  # noqa: E731
    monkeypatch.setattr(flashinfer_kernels, "of_micro_batch", shifted)
    with pytest.raises((AssertionError, RuntimeError)):
        difference_from_torch(kernels, torch.float32, "cpu", shape)


@pytest.fixture
def on_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(dtype: torch.dtype, device: str, shape: HeadShape) -> FlashInferKernels:
        return FlashInferKernels(dtype, device, shape, fake_flashinfer)

    monkeypatch.setattr(native_backend, "choose_kernels", choose)


def load(folder: Path, partition: tuple[int, ...], graph_requests: int, backend: Any = "native") -> list[StageRunner]:
    stages = []
    for stage in range(len(partition)):
        runner = StageRunner.load(
            folder, stage, partition, "cpu", "float32", PAGE_SIZE, backend=backend, graph_requests=graph_requests
        )
        runner.allocate_kv(NUM_BLOCKS)
        stages.append(runner)
    return stages


def forward(stages: list[StageRunner], runs: list[Run]) -> torch.Tensor:
    hidden = None
    for stage in stages:
        hidden = stage.forward(MicroBatch(0, runs, "slot-freed", 0.0), hidden)
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("graph_requests", [0, 6], ids=["eager", "graphs"])
@pytest.mark.parametrize("partition", [(4,), (1, 3)], ids=lambda partition: f"P{len(partition)}")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.usefixtures("on_flashinfer")
def test_models_compute_the_same(
    architecture: str, partition: tuple[int, ...], graph_requests: int, tmp_path: Path
) -> None:
    folder = make_tiny_model(architecture, tmp_path, seed=3)
    stages, reference = load(folder, partition, graph_requests), load(folder, (4,), 0, "transformers")
    for stage in stages:
        assert stage._cache is not None
        for tensor in (*stage._cache.keys, *stage._cache.values):
            tensor.fill_(float("nan"))  # what is read without having been written shows
    generator = random.Random(1)
    free = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def run(who: int, start: int, count: int) -> Run:
        return Run(who, 0, start, token_ids[who][start : start + count], blocks[who], GREEDY)

    token_ids = [[generator.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(5)]
    blocks = [[free.pop() for _ in range(8)] for _ in range(5)]
    steps = [
        [run(0, 0, 20), run(1, 0, 8)],
        [run(0, 20, 1), run(2, 0, 5), run(1, 8, 7)],
        [run(0, 21, 1), run(1, 15, 1), run(2, 5, 1)],
        [run(3, 0, 1), run(1, 16, 1), run(0, 22, 1), run(2, 6, 1)],
        [run(2, 7, 1)],
        [run(0, 23, 30), run(4, 0, 33)],
        [run(2, 8, 1), run(4, 33, 1), run(0, 53, 1), run(3, 1, 1), run(1, 17, 1)],
    ]
    for runs in steps:
        torch.testing.assert_close(forward(stages, runs), forward(reference, runs), atol=1e-4, rtol=1e-4)
        is_decode = all(len(run.token_ids) == 1 for run in runs)
        assert [stage.used_graph for stage in stages] == [is_decode and graph_requests > 0] * len(stages)


def test_one_width_of_graphs_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "choose_kernels", lambda *args: FlashInferKernels(*args, fake_flashinfer))
    (runner,) = load(make_tiny_model("LlamaForCausalLM", tmp_path), (4,), 6)
    assert runner._graphs is not None
    blocks = NUM_BLOCKS  # 480 tokens of memory are less than the model's 512
    assert runner._graphs.buckets == [Bucket(1, blocks), Bucket(2, blocks), Bucket(4, blocks), Bucket(6, blocks)]


@pytest.mark.parametrize(
    ("dtype", "device", "shape"),
    [
        (torch.bfloat16, "cpu", SHAPE),
        (torch.float32, "cuda:0", SHAPE),
        (torch.bfloat16, "cuda:0", HeadShape(4, 2, 16)),
    ],
)
def test_not_used_where_it_cannot_work(dtype: torch.dtype, device: str, shape: HeadShape) -> None:
    assert make_flashinfer_kernels(dtype, device, shape) is None


def test_whatever_is_wrong_with_it_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # not installed
    assert make_flashinfer_kernels(torch.float16, "cuda:0", SHAPE) is None
    assert capsys.readouterr().err == ""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no nvcc\nanywhere")

    broken = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=fail)
    monkeypatch.setitem(sys.modules, "flashinfer", broken)
    monkeypatch.setattr(flashinfer_kernels, "_WORKSPACE_BYTES", 16)
    real_zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: real_zeros(*size, **options))
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: real_zeros(*size, **options))
    assert make_flashinfer_kernels(torch.float16, "cuda:0", SHAPE) is None
    assert capsys.readouterr().err == "FlashInfer cannot be used (no nvcc anywhere); attention by torch.\n"

    monkeypatch.setattr(flashinfer_kernels, "FlashInferKernels", lambda *_: object())
    for difference, is_used in ((0.01, True), (0.2, False), (float("nan"), False)):
        monkeypatch.setattr(flashinfer_kernels, "difference_from_torch", lambda *_, value=difference: value)
        assert (make_flashinfer_kernels(torch.float16, "cuda:0", SHAPE) is not None) == is_used
    assert "differs from torch's by 0.2 " in capsys.readouterr().err
    monkeypatch.setattr(flashinfer_kernels, "difference_from_torch", lambda *_: 0.0)
    monkeypatch.setenv("FULLBORE_FLASHINFER", "0")
    assert make_flashinfer_kernels(torch.float16, "cuda:0", SHAPE) is None

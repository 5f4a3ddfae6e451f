"""Stages chained in one process against Hugging Face's whole model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from exactness import load_reference
from tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from fullbore.config import Backend
from fullbore.errors import ModelError, OutOfMemoryError
from fullbore.model import runner as runner_module
from fullbore.model.checkpoint import HEAD_NAME, Checkpoint
from fullbore.model.native import backend as native_backend
from fullbore.model.runner import StageRunner
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

PAGE_SIZE = 8
PARTITIONS = [(4,), (1, 3), (1, 2, 1), (1, 1, 1, 1)]
GREEDY = Sampling(0.0, 1.0, 0, 0, 0, 0)
MODELS = ["LlamaForCausalLM-tied", *ARCHITECTURES]
NATIVE_MODELS = [*MODELS[:5], "LlamaForCausalLM-biased"]


@dataclass
class TinyModel:
    folder: Path
    token_ids: list[list[int]]  # one sequence per request
    logits: list[torch.Tensor]  # Hugging Face's, one [length, vocab_size] per request


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture(scope="module", params=MODELS)
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    architecture, _, variant = request.param.partition("-")
    # Two dense layers before the experts: at P > 1 they fall into different stages.
    overrides = {"first_k_dense_replace": 2} if architecture in ("DeepseekV3ForCausalLM", "kimi_k2") else {}
    if variant == "biased":
        overrides = {"attention_bias": True, "mlp_bias": True}
    folder = make_tiny_model(
        architecture, tmp_path_factory.mktemp(request.param), tied=variant == "tied", seed=3, **overrides
    )
    assert (HEAD_NAME in Checkpoint.open(folder)) == (variant != "tied")
    generator = random.Random(11)
    token_ids = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in REQUEST_LENGTHS]
    model = load_reference(folder)
    return TinyModel(folder, token_ids, [reference_logits(model, ids) for ids in token_ids])


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 of their spread (about 4 here): twice what float32 rounding makes of Hugging Face's own result."""
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()


def load_pipeline(
    folder: Path, partition: tuple[int, ...], num_blocks: int, dtype: str = "float32", backend: Backend = "auto"
) -> list[StageRunner]:
    stages = [
        StageRunner.load(folder, stage, partition, "cpu", dtype, PAGE_SIZE, backend=backend)
        for stage in range(len(partition))
    ]
    for stage in stages:
        stage.allocate_kv(num_blocks)
    return stages


def forward(pipeline: list[StageRunner], runs: list[Run]) -> torch.Tensor:
    micro_batch = MicroBatch(0, runs, "slot-freed", 0.0)
    hidden = None
    for stage in pipeline:
        hidden = stage.forward(micro_batch, hidden)
    assert hidden is not None
    return hidden


# ------------------------------------------------------------------------------------------------------- exactness

REQUEST_LENGTHS = [90, 5, 70, 33, 1, 64, 18, 80, 40, 26, 12, 100]
NUM_PROMPT_TOKENS = [70, 1, 64, 20, 1, 63, 17, 65, 8, 25, 3, 99]  # the rest is decoded token by token


@dataclass
class Traffic:
    """Teacher-forced requests in a random order over few blocks, which pass from finished requests to new ones."""

    token_ids: list[list[int]]
    generator: random.Random
    max_running: int = 4
    free_blocks: list[int] = field(default_factory=list)
    running: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)  # request -> start, chunk, blocks
    num_started: int = 0
    max_block_users: int = 0

    def next_runs(self) -> list[Run]:
        """The next micro-batch, empty at the end."""
        while len(self.running) < self.max_running and self.num_started < len(self.token_ids):
            request = self.num_started
            num_blocks = len(self.token_ids[request]) // PAGE_SIZE + 1
            block_ids = [self.free_blocks.pop() for _ in range(num_blocks)]
            self.generator.shuffle(block_ids)
            self.running[request] = (0, self.generator.choice([1, 7, 64]), block_ids)
            self.num_started += 1
        if not self.running:
            return []
        chosen = self.generator.sample(sorted(self.running), self.generator.randint(1, len(self.running)))
        return [self._advance(request) for request in chosen]

    def _advance(self, request: int) -> Run:
        start, chunk, block_ids = self.running[request]
        prompt_end = NUM_PROMPT_TOKENS[request]
        end = min(start + chunk, prompt_end) if start < prompt_end else start + 1
        token_ids = self.token_ids[request]
        if end == len(token_ids):
            del self.running[request]
            self.free_blocks += block_ids  # stages execute in order: the next micro-batch may reuse them
        else:
            self.running[request] = (end, chunk, block_ids)
        # A chunk in the middle of a prompt asks for a token only sometimes here; the scheduler never does.
        wants_token = end >= prompt_end or self.generator.random() < 0.5
        return Run(request, 0, start, token_ids[start:end], block_ids, GREEDY if wants_token else None)


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: f"P{len(partition)}")
def test_interleaved_requests_get_the_whole_models_logits(tiny_model: TinyModel, partition: tuple[int, ...]) -> None:
    check_interleaved_requests(tiny_model, partition, "transformers")


@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("partition", [(4,), (1, 2, 1)], ids=lambda partition: f"P{len(partition)}")
@pytest.mark.parametrize("tiny_model", NATIVE_MODELS, indirect=True)
def test_the_native_backend_gives_the_same_logits(
    tiny_model: TinyModel, partition: tuple[int, ...], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "torch":
        monkeypatch.setattr(native_backend, "load_library", lambda: None)
    check_interleaved_requests(tiny_model, partition, "native")


def check_interleaved_requests(tiny_model: TinyModel, partition: tuple[int, ...], backend: Backend) -> None:
    num_blocks = 48
    pipeline = load_pipeline(tiny_model.folder, partition, num_blocks, backend=backend)
    generator = random.Random(len(partition))
    free_blocks = generator.sample(range(num_blocks), num_blocks)
    traffic = Traffic(tiny_model.token_ids, generator, free_blocks=free_blocks)
    num_compared = 0
    while runs := traffic.next_runs():
        logits = forward(pipeline, runs)
        sampled = [run for run in runs if run.sampling is not None]
        assert logits.shape == (len(sampled), VOCAB_SIZE)
        assert logits.dtype == torch.float32
        for row, run in enumerate(sampled):
            last = run.start + len(run.token_ids) - 1
            assert_same_logits(logits[row], tiny_model.logits[run.request_id][last])
            num_compared += 1
    assert num_compared > 150
    assert sorted(traffic.free_blocks) == list(range(num_blocks))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_half_precision_errs_no_more_than_hugging_face(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Both against float32: our mean error is at most 1.5 times theirs."""
    folder = make_tiny_model(architecture, tmp_path, seed=5)
    generator = random.Random(1)
    token_ids = [generator.randrange(VOCAB_SIZE) for _ in range(60)]
    exact = reference_logits(load_reference(folder), token_ids)
    theirs = reference_logits(load_reference(folder, getattr(torch, dtype)), token_ids)
    pipeline = load_pipeline(folder, (2, 2), 10, dtype)
    ours = []
    for position, token_id in enumerate(token_ids):
        ours.append(forward(pipeline, [Run(0, 0, position, [token_id], list(range(10)), GREEDY)])[0])
    assert pipeline[0].dtype == getattr(torch, dtype)
    error_ours, error_theirs = ((logits - exact).abs().mean() for logits in (torch.stack(ours), theirs))
    assert 0 < error_ours < 1.5 * error_theirs


def test_smollm2_continues_as_hugging_face_does(smollm2_path: Path) -> None:
    token_ids = [1, 504, 3575, 282, 4649, 314]  # "<|im_start|>The capital of France is"
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    pipeline = load_pipeline(smollm2_path, (17, 13), 4)
    start = 0
    for _ in range(6):
        new = token_ids[start:]
        logits = forward(pipeline, [Run(0, 0, start, new, [2, 0, 3, 1], GREEDY)])
        assert_same_logits(logits[0], reference_logits(reference, token_ids)[-1])
        start = len(token_ids)
        micro_batch = MicroBatch(0, [Run(0, 0, start, [], [], GREEDY)], "slot-freed", 0.0)
        token_ids += pipeline[-1].sample(micro_batch, logits)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([token_ids[:6]]), max_new_tokens=6, do_sample=False)
    assert token_ids == expected[0].tolist()


# ------------------------------------------------------------------------------------------------- one stage alone


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), tied=True)


def test_a_stage_tells_what_it_is(llama: Path) -> None:
    def load(stage: int, partition: tuple[int, ...] = (1, 2, 1)) -> StageRunner:
        return StageRunner.load(llama, stage, partition, "cpu", "float32", 16, backend="transformers")

    first, middle, last = map(load, range(3))
    assert [(stage.is_first, stage.is_last) for stage in (first, middle, last)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    # Per layer: 2 key heads of 16 elements, keys and values, 16 tokens, 4 bytes.
    assert [stage.kv_block_bytes for stage in (first, middle, last)] == [4096, 8192, 4096]
    embedding_bytes = VOCAB_SIZE * 64 * 4
    layer_bytes = middle.weight_bytes // 2
    assert first.weight_bytes == embedding_bytes + layer_bytes
    assert last.weight_bytes == embedding_bytes + 64 * 4 + layer_bytes
    whole = load(0, (4,))
    assert whole.weight_bytes == embedding_bytes + 64 * 4 + 4 * layer_bytes, "a tied embedding counts once"
    assert whole.free_memory_bytes() > 0


def test_a_micro_batch_without_samples_gives_no_logits(llama: Path) -> None:
    pipeline = load_pipeline(llama, (2, 2), 4)
    runs = [Run(0, 0, 0, [1, 2, 3], [0], None)]
    logits = forward(pipeline, runs)
    assert logits.shape == (0, VOCAB_SIZE)
    assert pipeline[-1].sample(MicroBatch(0, runs, "slot-freed", 0.0), logits) == []


def test_samples_come_in_the_order_of_the_runs(llama: Path) -> None:
    pipeline = load_pipeline(llama, (4,), 4)
    seeded = Sampling(1.0, 1.0, 0, 42, 0, 3)
    runs = [
        Run(0, 0, 0, [1, 2, 3], [0], seeded),
        Run(1, 0, 0, [4, 5], [1], None),
        Run(2, 0, 0, [6], [2], GREEDY),
    ]
    micro_batch = MicroBatch(0, runs, "slot-freed", 0.0)
    logits = pipeline[0].forward(micro_batch, None)
    token_ids = pipeline[0].sample(micro_batch, logits)
    assert token_ids[1] == int(logits[1].argmax())
    alone = MicroBatch(1, runs[:1], "slot-freed", 0.0)
    assert pipeline[0].sample(alone, pipeline[0].forward(alone, None)) == token_ids[:1]


def test_hidden_states_of_another_micro_batch_are_refused(llama: Path) -> None:
    last = load_pipeline(llama, (2, 2), 4)[1]
    micro_batch = MicroBatch(7, [Run(0, 0, 0, [1, 2, 3], [0], GREEDY)], "slot-freed", 0.0)
    with pytest.raises(ValueError, match=r"shape \[2, 64\] for micro-batch 7 of 3 tokens"):
        last.forward(micro_batch, torch.zeros(2, 64))


def test_kv_blocks_take_memory_only_when_used(llama: Path) -> None:
    stage = StageRunner.load(llama, 0, (4,), "cpu", "float32", 16)
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    num_blocks = 2**29 // stage.kv_block_bytes
    stage.allocate_kv(num_blocks)
    block_ids = [num_blocks - 1]
    assert torch.isfinite(forward([stage], [Run(0, 0, 0, [1, 2, 3], block_ids, GREEDY)])).all()
    assert process.memory_info().rss - before_bytes < 2**27


def test_kv_blocks_that_do_not_fit(llama: Path) -> None:
    stage = StageRunner.load(llama, 0, (4,), "cpu", "float32", 16)
    with pytest.raises(
        OutOfMemoryError, match=r"KV blocks of 16 tokens on stage 0: .* needed, .* free on cpu, .* missing"
    ):
        stage.allocate_kv(10**12)


def test_weights_that_do_not_fit(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "free_memory_bytes", lambda device: 100 * 2**10)
    with pytest.raises(OutOfMemoryError, match=r"weights of stage 1: .* needed, 100.0 KiB free"):
        StageRunner.load(llama, 1, (2, 2), "cpu", "float32", 16)


@pytest.mark.parametrize("wrong", [{"hidden_act": "nonsense"}, {"rope_scaling": {"type": "bogus"}}], ids=str)
def test_a_config_that_no_module_can_be_made_of(llama: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(ModelError, match=r"config\.json is not a valid LlamaForCausalLM config \(.+\)\.$"):
        StageRunner.load(tmp_path, 0, (2, 2), "cpu", "float32", 16)


def test_a_partition_of_another_model(llama: Path) -> None:
    with pytest.raises(ModelError, match="5 layers together but the model has 4"):
        StageRunner.load(llama, 0, (2, 3), "cpu", "float32", 16)

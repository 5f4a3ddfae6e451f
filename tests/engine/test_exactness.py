"""The engine's tokens against Hugging Face's `generate`; what counts as the same is in exactness.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from engine_helpers import collect, config, tokens_of
from exactness import TALLY, TIE, Case, Reference, Tally, draw_gap
from loopback_helpers import run_to_end
from safetensors.torch import load_file, save_file
from tiny_models import EOS_TOKEN_ID, make_tiny_model
from tiny_references import DRAWN, GREEDY, MODELS, TinyModels

from fullbore.engine.client import EngineClient
from fullbore.engine.loopback import load_stages
from fullbore.engine.runner import Runner
from fullbore.model.sampling import sample
from fullbore.model.spec import ModelSpec
from fullbore.text.tokenizer import Tokenizer

STAGES = (1, 2, 3, 4)
CHUNKS = (64, 7, 1)
GRID = list(product(STAGES, CHUNKS))


def _thinned(index: int) -> list[tuple[int, int]]:
    """Two points of the grid for each model, together every point."""
    return [GRID[(index + offset) % len(GRID)] for offset in (0, 7)]


FAST = [(name, *point) for index, name in enumerate(MODELS) for point in _thinned(index)]
SLOW = [(name, *point) for name in MODELS for point in GRID if (name, *point) not in FAST]


@pytest.fixture(scope="module", autouse=True)
def ties_are_rare() -> Iterator[None]:
    yield
    TALLY.check()


def check_greedy(tiny: TinyModels, name: str, pp_size: int, chunk: int) -> None:
    """Sixteen requests of mixed lengths that come and end at different times."""
    seed = 10 * pp_size + chunk
    engine = tiny.engine(name, pp_size, seed, chunked_prefill_size=chunk)
    tiny.run_and_check(name, engine, GREEDY, seed)
    assert engine.max_in_flight >= pp_size
    assert engine.scheduler.state().preemptions == 0


@pytest.mark.parametrize(("name", "pp_size", "chunk"), FAST)
def test_greedy(tiny: TinyModels, name: str, pp_size: int, chunk: int) -> None:
    check_greedy(tiny, name, pp_size, chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pp_size", "chunk"), SLOW)
def test_greedy_on_the_rest_of_the_grid(tiny: TinyModels, name: str, pp_size: int, chunk: int) -> None:
    check_greedy(tiny, name, pp_size, chunk)


def test_the_thinned_grid_has_every_point() -> None:
    assert {(pp_size, chunk) for _, pp_size, chunk in FAST} == set(GRID)


# --------------------------------------------------------------------------------------------------- random draws


def check_drawn(tiny: TinyModels, name: str, pp_size: int, chunk: int) -> None:
    """Each request alone, then all of them among greedy neighbours."""
    engine = tiny.engine(name, pp_size, chunked_prefill_size=chunk)
    for index in DRAWN:
        tiny.run_and_check(name, engine, [index], None)
    seed = 10 * pp_size + chunk
    engine = tiny.engine(name, pp_size, seed, chunked_prefill_size=chunk)
    mixed = [index for pair in zip(GREEDY, DRAWN, strict=False) for index in pair]
    tiny.run_and_check(name, engine, mixed, seed)


@pytest.mark.parametrize(("pp_size", "chunk"), [(1, 64), (2, 1), (3, 64), (4, 1)])
def test_draws_depend_on_neither_stages_nor_chunks_nor_neighbours(tiny: TinyModels, pp_size: int, chunk: int) -> None:
    check_drawn(tiny, "LlamaForCausalLM-tied", pp_size, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize(("pp_size", "chunk"), [(1, 1), (2, 64), (3, 1), (4, 64)])
def test_draws_of_other_models(tiny: TinyModels, name: str, pp_size: int, chunk: int) -> None:
    check_drawn(tiny, name, pp_size, chunk)


def test_seeds_and_choices_matter(tiny: TinyModels) -> None:
    prompt = tiny.reference("LlamaForCausalLM-tied").cases[DRAWN[0]].prompt
    base = Case(prompt, 12, temperature=1.0)
    cases = [base, replace(base, seed=1), replace(base, choice=1), replace(base, temperature=0.0)]
    engine = tiny.engine("LlamaForCausalLM-tied", 2)
    requests = [case.request(k, EOS_TOKEN_ID) for k, case in enumerate(cases)]
    outputs = run_to_end(engine, requests)
    assert len({tuple(tokens_of(outputs[k])) for k in range(len(cases))}) == len(cases)


# ----------------------------------------------------------------------------------------------- over real processes

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to you because the pump that I bought from your shop last week",
    "Water boils at",
    "Q: Why is the sky blue?\nA:",
    "The three laws of motion were first stated by",
]
SMOLLM2_PROMPT_LENGTHS = (3, 8, 21, 90)  # in tokens; texts are repeated to be long enough


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Reference:
    """Sixteen cases, every fourth drawn at random."""
    tokenizer = Tokenizer.load(smollm2_path)
    cases = []
    for k in range(16):
        length = SMOLLM2_PROMPT_LENGTHS[k % 4]
        prompt = (tokenizer.encode(TEXTS[k % len(TEXTS)]) * length)[k // 8 :][:length]
        cases.append(Case(prompt, 6 + k, temperature=float(k % 4 == k // 4), top_p=0.95, seed=k))
    (eos_token_id,) = ModelSpec.from_folder(smollm2_path).eos_token_ids
    return Reference(smollm2_path, cases, eos_token_id)


@pytest.mark.slow
@pytest.mark.parametrize(("pp_size", "chunk"), [(1, 64), (2, 7), (3, 64)])
def test_smollm2_over_processes(smollm2: Reference, pp_size: int, chunk: int) -> None:
    settings = config(
        pp_size, str(smollm2.folder), dtype="float32", device="cpu", chunked_prefill_size=chunk, max_total_tokens=4096
    )
    with EngineClient.start(settings) as client:
        for request_id, case in enumerate(smollm2.cases):
            client.add(case.message(request_id))
        outputs = collect(client, len(smollm2.cases), timeout_s=240)
        stats = client.stats()
    assert stats.max_in_flight >= pp_size
    assert (stats.running, stats.waiting, stats.in_flight, stats.used_blocks) == (0, 0, 0, 0)

    def load() -> list[Runner]:
        return load_stages(smollm2.folder, client.info.config.pp_layer_partition or (), 16, 16)

    for index in range(len(smollm2.cases)):
        smollm2.check(index, tokens_of(outputs[index]), load)


# ------------------------------------------------------------------------------------------- the check checks itself


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def make_reference(folder: Path, architecture: str = "LlamaForCausalLM", **overrides: int) -> Reference:
    make_tiny_model(architecture, folder, **overrides)
    return Reference(folder, [Case([1, 2, 3, 4], 8)], EOS_TOKEN_ID, Tally())


def loader(folder: Path) -> Callable[[], list[Runner]]:
    return lambda: load_stages(folder, (2, 2), 8, 4)


def test_a_difference_without_a_tie_is_refused(tmp_path: Path) -> None:
    reference = make_reference(tmp_path)
    right = reference.outputs[0]
    reference.check(0, right, loader(tmp_path))
    with pytest.raises(AssertionError, match="no tie"):
        reference.check(0, [*right[:3], right[3] + 1, *right[4:]], loader(tmp_path))
    with pytest.raises(AssertionError, match="the wrong number of tokens"):
        reference.check(0, right[:-1], loader(tmp_path))
    assert (reference.tally.compared, reference.tally.ties) == (3, 0)


def make_two_tokens_alike(reference: Reference) -> tuple[int, int]:
    """Gives another token the head's row of the third output token, so that the reference must decide by chance."""
    first, second = reference.outputs[0][2], 250
    assert second not in reference.outputs[0]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][second] = tensors["lm_head.weight"][first]

    change_weights(reference.folder, change)
    return first, second


def test_a_tie_is_accepted_and_counted(tmp_path: Path) -> None:
    first, second = make_two_tokens_alike(make_reference(tmp_path))
    reference = Reference(tmp_path, [Case([1, 2, 3, 4], 8)], EOS_TOKEN_ID, Tally())
    other = [second if token == first else first if token == second else token for token in reference.outputs[0]]
    assert other != reference.outputs[0]
    reference.check(0, other, loader(tmp_path))
    assert (reference.tally.compared, reference.tally.ties) == (1, 1)
    with pytest.raises(AssertionError, match=r"1 sequences compared .* 1 differ"):
        reference.tally.check()
    Tally(compared=400, ties=2).check()


def test_a_tie_is_no_excuse_for_wrong_logits(tmp_path: Path) -> None:
    first, second = make_two_tokens_alike(make_reference(tmp_path))
    reference = Reference(tmp_path, [Case([1, 2, 3, 4], 8)], EOS_TOKEN_ID, Tally())
    other = [second if token == first else first if token == second else token for token in reference.outputs[0]]
    change_weights(tmp_path, lambda tensors: tensors["model.norm.weight"].mul_(1.001))
    with pytest.raises(AssertionError, match="logits from the same tokens differ"):
        reference.check(0, other, loader(tmp_path))


def test_a_tie_in_a_router_counts(tmp_path: Path) -> None:
    folder = make_tiny_model("MixtralForCausalLM", tmp_path, num_local_experts=2, num_experts_per_tok=1)

    def make_experts_alike(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            if ".gate." in name:
                tensors[name][0] = tensors[name][1]
            elif ".experts.0." in name:
                tensors[name.replace(".experts.0.", ".experts.1.")] = tensors[name].clone()

    change_weights(folder, make_experts_alike)
    reference = Reference(folder, [Case([1, 2, 3, 4], 8)], EOS_TOKEN_ID, Tally())
    right = reference.outputs[0]
    reference.check(0, [*right[:3], right[3] + 1, *right[4:]], loader(folder))
    assert reference.tally.ties == 1


def test_how_near_a_draw_was_to_another_token() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 50, generator=generator) * 2
    for case in (Case([], 1, 1.0), Case([], 1, 0.8, top_p=0.7), Case([], 1, 1.0, top_k=9), Case([], 1, 1.2, 0.9, 12)):
        samplings = [case.sampling(position) for position in range(500)]
        noisy = logits + TIE / 4 * torch.rand(logits.shape, generator=generator)
        drawn, drawn_from_noisy = (sample(rows.expand(500, -1), samplings) for rows in (logits, noisy))
        gaps = [draw_gap(logits[0], sampling) for sampling in samplings]
        assert all(a == b for a, b, gap in zip(drawn, drawn_from_noisy, gaps, strict=True) if gap > TIE)
        assert sum(gap < TIE for gap in gaps) < 20
        assert min(gaps) < 0.01

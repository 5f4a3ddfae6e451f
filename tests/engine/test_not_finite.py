"""A token whose embedding is NaN ends the requests that have it, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_helpers import tokens_of
from loopback_helpers import assert_at_rest, run_to_end
from tiny_models import make_tiny_model, poison_token

from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.engine.runner import Runner
from fullbore.model.partition import partition_layers
from fullbore.scheduler.request import Request, TokenOutput
from fullbore.scheduler.scheduler import SchedulerConfig

PAGE_SIZE = 4
NUM_BLOCKS = 40  # few, so that blocks which held NaN come into other hands
NUM_TOKENS = 10
PREFIX = [(7 * k) % 101 for k in range(13)]  # three full blocks and a bit

PROMPTS = [[(31 * k + 11 * position) % 240 for position in range(1 + 5 * k)] for k in range(6)]


class PoisonedModel:
    """A tiny model, what it says to PROMPTS, and its copy in which `bad_token` is NaN."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self.architecture = architecture
        healthy = make_tiny_model(architecture, folder / "healthy", seed=2)
        self.folder = make_tiny_model(architecture, folder / "poisoned", seed=2)
        engine = make_engine(load_stages(healthy, (4,), NUM_BLOCKS, PAGE_SIZE))
        outputs = run_to_end(engine, [self.request(k, prompt, seed=k) for k, prompt in enumerate([*PROMPTS, PREFIX])])
        self.outputs = [tokens_of(outputs[k]) for k in range(len(PROMPTS))]
        self.output_to_prefix = tokens_of(outputs[len(PROMPTS)])
        used = {token for tokens in [*PROMPTS, PREFIX, *self.outputs, self.output_to_prefix] for token in tokens}
        self.bad_token = next(token for token in range(256) if token not in used)
        poison_token(self.folder, self.bad_token)

    @staticmethod
    def request(request_id: int, prompt: list[int], seed: int = 0) -> Request:
        """Every second one draws at random."""
        return Request(request_id, prompt, NUM_TOKENS, temperature=float(seed % 2), seed=seed)

    def stages(self, pp_size: int) -> list[Runner]:
        return load_stages(self.folder, partition_layers([1.0] * 4, pp_size), NUM_BLOCKS, PAGE_SIZE)


def make_engine(stages: list[Runner], **settings: object) -> LoopbackEngine:
    config = SchedulerConfig(num_kv_blocks=NUM_BLOCKS, pp_size=len(stages), page_size=PAGE_SIZE, **settings)  # type: ignore[arg-type]
    return LoopbackEngine(stages, config)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PoisonedModel:
    return PoisonedModel(request.param, tmp_path_factory.mktemp(request.param))


def assert_failed(outputs: list[TokenOutput]) -> None:
    assert [(output.token_id, output.finish_reason) for output in outputs] == [(None, "error")]


@pytest.mark.parametrize(("pp_size", "chunk"), [(1, 64), (2, 1), (4, 7)])
def test_only_the_request_with_the_bad_token_ends(model: PoisonedModel, pp_size: int, chunk: int) -> None:
    engine = make_engine(model.stages(pp_size), chunked_prefill_size=chunk)
    for first_id in (0, 100):  # the second time all blocks have been used, some for NaN
        requests = []
        for k, prompt in enumerate(PROMPTS):
            spoilt = [*prompt[: 3 * k], model.bad_token, *prompt[3 * k :]]  # at the begin, inside, at the end
            requests += [model.request(first_id + k, prompt, seed=k), model.request(first_id + 50 + k, spoilt)]
        outputs = run_to_end(engine, requests, arrival_seed=pp_size)
        for k in range(len(PROMPTS)):
            assert tokens_of(outputs[first_id + k]) == model.outputs[k]
            assert_failed(outputs[first_id + 50 + k])
        assert_at_rest(engine)


def test_a_bad_token_among_the_outputs_ends_the_request_after_it(model: PoisonedModel, tmp_path: Path) -> None:
    victim = 4  # greedy, of course
    bad_token = model.outputs[victim][5]
    length = model.outputs[victim].index(bad_token) + 1
    folder = make_tiny_model(model.architecture, tmp_path, seed=2)
    poison_token(folder, bad_token)
    engine = make_engine(load_stages(folder, (2, 2), NUM_BLOCKS, PAGE_SIZE))
    outputs = run_to_end(engine, [model.request(k, prompt, seed=k) for k, prompt in enumerate(PROMPTS)])
    assert tokens_of(outputs[victim]) == model.outputs[victim][:length]
    assert outputs[victim][-1] == TokenOutput(victim, None, "error")
    assert_at_rest(engine)


@pytest.mark.parametrize("pp_size", [1, 3])
def test_a_shared_prefix_is_not_spoiled(model: PoisonedModel, pp_size: int) -> None:
    """Attention computes 0 * NaN: what stands before the bad token, in the same chunk, is spoilt with it."""
    engine = make_engine(model.stages(pp_size))
    spoiler = Request(0, [*PREFIX, model.bad_token], NUM_TOKENS)
    sharer = Request(6, list(PREFIX), NUM_TOKENS)
    outputs = run_to_end(engine, [spoiler, sharer])
    assert_failed(outputs[0])
    # The other one took over the blocks of the prefix before anybody knew what they hold.
    assert sharer.num_cached_tokens == len(PREFIX) // PAGE_SIZE * PAGE_SIZE
    assert sharer.epoch == 1
    assert tokens_of(outputs[6]) == model.output_to_prefix

    again = Request(8, list(PREFIX), NUM_TOKENS)  # what the cache has now is sound
    assert tokens_of(run_to_end(engine, [again])[8]) == model.output_to_prefix
    assert again.num_cached_tokens > 0
    assert again.epoch == 0
    assert_at_rest(engine)


def test_a_spoilt_prefix_of_an_aborted_request_is_found_out(model: PoisonedModel) -> None:
    engine = make_engine(model.stages(2))
    engine.add(Request(0, [*PREFIX, model.bad_token], NUM_TOKENS))
    engine.tick()
    engine.abort(0)
    sharer = Request(6, list(PREFIX), NUM_TOKENS)
    assert tokens_of(run_to_end(engine, [sharer])[6]) == model.output_to_prefix
    assert sharer.epoch == 1
    assert_at_rest(engine)

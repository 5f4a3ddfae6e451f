"""Choices, penalties, biases, grammars, stop tokens and log-probabilities through whole engines in one process.

What an output is depends on neither the number of stages, nor on neighbours, nor on preemption.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from loopback_helpers import assert_at_rest, run_to_end, sleep_engine
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer, make_tiny_model
from transformers import AutoModelForCausalLM

from fullbore.engine.admission import make_scheduler_request
from fullbore.engine.grammar import GrammarCompiler, GrammarConstraint
from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.engine.messages import AddRequest, EngineInfo
from fullbore.engine.runner import Runner
from fullbore.errors import RequestError
from fullbore.model.partition import partition_layers
from fullbore.scheduler.logprobs import TokenLogprob
from fullbore.scheduler.request import Request, SamplingParams, TokenOutput
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.text.grammar import regex_grammar
from fullbore.text.requests import make_requests

PAGE_SIZE = 4
NUM_KV_BLOCKS = 400
FEW_BLOCKS = 14  # the longest sequence below needs 13
PROMPT = [(7 * position * position + 11) % 256 for position in range(29)]
NUM_TOKENS = 30

ALL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 1},
    "min_p": {"seed": 2, "min_p": 0.05},
    "presence": {"seed": 3, "presence_penalty": 1.5, "logprobs": 2},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 3.0, "logprobs": 0},
    "bias": {"temperature": 0.0, "logit_bias": {65: 3.0, 66: 2.5, 67: -100.0}},
    "stop": {"seed": 4, "stop_token_ids": tuple(range(0, 256, 8)), "logprobs": 1},
    "min_tokens": {"seed": 4, "stop_token_ids": tuple(range(0, 256, 8)), "min_tokens": 9},
    "grammar": {
        "seed": 7, "grammar": regex_grammar("[a-z ]{9,25}[.!]"), "logprobs": 2, "presence_penalty": 1.0,
        "repetition_penalty": 1.1,
    },
    "prompt": {"seed": 5, "logprobs": 3, "prompt_logprobs": 3},
    "everything": {
        "seed": 6, "temperature": 0.8, "top_p": 0.95, "top_k": 100, "min_p": 0.01, "presence_penalty": 0.5,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "min_tokens": 3,
        "logprobs": 5, "prompt_logprobs": 1,
    },
}  # fmt: skip


@dataclass
class Output:
    tokens: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob] | None
    num_cached: int


class Models:
    """Stages of one tiny model, loaded once for each P."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_tiny_model("Qwen2ForCausalLM", folder, seed=5)
        self._stages: dict[int, list[Runner]] = {}

    def engine(self, pp_size: int, seed: int | None = None, **settings: Any) -> LoopbackEngine:
        if pp_size not in self._stages:
            partition = partition_layers([1.0] * 4, pp_size)
            self._stages[pp_size] = load_stages(self.folder, partition, NUM_KV_BLOCKS, PAGE_SIZE)
        settings = {"num_kv_blocks": NUM_KV_BLOCKS, "chunked_prefill_size": 16, **settings}
        return LoopbackEngine(
            self._stages[pp_size], SchedulerConfig(pp_size=pp_size, page_size=PAGE_SIZE, **settings), seed
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("features"))


class _Info:
    """What `make_requests` needs to know of an engine."""

    vocab_size = VOCAB_SIZE
    context_length = 512

    class config:  # noqa: N801
        random_seed = 0


def messages_of(prompts: Sequence[Sequence[int]], each: Sequence[dict[str, Any]], n: int) -> list[AddRequest]:
    next_id = itertools.count().__next__
    info: EngineInfo = _Info  # type: ignore[assignment]
    return [
        message
        for prompt, kind in zip(prompts, each, strict=True)
        for message in make_requests(next_id, prompt, SamplingParams(**{"max_tokens": NUM_TOKENS, **kind}, n=n), info)
    ]


@cache
def grammar_compiler() -> GrammarCompiler:
    with TemporaryDirectory() as folder:
        make_byte_tokenizer().save_pretrained(folder)
        compiler = GrammarCompiler(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
        compiler.load()
    return compiler


def request_of(message: AddRequest) -> Request:
    constraint = None
    if message.grammar is not None:
        constraint = GrammarConstraint(grammar_compiler().compile(message.grammar), VOCAB_SIZE)
    return make_scheduler_request(message, VOCAB_SIZE, [EOS_TOKEN_ID], 0.0, constraint)


def output_of(outputs: Sequence[TokenOutput]) -> Output:
    """Checks on the way that each token came with exactly what was asked for."""
    tokens = [output for output in outputs if output.token_id is not None]
    prompt_logprobs = [output.prompt_logprobs for output in outputs]
    assert not any(prompt_logprobs[1:]), "they come once, with the first token"
    return Output(
        [output.token_id for output in tokens if output.token_id is not None],
        outputs[-1].finish_reason,
        [each for output in tokens if output.logprobs is not None for each in output.logprobs.unpack()],
        None if prompt_logprobs[0] is None else prompt_logprobs[0].unpack(),
        outputs[0].num_cached_tokens,
    )


def run(engine: LoopbackEngine, messages: Sequence[AddRequest], arrival_seed: int | None = None) -> dict[int, Output]:
    outputs = run_to_end(engine, map(request_of, messages), arrival_seed)
    assert_at_rest(engine)
    for message in messages:
        found = output_of(outputs[message.request_id])
        assert len(found.logprobs) == (0 if message.num_logprobs is None else len(found.tokens))
        wanted = None if message.num_prompt_logprobs is None else len(message.prompt_token_ids) - 1
        assert (None if found.prompt_logprobs is None else len(found.prompt_logprobs)) == wanted
    return {request_id: output_of(each) for request_id, each in outputs.items()}


def assert_same(found: dict[int, Output], expected: dict[int, Output]) -> None:
    assert found.keys() == expected.keys()
    for request_id, wanted in expected.items():
        output = found[request_id]
        assert (output.tokens, output.finish_reason) == (wanted.tokens, wanted.finish_reason), request_id
        assert_close(output.logprobs, wanted.logprobs)
        assert_close(output.prompt_logprobs or [], wanted.prompt_logprobs or [])


def assert_close(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    for one, other in zip(found, expected, strict=True):
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


MESSAGES = messages_of([PROMPT[: 9 + k] for k in range(len(ALL))], list(ALL.values()), n=3)


@pytest.fixture(scope="module")
def expected(models: Models) -> dict[int, Output]:
    """One stage, plenty of KV, one request after the other."""
    found: dict[int, Output] = {}
    engine = models.engine(1, enable_prefix_cache=False)
    for message in MESSAGES:
        found |= run(engine, [message])
    return found


def test_the_features_do_what_they_are_for(expected: dict[int, Output]) -> None:
    of = {name: [expected[3 * k + choice] for choice in range(3)] for k, name in enumerate(ALL)}
    for name, kind in ALL.items():
        texts = {tuple(output.tokens) for output in of[name]}
        assert len(texts) == (1 if kind.get("temperature") == 0 else 3), name
    repeats = {name: len(of[name][0].tokens) - len(set(of[name][0].tokens)) for name in ALL}
    assert max(repeats["repetition"], repeats["frequency"]) < repeats["greedy"] // 2
    assert not any(67 in output.tokens for output in of["bias"])
    assert any({65, 66} & set(output.tokens) for output in of["bias"])
    for output in of["grammar"]:
        assert re.fullmatch("[a-z ]{9,25}[.!]", make_byte_tokenizer().decode(output.tokens, skip_special_tokens=True))
    for short, long in zip(of["stop"], of["min_tokens"], strict=True):
        assert short.finish_reason == "stop"
        assert short.tokens[-1] % 8 == 0
        assert not any(token_id % 8 == 0 for token_id in short.tokens[:-1])
        assert len(long.tokens) >= 9
        assert not any(token_id % 8 == 0 for token_id in long.tokens[:9])
    assert min(len(output.tokens) for output in of["stop"]) < 9


@pytest.mark.parametrize(("pp_size", "seed"), [(1, 1), (3, None), (3, 2)])
def test_outputs_are_the_same_on_any_number_of_stages(
    models: Models, expected: dict[int, Output], pp_size: int, seed: int | None
) -> None:
    engine = models.engine(pp_size, seed)
    assert_same(run(engine, MESSAGES, seed), expected)
    assert engine.scheduler.state().preemptions == 0
    assert engine.max_in_flight >= pp_size


@pytest.mark.parametrize("pp_size", [1, 3])
@pytest.mark.parametrize("has_cache", [True, False])
def test_preemption_at_every_turn_changes_nothing(
    models: Models, expected: dict[int, Output], pp_size: int, has_cache: bool
) -> None:
    engine = models.engine(pp_size, pp_size, num_kv_blocks=FEW_BLOCKS, enable_prefix_cache=has_cache)
    assert_same(run(engine, MESSAGES, 3), expected)
    assert engine.scheduler.state().preemptions > 20


def test_grammar_masks_reach_the_last_stage_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    class EvenBytes:
        def mask(self) -> bytes:
            return bytes([0b01010101] * 33)

        def accept(self, token_id: int) -> None:
            assert token_id % 2 == 0

    seen: list[tuple[int, bool]] = []
    engine = models.engine(3)
    for stage in engine.stages:
        forward = stage.runner.forward

        def spy(micro_batch: Any, hidden: Any, forward: Any = forward, stage: int = stage.stage) -> Any:
            seen.extend((stage, run.sampling.mask is not None) for run in micro_batch.runs if run.sampling)
            return forward(micro_batch, hidden)

        monkeypatch.setattr(stage.runner, "forward", spy)
    message = messages_of([PROMPT], [{"seed": 1}], n=1)[0]
    request = make_scheduler_request(message, VOCAB_SIZE, [EOS_TOKEN_ID], 0.0, EvenBytes())
    tokens = output_of(run_to_end(engine, [request])[0]).tokens
    assert all(token_id % 2 == 0 for token_id in tokens)
    assert {(stage, stage == 2) for stage in range(3)} == set(seen)


# -------------------------------------------------------------------------------------------------- shared prompts


@pytest.mark.parametrize("pp_size", [1, 3])
@pytest.mark.parametrize("length", [29, 32, 3])
def test_choices_share_the_full_blocks_of_their_prompt(pp_size: int, length: int) -> None:
    """The last token is always computed, since its logits are what the first draw needs."""
    engine = sleep_engine(pp_size)
    prompt = list(range(length))
    outputs = run(engine, messages_of([prompt], [{"seed": 3, "max_tokens": 12}], n=8))
    assert len({tuple(output.tokens) for output in outputs.values()}) == 8
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert [outputs[k].num_cached for k in range(8)] == [0] + 7 * [shared]
    computed = sum(event.prefill_tokens for event in engine.records._driver if event.event == "launch")
    assert computed == length + 7 * (length - shared)


def test_choices_hold_shared_blocks_once() -> None:
    engine = sleep_engine(1)
    for message in messages_of([list(range(40))], [{"seed": 3, "max_tokens": 12}], n=4):
        engine.add(request_of(message))
    while engine.scheduler.state().waiting:
        engine.tick()
    assert engine.scheduler.state().running == 4
    assert engine.scheduler.state().used_blocks <= 9 + 4 * 4  # not 4 * 13


def test_prompt_logprobs_bypass_the_prefix_cache(models: Models) -> None:
    engine = models.engine(3)
    plain, reporting = messages_of([PROMPT, PROMPT], [{"seed": 1}, {"seed": 1, "prompt_logprobs": 2}], n=1)
    first, second = run(engine, [plain])[0], run(engine, [reporting])[1]
    assert (first.num_cached, second.num_cached) == (0, 0)
    assert first.tokens == second.tokens
    again = messages_of([PROMPT], [{"seed": 1}], n=1)
    assert run(engine, again)[0].num_cached == 28, "what it computed is cached nevertheless"


# --------------------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def reference(models: Models) -> Any:
    return AutoModelForCausalLM.from_pretrained(models.folder, dtype=torch.float32)


@pytest.mark.parametrize(("length", "chunk"), [(29, 16), (200, 256), (1, 16), (17, 16)])
def test_logprobs_are_hugging_face_s(models: Models, reference: Any, length: int, chunk: int) -> None:
    """Of prompts in one chunk or several, the last of them of one token, or with more rows than one slice of logits."""
    prompt = (7 * PROMPT)[:length]
    messages = messages_of([prompt], [{"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 4}], n=1)
    found = run(models.engine(3, chunked_prefill_size=chunk), messages)[0]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + found.tokens])).logits[0].double()
    expected = torch.log_softmax(logits, -1)
    sequence = prompt + found.tokens
    assert found.prompt_logprobs is not None
    for place, each in enumerate(found.prompt_logprobs + found.logprobs):
        assert each.logprob == pytest.approx(expected[place, sequence[place + 1]].item(), abs=1e-4)
        values, ids = expected[place].topk(4)
        assert [token_id for token_id, _ in each.top] == ids.tolist()
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
def test_repetition_penalty_is_hugging_face_s(models: Models, reference: Any, penalty: float) -> None:
    messages = messages_of([PROMPT], [{"temperature": 0.0, "repetition_penalty": penalty}], n=1)
    found = run(models.engine(3), messages)[0].tokens
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, repetition_penalty=penalty
        )
    assert found == expected[0, len(PROMPT) :].tolist()


# ------------------------------------------------------------------------------------------------------ last guard


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"), ({"prompt_token_ids": [-1]}, "prompt")],
    ids=str,
)
def test_unknown_token_ids_never_reach_a_stage(wrong: dict[str, Any], param: str) -> None:
    message = messages_of([PROMPT], [{}], n=1)[0]
    for name, value in wrong.items():
        setattr(message, name, value)
    with pytest.raises(RequestError) as raised:
        request_of(message)
    assert raised.value.param == param

"""The tokenizer in a model folder, and the checks that a request passes before it reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer

from fullbore.config import EngineConfig
from fullbore.engine.messages import EngineInfo
from fullbore.errors import ModelError, RequestError
from fullbore.scheduler.request import SamplingParams, TokenOutput
from fullbore.text.output import OutputText
from fullbore.text.requests import encode_chat, encode_text, make_request
from fullbore.text.tokenizer import ChatMessage, Tokenizer

HELLO = [ChatMessage(role="user", content="Hello")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo(
        config=EngineConfig(),
        model_path="",
        model_name="tiny",
        architecture="",
        dtype="float32",
        device="cpu",
        vocab_size=VOCAB_SIZE,
        context_length=100,
        num_kv_blocks=8,
        kv_capacity_tokens=128,
        in_flight_limit=1,
        eos_token_ids=(EOS_TOKEN_ID,),
        stages=[],
    )


def change_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("text", ["", "plain", "Grüße 你好 👩‍👩‍👧", "line\n\ttab", "<not a token>"])
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_that_are_no_token_give_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("ab"), VOCAB_SIZE + 100]) == "ab"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("a\ud800")


def test_a_tokenizer_that_cuts_or_pads_is_made_not_to(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change_json(folder / "tokenizer.json", lambda values: values.update(truncation=truncation))
    assert len(Tokenizer.load(folder).encode("x" * 50)) == 50


def test_chat_format(tokenizer: Tokenizer, info: EngineInfo) -> None:
    assert tokenizer.has_chat_template
    text = tokenizer.format_chat([ChatMessage(role="system", content="S"), *HELLO])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    token_ids = encode_chat(tokenizer, HELLO, info)
    assert token_ids[0] == VOCAB_SIZE - 2  # special tokens are tokens, not text


def test_a_model_without_a_chat_template_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change_json(folder / "tokenizer_config.json", lambda values: values.pop("chat_template", None))
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="/v1/completions"):
        tokenizer.format_chat(HELLO)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('Roles must alternate') }}", "{{ messages[9].content }}", "{% endfor %}"]
)
def test_what_a_chat_template_refuses_is_the_request_s_fault(folder: Path, template: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match="chat template refuses"):
        Tokenizer(tokenizer).format_chat(HELLO)


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 5}'])
def test_a_folder_without_a_usable_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_prompt_far_too_long_is_refused_without_tokenizing_it(tokenizer: Tokenizer, info: EngineInfo) -> None:
    with pytest.raises(RequestError, match="at least"):
        encode_text(tokenizer, "x" * 10_000, info)
    for length in (0, 1, 99, 100, 500):
        text = "<|endoftext|>" * length  # the longest token there is: the bound must hold
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_max_tokens_fills_the_context_unless_given(info: EngineInfo) -> None:
    assert make_request(0, [1] * 60, SamplingParams(), info).max_tokens == 40
    assert make_request(0, [1] * 60, SamplingParams(max_tokens=40), info).max_tokens == 40
    assert make_request(0, [1] * 99, SamplingParams(), info).max_tokens == 1
    for num_tokens, max_tokens in [(100, None), (100, 1), (60, 41)]:
        with pytest.raises(RequestError, match="context length"):
            make_request(0, [1] * num_tokens, SamplingParams(max_tokens=max_tokens), info)


@pytest.mark.parametrize("token_id", [True, 1.5, "1", None, [1]], ids=repr)
def test_token_ids_that_are_no_integers(token_id: Any, info: EngineInfo) -> None:
    with pytest.raises(RequestError, match="all integers"):
        make_request(0, [0, token_id], SamplingParams(), info)


def test_token_ids_of_numpy_and_torch(info: EngineInfo) -> None:
    for token_ids in (np.array([1, 2]), torch.tensor([1, 2])):
        request = make_request(0, token_ids, SamplingParams(), info)  # type: ignore[arg-type]
        assert request.prompt_token_ids == [1, 2]
        assert set(map(type, request.prompt_token_ids)) == {int}


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": "3"}, {"max_tokens": True}, {"temperature": "1"}, {"seed": 1.5}, {"top_k": None}, {"stop": (1,)}],
    ids=str,
)
def test_sampling_parameters_of_the_wrong_type(wrong: dict[str, Any], info: EngineInfo) -> None:
    [name] = wrong
    with pytest.raises(RequestError, match=f"{name} has the wrong type") as error:
        make_request(0, [0], SamplingParams(**wrong), info)
    assert error.value.param == name


def test_token_ids_outside_the_vocabulary(info: EngineInfo) -> None:
    assert make_request(0, [0, VOCAB_SIZE - 1], SamplingParams(), info)
    for token_id in (-1, VOCAB_SIZE, 10**30):
        with pytest.raises(RequestError, match=str(token_id)):
            make_request(0, [0, token_id], SamplingParams(), info)


def test_own_seeds_differ_by_request_and_repeat_by_run(info: EngineInfo) -> None:
    first, second, again = (make_request(number, [1], SamplingParams(), info).seed for number in (0, 1, 0))
    assert first == again
    assert first != second
    assert 0 <= first < 2**63


def test_no_limit_on_top_k_in_any_spelling(info: EngineInfo) -> None:
    assert [make_request(0, [1], SamplingParams(top_k=k), info).top_k for k in (-1, 0, 5, 10**30)] == [
        0, 0, 5, VOCAB_SIZE
    ]  # fmt: skip


def test_one_stop_string_need_not_be_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_output_ends_with_the_engine_s_word_or_a_stop_string(tokenizer: Tokenizer) -> None:
    def push_all(output: OutputText, text: str, reason: str | None) -> str:
        token_ids = tokenizer.encode(text)
        tokens = [TokenOutput(0, token_id, None, 3) for token_id in token_ids]
        if reason is not None:
            tokens.append(TokenOutput(0, None, reason))  # type: ignore[arg-type]
        return "".join(output.push(token) for token in tokens)

    output = OutputText(tokenizer, [], ["STOP"])
    assert push_all(output, "é ST", "length") == "é ST"  # what was held back comes at the end
    assert (output.finish_reason, output.num_cached_tokens, len(output.token_ids)) == ("length", 3, 5)
    output = OutputText(tokenizer, [], ["STOP"])
    assert push_all(output, "a STOP", None) == "a "
    assert output.finish_reason == "stop"


def test_a_stop_string_with_the_last_token(tokenizer: Tokenizer) -> None:
    output = OutputText(tokenizer, [], ["b"])
    assert output.push(TokenOutput(0, tokenizer.encode("a")[0], None)) == "a"
    assert output.push(TokenOutput(0, tokenizer.encode("b")[0], "length")) == ""
    assert output.finish_reason == "stop"


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.mark.parametrize("length", [10, 1999, 2000, 5000])
def test_long_texts_take_another_way_to_the_same_tokens(smollm2: Tokenizer, length: int) -> None:
    text = ("Ein Text, naïve 😀, 你好; def f(x):\n    return x  " * 200)[:length]
    token_ids = smollm2.encode(text)
    assert token_ids == list(smollm2._backend.encode(text).ids)
    assert smollm2.decode_all(token_ids) == text


def test_other_threads_run_while_a_long_text_is_tokenized(smollm2: Tokenizer) -> None:
    """How often another thread gets on; with the interpreter locked it would be once or twice."""
    text = "The quick brown fox jumps over the lazy dog. " * 5000
    num_turns = 0

    def count(is_done: Event) -> None:
        nonlocal num_turns
        while not is_done.wait(0.001):
            num_turns += 1

    is_done = Event()
    other = Thread(target=count, args=(is_done,))
    other.start()
    smollm2.encode(text)
    is_done.set()
    other.join()
    assert num_turns > 5

"""`fullbore generate` and `LLM`, over real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fullbore_process import eventually, run_fullbore
from tiny_models import make_tiny_model, poison_token

from fullbore import LLM, SamplingParams
from fullbore.engine.messages import Outputs
from fullbore.errors import ConfigError, GrammarError, LogitsError, RequestError
from fullbore.scheduler.request import TokenOutput
from fullbore.text.grammar import regex_grammar

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPTS = ["one", "and two", "three " * 20, "4", "five", "six is more", "seven", "eight"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(str(model_folder), pp_size=2, dtype="float32") as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stays_behind(llm: LLM) -> Iterator[None]:
    yield

    def is_at_rest() -> bool:
        stats = llm._engine.stats()
        return (stats.running, stats.waiting, stats.in_flight, stats.used_blocks) == (0, 0, 0, 0)

    eventually(is_at_rest)


def test_order_is_kept_and_neighbours_change_nothing(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in together] == PROMPTS
    assert [output.text for output in together] == [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    assert all(len(output.token_ids) == 20 for output in together)
    assert all(output.outputs[0].finish_reason == "length" for output in together)


def test_micro_batches_are_in_flight_together(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert llm._engine.stats().max_in_flight >= 2


def test_choices_share_the_prompt_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)
    before = llm._engine.stats()
    prompt = "a prompt that nobody has asked before, of some length"
    [result] = llm.generate(prompt, params)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({output.text for output in result.outputs}) == 3
    assert result.text == result.outputs[0].text
    [again] = llm.generate(prompt, params)
    assert [output.text for output in again.outputs] == [output.text for output in result.outputs]
    assert (result.num_cached_tokens, again.num_cached_tokens > 0) == (0, True)
    after = llm._engine.stats()
    full = (len(result.prompt_token_ids) - 1) // llm.info.config.page_size * llm.info.config.page_size
    assert full > 0
    assert after.cached_tokens - before.cached_tokens == 5 * full  # all but the very first
    [greedy] = llm.generate(prompt, SamplingParams(n=3, max_tokens=20, temperature=0, ignore_eos=True))
    assert len({output.text for output in greedy.outputs}) == 1
    with pytest.raises(RequestError, match="n > 1"):
        list(llm.stream(prompt, params))


def test_logprobs_and_penalties(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=0, ignore_eos=True, repetition_penalty=1.3, logprobs=2, prompt_logprobs=1
    )
    plain, [result] = llm.generate("one two three", GREEDY)[0], llm.generate("one two three", params)
    assert plain.outputs[0].logprobs is None
    assert plain.prompt_logprobs is None
    assert plain.token_ids != result.token_ids
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    assert [len(each.top) for each in logprobs] == [2] * 20
    assert all(each.logprob <= each.top[0][1] <= 0 for each in logprobs)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert result.prompt_logprobs[0] is None
    assert result.num_cached_tokens == 0
    # The output again, as a part of a prompt, has the same log-probabilities.
    whole = result.prompt_token_ids + result.token_ids
    [again] = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert again.prompt_logprobs is not None
    found = [each.logprob for each in again.prompt_logprobs[len(result.prompt_token_ids) :] if each is not None]
    assert found == pytest.approx([each.logprob for each in logprobs], abs=1e-4)


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", [True], [1.5], [[1.5]], [[[1]]], ["a", None], ["a", 5], [b"ab"], {"a": 1}], ids=repr
)
def test_prompts_of_the_wrong_type_leave_the_engine_alone(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts? must be"):
        llm.generate(prompts, GREEDY)
    assert llm.generate("abc", GREEDY)[0].token_ids


def test_parameters_and_messages_of_the_wrong_type(llm: LLM) -> None:
    wrong: Any
    for wrong in ({"max_tokens": 1}, 5, [None]):
        with pytest.raises(RequestError, match="params must be"):
            llm.generate("a", wrong)
        with pytest.raises(RequestError, match="params must be"):
            list(llm.stream("a", wrong))
    for wrong in (None, "hi", {"role": "user", "content": "hi"}):
        with pytest.raises(RequestError, match="messages must be"):
            llm.chat(wrong, GREEDY)


def test_prompts_of_any_iterable(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in ("a", "b")]
    assert [output.token_ids for output in llm.generate((p for p in "ab"), GREEDY)] == expected  # type: ignore[arg-type]


def test_token_ids_texts_and_messages(llm: LLM) -> None:
    from_text = llm.generate("abc", GREEDY)[0]
    assert llm.generate(from_text.prompt_token_ids, GREEDY)[0].text == from_text.text
    assert llm.generate([from_text.prompt_token_ids], GREEDY)[0].prompt is None
    messages = [{"role": "user", "content": "abc"}]
    one = llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    two = llm.chat([messages, messages], GREEDY)  # type: ignore[list-item]
    assert [output.text for output in two] == [one[0].text] * 2


def test_params_of_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert [len(output.token_ids) for output in outputs] == [1, 3]
    assert llm.generate([], GREEDY) == []


def test_stop_string(llm: LLM) -> None:
    text = llm.generate("abc", GREEDY)[0].text
    stop = text[4:6]
    output = llm.generate("abc", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, stop=(stop,)))[0]
    assert output.text == text[: text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"


def test_stream_gives_the_same_text_and_may_be_left(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0].text
    assert "".join(llm.stream("abc", GREEDY)) == whole
    stream = llm.stream("abc", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    assert whole.startswith(next(stream))
    stream.close()  # type: ignore[attr-defined]


def test_streams_read_in_turn_lose_nothing(llm: LLM) -> None:
    whole = {output.prompt: output.text for output in llm.generate(PROMPTS[:3], GREEDY)}
    streams = {prompt: llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]}
    texts = dict.fromkeys(streams, "")
    while streams:
        for prompt, stream in list(streams.items()):
            piece = next(stream, None)
            if piece is None:
                del streams[prompt]
            else:
                texts[prompt] += piece
    assert texts == whole


def test_bad_requests_leave_the_engine_alone(llm: LLM) -> None:
    for prompts, params in [
        ("x" * 600, GREEDY),
        (["fine", ""], GREEDY),
        ([[1, 2], [99999]], GREEDY),
        ("x", SamplingParams(max_tokens=0)),
        ("x", SamplingParams(temperature=float("nan"))),
        ("x", SamplingParams(stop=("",))),
        (["x", "y"], [GREEDY]),
        ("\ud800", GREEDY),
    ]:
        with pytest.raises(RequestError):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm.generate("x", GREEDY)[0].text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [1, 2]},
        {"role": 5, "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ],
    ids=str,
)
def test_messages_are_not_taken_for_something_else(llm: LLM, message: Any) -> None:
    with pytest.raises(RequestError, match="messages are not as they should be") as error:
        llm.chat([{"role": "user", "content": "x"}, message], GREEDY)
    assert error.value.param == "messages"


def test_a_prompt_with_nan_ends_alone(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    bad_token = 5
    poison_token(folder, bad_token)
    params = SamplingParams(max_tokens=1, temperature=0)
    with LLM(str(folder), pp_size=2, dtype="float32") as llm:
        good, bad, also_good = llm.generate([[1, 2, 3], [1, bad_token, 3], [3, 2, 1]], params)
        with pytest.raises(LogitsError, match="not finite"):
            list(llm.stream([bad_token], params))
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.outputs[0].error)
    assert bad.token_ids == []
    for output in (good, also_good):
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].error is None
        assert len(output.token_ids) == 1


def test_a_grammar_too_complex_to_follow_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(timeout_s: float) -> list[Outputs]:
        [request_id] = llm._inboxes
        return [Outputs([TokenOutput(request_id, None, "grammar")])]

    monkeypatch.setattr(llm._engine, "add", lambda request: None)
    monkeypatch.setattr(llm._engine, "receive", receive)
    params = SamplingParams(max_tokens=5, grammar=regex_grammar("a+"))
    [output] = llm.generate("abc", params)[0].outputs
    assert output.finish_reason == "grammar"
    assert "simplify" in str(output.error)
    with pytest.raises(GrammarError, match="simplify"):
        list(llm.stream("abc", params))


def test_unknown_and_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="pp_sizes"):
        LLM("nowhere", pp_sizes=2)
    with pytest.raises(ConfigError, match="pp_size"):
        LLM("nowhere", pp_size="2")


def test_the_command_prints_what_the_class_returns(llm: LLM, model_folder: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "abc", "--max-tokens", "20", "--temperature", "0", "--pp-size", "3"]
    done = run_fullbore("generate", model_folder, *arguments, temporary=tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.encode() == (llm.generate("abc", params)[0].text + "\n").encode()
    assert list(tmp_path.iterdir()) == []


def test_a_plain_script_needs_no_main_guard(model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from fullbore import LLM, SamplingParams\n"
        f"llm = LLM({str(model_folder)!r}, pp_size=2)\n"
        "print(len(llm.generate('abc', SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr

"""Choices, several prompts, echo and log-probabilities: the official clients over an engine without a model."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from fake_engine import logprob_of
from running_server import TOKENIZER, RunningServer, echo, says

from fullbore.engine.messages import AddRequest

HELLO: Any = [{"role": "user", "content": "Hello"}]


def client_of(server: RunningServer) -> Any:
    """The official client, without its types: they do not know what a request asked for."""
    return server.client()


def says_its_choice(request: AddRequest) -> list[int]:
    """The prompt, and the number of the choice so many times plus one."""
    return request.prompt_token_ids + TOKENIZER.encode(str(request.choice) * (request.choice + 1))


def joined(chunks: Any) -> dict[int, str]:
    """Choice -> text, of a stream of completions; checks that each choice ends once, and last."""
    texts: dict[int, str] = {}
    ended: list[int] = []
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ended
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                ended.append(choice.index)
    assert sorted(ended) == sorted(texts)
    return texts


# --------------------------------------------------------------------------------------------- choices and prompts


def test_n_choices(server: RunningServer) -> None:
    server.engine.reply = says_its_choice
    completion = client_of(server).completions.create(model="tiny", prompt="ab", n=3, seed=7, max_tokens=50)
    assert [(choice.index, choice.text) for choice in completion.choices] == [(0, "ab0"), (1, "ab11"), (2, "ab222")]
    assert [(request.choice, request.seed) for request in server.engine.requests] == [(0, 7), (1, 7), (2, 7)]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 2
    assert completion.usage.completion_tokens == 4 + 5 + 6  # with the end tokens
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


def test_choices_without_a_seed_have_one_of_their_own_in_common(server: RunningServer) -> None:
    for _ in range(2):
        client_of(server).completions.create(model="tiny", prompt="ab", n=2, max_tokens=1)
    seeds = [request.seed for request in server.engine.requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[66], [67, 67], [68, 68, 68]]], ids=["texts", "token ids"])
def test_several_prompts_with_several_choices(server: RunningServer, prompts: Any) -> None:
    """As OpenAI counts: the k-th prompt has the choices from k * n on."""
    server.engine.reply = says_its_choice
    texts = [TOKENIZER.decode(prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
    expected = [text + number for text in texts for number in ("0", "11")]
    completion = client_of(server).completions.create(model="tiny", prompt=prompts, n=2, max_tokens=50)
    assert [choice.text for choice in completion.choices] == expected
    assert [choice.index for choice in completion.choices] == list(range(6))
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(map(len, prompts))
    stream = client_of(server).completions.create(model="tiny", prompt=prompts, n=2, max_tokens=50, stream=True)
    assert joined(stream) == dict(enumerate(expected))


def test_streamed_choices_come_mixed_and_end_each(server: RunningServer) -> None:
    server.engine.reply = says_its_choice
    stream = client_of(server).completions.create(
        model="tiny", prompt="ab", n=3, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert joined(chunks) == {0: "ab0", 1: "ab11", 2: "ab222"}
    assert [chunk.choices[0].index for chunk in chunks[:6]] == [0, 1, 2, 0, 1, 2]
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 15)


def test_a_choice_that_ends_at_a_stop_string_leaves_the_others_alone(server: RunningServer) -> None:
    server.engine.reply = says_its_choice
    for stream in (False, True):
        options: dict[str, Any] = {"model": "tiny", "prompt": "abc", "n": 3, "max_tokens": 50, "stop": "11"}
        if stream:
            assert joined(client_of(server).completions.create(**options, stream=True)) == {
                0: "abc0",
                1: "abc",
                2: "abc222",
            }
        else:
            completion = client_of(server).completions.create(**options)
            assert [choice.text for choice in completion.choices] == ["abc0", "abc", "abc222"]
            assert [choice.finish_reason for choice in completion.choices] == ["stop"] * 3
    assert server.engine.aborted == {1, 4}


def test_chat_with_choices(server: RunningServer) -> None:
    server.engine.reply = lambda request: TOKENIZER.encode("xyz"[request.choice] * 3)
    chat = client_of(server).chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [(choice.index, choice.message.content) for choice in chat.choices] == [(0, "xxx"), (1, "yyy"), (2, "zzz")]
    stream = client_of(server).chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True)
    roles, texts = [], ["", "", ""]
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert texts == ["xxx", "yyy", "zzz"]
    assert roles == [0, 1, 2]


def test_a_client_that_leaves_ends_all_choices(server: RunningServer) -> None:
    server.engine.reply = lambda request: [66] * 400
    server.engine.token_delay_s = 0.002
    stream = client_of(server).completions.create(model="tiny", prompt="a", n=4, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    asyncio.run(_until(lambda: server.engine.aborted == {0, 1, 2, 3}))
    assert not server.engine.running


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_everything_through_the_asynchronous_client(server: RunningServer) -> None:
    server.engine.reply = says_its_choice

    async def main() -> None:
        client: Any = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            whole = await client.completions.create(
                model="tiny", prompt=["a", "b"], n=2, max_tokens=9, logprobs=1, echo=True, presence_penalty=0.5
            )
            assert [choice.text for choice in whole.choices] == ["aa0", "aa11", "bb0", "bb11"]
            stream = await client.completions.create(
                model="tiny", prompt=["a", "b"], n=2, max_tokens=9, logprobs=1, echo=True, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert joined(chunks) == dict(enumerate(["aa0", "aa11", "bb0", "bb11"]))
            chat = await client.chat.completions.create(
                model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2, max_tokens=3
            )
            assert [len(choice.logprobs.content) for choice in chat.choices] == [3, 3]

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ parameters, echo


def test_parameters_reach_the_engine(server: RunningServer) -> None:
    client_of(server).completions.create(
        model="tiny", prompt="ab", max_tokens=5, presence_penalty=1.5, frequency_penalty=-1,
        logit_bias={"65": -3, "7": 2.5},
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [9, 8]},
    )  # fmt: skip
    [request] = server.engine.requests
    assert request.stop_token_ids == [9, 8]
    options = request.options
    assert options is not None
    assert (options.min_p, options.repetition_penalty, options.min_tokens) == (0.1, 1.2, 2)
    assert (options.presence_penalty, options.frequency_penalty) == (1.5, -1)
    assert options.logit_bias == {65: -3, 7: 2.5}


def test_a_default_request_has_no_options(server: RunningServer) -> None:
    client_of(server).completions.create(
        model="tiny", prompt="ab", max_tokens=5, presence_penalty=0, frequency_penalty=0, logit_bias={}, n=1, best_of=1,
        extra_body={"min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": [], "echo": None},
    )  # fmt: skip
    [request] = server.engine.requests
    assert request.options is None
    assert request.num_logprobs is None


def test_stop_tokens_are_not_part_of_the_text_but_of_the_tokens(server: RunningServer) -> None:
    server.engine.eos_token_id = 70
    server.engine.reply = says("abc")
    completion = client_of(server).completions.create(
        model="tiny", prompt="p", logprobs=0, extra_body={"stop_token_ids": [70]}
    )
    assert completion.choices[0].text == "abc"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["a", "b", "c", TOKENIZER.decode([70])]


def test_stop_strings_count_after_min_tokens(server: RunningServer) -> None:
    server.engine.reply = says("one. two. three. four.")
    completion = client_of(server).completions.create(
        model="tiny", prompt="p", max_tokens=50, stop=".", extra_body={"min_tokens": 6}
    )
    assert completion.choices[0].text == "one. two"


@pytest.mark.parametrize("prompt", ["Grüße", [66, 67, 68]], ids=str)
def test_echo_without_logprobs(server: RunningServer, prompt: Any) -> None:
    server.engine.reply = says("!?")
    text = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    completion = client_of(server).completions.create(model="tiny", prompt=prompt, echo=True, n=2)
    assert [choice.text for choice in completion.choices] == [text + "!?"] * 2
    assert completion.choices[0].logprobs is None
    assert {request.num_prompt_logprobs for request in server.engine.requests} == {None}
    stream = client_of(server).completions.create(model="tiny", prompt=prompt, echo=True, n=2, stream=True)
    assert joined(stream) == {0: text + "!?", 1: text + "!?"}


# ----------------------------------------------------------------------------------------------- log-probabilities


def test_completion_logprobs(server: RunningServer) -> None:
    server.engine.reply = says("aü")
    completion = client_of(server).completions.create(model="tiny", prompt="p", logprobs=2)
    found = completion.choices[0].logprobs
    assert found is not None
    token_ids = [*TOKENIZER.encode("aü"), server.engine.eos_token_id]
    assert found.tokens == ["a", "\\xc3", "\\xbc", "<|im_end|>"]
    assert found.token_logprobs == [logprob_of(token_id) for token_id in token_ids]
    assert found.text_offset == [0, 1, 2, 2]
    first, second = (TOKENIZER.token_bytes(token_id).decode("utf-8", "backslashreplace") for token_id in (0, 1))
    assert found.top_logprobs == [
        {first: 0.0, second: -0.125, token: logprob_of(token_id)}
        for token, token_id in zip(found.tokens, token_ids, strict=True)
    ]


@pytest.mark.parametrize("max_tokens", [2, 0])
def test_echo_with_logprobs(server: RunningServer, max_tokens: int) -> None:
    """The first token follows nothing; with max_tokens 0 there is the prompt alone, as evaluations ask for it."""
    server.engine.reply = says("xyz")
    options: dict[str, Any] = {"model": "tiny", "prompt": ["abc", "d"], "echo": True, "logprobs": 1, "n": 2}
    completion = client_of(server).completions.create(**options, max_tokens=max_tokens)
    generated = "xyz"[:max_tokens]
    assert [choice.text for choice in completion.choices] == ["abc" + generated] * 2 + ["d" + generated] * 2
    assert [request.num_prompt_logprobs for request in server.engine.requests] == [1, None, 1, None]
    for choice in completion.choices:
        text = choice.text
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == list(text)
        expected = [logprob_of(token_id) for token_id in TOKENIZER.encode(text)]
        assert choice.logprobs.token_logprobs == [None, *expected[1:]]
        assert choice.logprobs.text_offset == list(range(len(text)))
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] is None
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[1:])
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 4 * max_tokens)

    stream = list(client_of(server).completions.create(**options, max_tokens=max_tokens, stream=True))
    assert joined(stream) == {choice.index: choice.text for choice in completion.choices}
    for whole in completion.choices:
        parts = [chunk.choices[0] for chunk in stream if chunk.choices[0].index == whole.index]
        assert whole.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            found = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            assert found == getattr(whole.logprobs, name)


@pytest.mark.parametrize(("num_top", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_chat_logprobs(server: RunningServer, num_top: int | None, expected: int) -> None:
    server.engine.reply = says("hü")
    chat = client_of(server).chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=num_top)
    content = chat.choices[0].logprobs.content
    token_ids = [*TOKENIZER.encode("hü"), server.engine.eos_token_id]
    assert [each.token for each in content] == ["h", "\\xc3", "\\xbc", "<|im_end|>"]
    assert [each.bytes for each in content] == [[0x68], [0xC3], [0xBC], list(b"<|im_end|>")]
    assert [each.logprob for each in content] == [logprob_of(token_id) for token_id in token_ids]
    assert [[top.logprob for top in each.top_logprobs] for each in content] == [
        [logprob_of(token_id) for token_id in range(expected)]
    ] * 4


def test_streamed_chat_logprobs_go_with_the_text(server: RunningServer) -> None:
    """An unfinished character's tokens come with the character, a stop string's at the end: one for each token."""
    server.engine.reply = says("hü STOP and so on")
    stream = client_of(server).chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, stop=" STOP", stream=True
    )
    found = [
        (chunk.choices[0].delta.content, "".join(each.token for each in chunk.choices[0].logprobs.content))
        for chunk in stream
        if chunk.choices[0].logprobs is not None
    ]
    assert found == [("h", "h"), ("ü", "\\xc3\\xbc"), (None, " STOP")]


def test_no_logprobs_unless_asked_for(server: RunningServer) -> None:
    server.engine.reply = echo
    chat = client_of(server).chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, logprobs=False, top_logprobs=0
    )
    assert chat.choices[0].logprobs is None
    assert server.engine.requests[0].num_logprobs is None

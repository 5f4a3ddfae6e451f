"""The official client against the completion endpoints."""

from __future__ import annotations

import asyncio

import openai
import pytest
from running_server import RunningServer, says

HELLO = [{"role": "user", "content": "Hello"}]


def test_completion(server: RunningServer) -> None:
    completion = server.client().completions.create(model="tiny", prompt="abcdef", max_tokens=4)
    assert completion.choices[0].text == "abcd"
    assert completion.choices[0].finish_reason == "length"
    assert completion.object == "text_completion"
    assert completion.model == "tiny"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 6
    assert completion.usage.completion_tokens == 4
    assert completion.usage.total_tokens == 10
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


def test_completion_that_ends_by_itself_counts_its_end_token(server: RunningServer) -> None:
    completion = server.client().completions.create(model="tiny", prompt="abcdef", max_tokens=400)
    assert completion.choices[0].text == "abcdef"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 7


def test_completion_of_token_ids(server: RunningServer) -> None:
    completion = server.client().completions.create(model="tiny", prompt=[66, 67, 68], max_tokens=3)
    assert server.engine.requests[0].prompt_token_ids == [66, 67, 68]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", [["abc"], [[66, 67]]])
def test_a_list_of_one_prompt(server: RunningServer, prompt: list[str]) -> None:
    assert server.client().completions.create(model="tiny", prompt=prompt, max_tokens=1).choices[0].text


def test_completion_generates_16_tokens_unless_told_otherwise(server: RunningServer) -> None:
    completion = server.client().completions.create(model="tiny", prompt="x" * 100)
    assert completion.choices[0].text == "x" * 16
    assert server.client().completions.create(model="tiny", prompt="x" * 510).choices[0].text == "xx"


@pytest.mark.parametrize("text", ["plain", "naïve 😀👩‍👩‍👧 你好", "a\n\nb\r\nc  data: x"])
def test_streamed_pieces_make_the_text(server: RunningServer, text: str) -> None:
    server.engine.reply = says(text)
    stream = server.client().completions.create(model="tiny", prompt="p", max_tokens=200, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert len(chunks) == len(text) + 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(text) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_with_usage(server: RunningServer) -> None:
    stream = server.client().completions.create(
        model="tiny", prompt="abc", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 2)


def test_stream_with_usage_in_every_chunk(server: RunningServer) -> None:
    """What load generators ask vLLM and SGLang for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    client = server.client()
    stream = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=3,
        stream=True,
        stream_options=options,  # type: ignore[call-overload]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts[:3] == [1, 2, 3]
    assert set(counts[3:]) == {3}
    server.engine.reply = says("Hi!")
    chat = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stream_options=options,  # type: ignore[call-overload]
    )
    counts = [chunk.usage.completion_tokens for chunk in chat]
    assert counts == sorted(counts)
    assert counts[-1] == len("Hi!") + 1


def test_chat(server: RunningServer) -> None:
    server.engine.reply = says("Good day!")
    chat = server.client().chat.completions.create(model="tiny", messages=HELLO)
    assert chat.object == "chat.completion"
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == "Good day!"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == len("Good day!") + 1
    prompt = server.engine.requests[0].prompt_token_ids
    assert server.state.tokenizer.decode(prompt) == "user\nHello\nassistant\n"
    assert server.engine.requests[0].max_tokens == 512 - len(prompt)


def test_chat_stream(server: RunningServer) -> None:
    server.engine.reply = says("Gruß!")
    stream = server.client().chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Gruß!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[0].object == "chat.completion.chunk"
    assert last.usage is not None
    assert last.usage.completion_tokens == len("Gruß!".encode()) + 1


def test_chat_content_in_parts_and_roles(server: RunningServer) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    server.client().chat.completions.create(model="tiny", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    text = server.state.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert text == "system\nBe brief.\nuser\nab\nassistant\nc\nuser\nd\nassistant\n"


def test_max_completion_tokens_is_the_newer_name(server: RunningServer) -> None:
    chat = server.client().chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=1, max_tokens=9)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 1
    assert chat.choices[0].finish_reason == "length"


def test_stop_strings(server: RunningServer) -> None:
    server.engine.reply = says("one two END three")
    client = server.client()
    completion = client.completions.create(model="tiny", prompt="p", max_tokens=100, stop=["three", " END"])
    assert completion.choices[0].text == "one two"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len("one two END")
    stream = client.completions.create(model="tiny", prompt="p", max_tokens=100, stop=" END", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two"
    assert server.engine.aborted == {0, 1}  # the engine would have gone on


def test_sampling_parameters_reach_the_engine(server: RunningServer) -> None:
    server.client().completions.create(
        model="tiny",
        prompt="p",
        max_tokens=1,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        extra_body={"top_k": 40, "ignore_eos": True},
    )
    request = server.engine.requests[0]
    assert (request.temperature, request.top_p, request.seed) == (0.5, 0.9, -7)
    assert (request.top_k, request.ignore_eos) == (40, True)


def test_requests_without_a_seed_get_different_ones(server: RunningServer) -> None:
    for _ in range(3):
        server.client().completions.create(model="tiny", prompt="p", max_tokens=1)
    first, second, third = server.engine.requests
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert len({first.seed, second.seed, third.seed}) == 3


def test_parameters_that_change_nothing_are_accepted(server: RunningServer) -> None:
    server.client().chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        logit_bias={},
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
    )


def test_async_client_many_at_once(server: RunningServer) -> None:
    server.engine.token_delay_s = 0.002

    async def ask(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=text, max_tokens=100, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(texts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    texts = [f"question number {number}" for number in range(40)]
    assert asyncio.run(ask_all(texts)) == texts
    assert not server.engine.running
    assert not server.engine.aborted


def test_the_model_may_be_left_out(server: RunningServer) -> None:
    assert server.post("/v1/completions", json={"prompt": "p", "max_tokens": 1}).json()["model"] == "tiny"

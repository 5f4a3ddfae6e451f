"""What a client did wrong is told in OpenAI's shape, and never reaches the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fullbore_process import eventually
from running_server import RunningServer, StartServer

from fullbore.config import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"multipleOf": 999983}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1"}}
OBJECT = {"type": "json_object"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) > 15
    return dict(error)


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt.0"),
    ({"prompt": [[1], [99999]]}, "prompt"),
    ({"prompt": [1, 99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt.0"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "x" * 512}, "prompt"),
    ({"prompt": "x" * 500, "max_tokens": 13}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "seed": "1"}, "seed"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 33}, "stop"),
    ({"prompt": "a", "stop": "x" * 1001}, "stop"),
    ({"prompt": "a", "stop": ["a", "x" * 1001]}, "stop"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stop": [5]}, "stop.0"),
    ({"prompt": "a", "stream": True, "stream_options": {"new": True}}, "stream_options.new"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": ["a"] * 9, "n": 128}, "n"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "best_of": 2, "n": 2}, "best_of"),
    ({"prompt": "a", "echo": "yes"}, "echo"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1, "echo": True}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": ["a" * 400] * 8, "n": 20, "echo": True, "logprobs": 20}, "logprobs"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-5": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
    ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": 1e-320}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"prompt": "a", "min_p": 1.1}, "min_p"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"prompt": "a", "no_such_thing": 1}, "no_such_thing"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    server = RunningServer(ServerConfig(port=0, shutdown_grace_s=0.2, max_body_bytes=100_000))
    yield server
    server.request_stop()
    server.join()


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_bad_completion(shared_server: RunningServer, body: dict[str, Any], param: str) -> None:
    error = error_of(shared_server.post("/v1/completions", json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split(".")[0] in error["message"]
    assert not shared_server.engine.requests


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.type"),
    ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, "messages.0.tool_calls.0.function.arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "x": 1}]}]}, "messages.0.tool_calls.0.x"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({**CHAT, "tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({**CHAT, "tools": [{**TOOL, "cache": 1}]}, "tools.0.cache"),
    ({**CHAT, "tools": [TOOL, TOOL]}, "tools"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "tool_choice": "always"}, "tool_choice"),
    ({**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({**CHAT, "tools": [TOOL], "tool_choice": "required", "response_format": OBJECT}, "response_format"),
    ({**CHAT, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
    ({**CHAT, "response_format": {"type": "yaml"}}, "response_format.type"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({**CHAT, "response_format": {**OBJECT, "x": 1}}, "response_format.x"),
    ({**CHAT, "response_format": OBJECT, "guided_regex": "a"}, "guided_regex"),
    ({**CHAT, "response_format": OBJECT, "min_tokens": 2}, "min_tokens"),
    ({**CHAT, "guided_choice": []}, "guided_choice"),
    ({**CHAT, "guided_json": "{"}, "guided_json"),
    ({**CHAT, "guided_json": {"multipleOf": 999983}}, "guided_json"),
    ({**CHAT, "structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({**CHAT, "structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({**CHAT, "timeout_s": 0}, "timeout_s"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({**CHAT, "top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({**CHAT, "logprobs": 3}, "logprobs"),
    ({**CHAT, "n": -1}, "n"),
    ({**CHAT, "echo": True}, "echo"),
    ({**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({**CHAT, "max_completion_tokens": 600}, "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_bad_chat(shared_server: RunningServer, body: dict[str, Any], param: str) -> None:
    error = error_of(shared_server.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param
    assert not shared_server.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b"{'prompt': 'a'}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "unknown": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"} trailing',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_broken_json(shared_server: RunningServer, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(shared_server.post("/v1/completions", content=body, headers=headers), 400)
    assert not shared_server.engine.requests


def test_error_classes_of_the_official_client(shared_server: RunningServer) -> None:
    client = shared_server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", n=129, stream=True)


def test_unknown_url_and_method(shared_server: RunningServer) -> None:
    assert "/v1/nothing" in error_of(shared_server.get("/v1/nothing"), 404)["message"]
    response = shared_server.get("/v1/completions")
    assert "GET" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_body_not_declared_as_json(shared_server: RunningServer) -> None:
    response = shared_server.post("/v1/completions", data={"prompt": "a"})
    assert "Content-Type: application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize("size", [100_001, 5_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_too_large(shared_server: RunningServer, size: int, is_chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * size}).encode()
    content = (body[start : start + 10_000] for start in range(0, len(body), 10_000)) if is_chunked else body
    response = shared_server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "--max-body-bytes" in error_of(response, 413)["message"]


def test_a_request_that_breaks_the_server_s_code_is_answered_with_500(start_server: StartServer) -> None:
    server = start_server(shutdown_grace_s=0.2)
    server.engine.reply = lambda request: 1 // 0  # type: ignore[return-value]
    assert error_of(server.post("/v1/completions", json={"prompt": "a"}), 500)["type"] == "server_error"
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [{"model": "x" * 50_000}, {"x" * 50_000: 1}, {"logit_bias": {"x" * 50_000: 1}}, {"n": "x" * 50_000}],
    ids=list,
)
def test_nobody_gets_all_of_his_words_back(shared_server: RunningServer, body: dict[str, Any]) -> None:
    response = shared_server.post("/v1/completions", json={"prompt": "a", **body})
    assert response.status_code in (400, 404)
    assert len(response.text) < 2000


def test_a_long_path_is_logged_in_short(shared_server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fullbore.access"):
        assert len(error_of(shared_server.get("/" + "x" * 50_000), 404)["message"]) < 1000
        eventually(lambda: caplog.records)
    assert len(caplog.records[-1].getMessage()) < 1000

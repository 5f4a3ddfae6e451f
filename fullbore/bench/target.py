"""The server under test: what it is, and how one request to it is sent and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from fullbore.bench.prompts import Prompt
from fullbore.errors import FullboreError

CONNECT_TIMEOUT_S = 10.0


class BenchError(FullboreError):
    """The server cannot be measured as asked."""


@dataclass
class RequestResult:
    """One request as its client saw it; times in seconds on `time.perf_counter`."""

    due_s: float  # when it was meant to be sent: latencies count from here, also when the client was late
    event_s: list[float] = field(default_factory=list)  # arrival of each piece of text
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0  # as the server counts them
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.due_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.event_s[-1] - self.event_s[0]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True)
class Target:
    """A server's address and the way to talk to it."""

    url: str  # without /v1
    model: str
    api_key: str | None = None
    is_chat: bool = False
    knows_ignore_eos: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        if self.knows_ignore_eos:
            body["ignore_eos"] = True
        return body

    async def send(self, client: httpx.AsyncClient, prompt: Prompt, due_s: float) -> RequestResult:
        """Sends one request and reads its stream; never raises for what the server does, that is the result's error."""
        result = RequestResult(due_s)
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        try:
            async with client.stream("POST", self.url + path, json=self.body(prompt), headers=self.headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    result.error = f"HTTP {response.status_code}: {text[:300]}"
                else:
                    await _read_stream(response, result)
        except (httpx.HTTPError, httpx.StreamError) as error:
            result.error = f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            result.error = f"The stream is not OpenAI's: {error}"
        result.end_s = time.perf_counter()
        if result.error is None and not result.event_s:
            result.error = "The server sent no text."
        elif result.error is None and result.output_tokens == 0:
            result.error = "The server does not report usage in streams (stream_options.include_usage)."
        return result


async def _read_stream(response: httpx.Response, result: RequestResult) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        now_s = time.perf_counter()
        chunk = _decoder.decode(data)
        if chunk.error is not None:
            result.error = f"The server ended the stream with an error: {chunk.error}"
            return
        if any(choice.has_text for choice in chunk.choices):
            result.event_s.append(now_s)
        if chunk.usage is not None:
            result.prompt_tokens = chunk.usage.prompt_tokens
            result.output_tokens = chunk.usage.completion_tokens
    result.error = "The stream ended early, without [DONE]."


def new_client(most_connections: int, timeout_s: float) -> httpx.AsyncClient:
    """An HTTP client with a connection for every request that may be open at once."""
    limits = httpx.Limits(max_connections=most_connections, max_keepalive_connections=most_connections)
    return httpx.AsyncClient(
        limits=limits, timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S), trust_env=False
    )


async def find_target(
    url: str, model: str | None, api_key: str | None, *, is_chat: bool, timeout_s: float = 600.0
) -> Target:
    """Asks the server for its model, and tries whether it knows `ignore_eos`.

    `timeout_s`: its longest silence within a request.

    Raises:
        BenchError: nothing answers there, or not as an OpenAI-compatible server does.
    """
    url = url.rstrip("/").removesuffix("/v1")
    target = Target(url, model or "", api_key, is_chat)
    async with new_client(1, timeout_s) as client:
        if model is None:
            target = replace(target, model=await _first_model(client, target))
        for knows_ignore_eos in (True, False):
            target = replace(target, knows_ignore_eos=knows_ignore_eos)
            tried = await target.send(client, Prompt("Hello, how are you?", output_tokens=4), time.perf_counter())
            if tried.error is None:
                return target
            if not tried.error.startswith(("HTTP 400", "HTTP 422")):
                break
    raise BenchError(f"{url} does not answer a test request. {tried.error}")


async def _first_model(client: httpx.AsyncClient, target: Target) -> str:
    try:
        response = await client.get(target.url + "/v1/models", headers=target.headers, timeout=30)
    except httpx.HTTPError as error:
        raise BenchError(
            f"No server answers at {target.url} ({type(error).__name__}); start one, or name it with --url."
        ) from error
    if response.status_code in (401, 403):
        raise BenchError(f"{target.url} wants an API key; give it with --api-key.")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{target.url}/v1/models does not list a model; name one with --model.") from error

"""An OpenAI-like server with known timing, which notes when it sent what."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class MockServer:
    """Sends the first token after `ttft_s` and one event of `tokens_per_event` tokens every `itl_s` after it."""

    ttft_s: float = 0.1
    itl_s: float = 0.02
    tokens_per_event: int = 1
    knows_ignore_eos: bool = True
    reports_usage: bool = True
    fail_every: int = 0  # every n-th request gets a 500
    break_every: int = 0  # every n-th stream ends in the middle
    url: str = ""
    started_s: list[float] = field(default_factory=list)
    event_s: list[list[float]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"data": [{"id": "mock"}]}

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            return self._answer(await request.json())

        return app

    def _answer(self, body: dict[str, Any]) -> Response:
        number = len(self.bodies) + 1
        self.bodies.append(body)
        if "ignore_eos" in body and not self.knows_ignore_eos:
            return JSONResponse({"error": {"message": "unknown parameter"}}, 400)
        if self.fail_every and number % self.fail_every == 0:
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        breaks = bool(self.break_every and number % self.break_every == 0)
        return StreamingResponse(self._events(body, breaks), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], breaks: bool) -> AsyncIterator[str]:
        start_s = time.perf_counter()
        self.started_s.append(start_s)
        sent: list[float] = []
        self.event_s.append(sent)
        is_chat = "messages" in body
        text = body["messages"][0]["content"] if is_chat else body["prompt"]
        tokens = body["max_tokens"]
        for event in range(-(-tokens // self.tokens_per_event)):
            due_s = start_s + self.ttft_s + event * self.itl_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0))
            sent.append(time.perf_counter())
            choice = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if breaks:
                return
        if self.reports_usage:
            usage = {"prompt_tokens": 3 + 2 * len(text.split()), "completion_tokens": tokens}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@contextmanager
def running(mock: MockServer) -> Iterator[MockServer]:
    """Serves it on a free port in a thread."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    mock.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = _Server(uvicorn.Config(mock.app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    end_s = time.monotonic() + 20
    while not server.started and time.monotonic() < end_s:
        time.sleep(0.01)
    try:
        yield mock
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()

"""The real application on a real port, over an engine without a model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
from fake_engine import FakeEngine, Reply
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer

from fullbore.config import ServerConfig
from fullbore.engine.messages import AddRequest
from fullbore.server.serve import bind, serve
from fullbore.server.state import ServerState
from fullbore.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_byte_tokenizer())
TIMEOUT_S = 20


def says(text: str) -> Reply:
    """Every request gets this text, one token per byte."""
    token_ids = TOKENIZER.encode(text)
    return lambda request: token_ids


def echo(request: AddRequest) -> list[int]:
    """Every request gets its prompt back."""
    return request.prompt_token_ids


class RunningServer:
    """A server in a thread of its own. `engine` may be read and changed; methods go through `call`."""

    def __init__(self, config: ServerConfig, sock: socket.socket | None = None) -> None:
        self._config = config
        self._ready = threading.Event()
        self.sock = sock or bind(config.host, config.port)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.engine: FakeEngine
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.engine = FakeEngine(echo, VOCAB_SIZE, EOS_TOKEN_ID)
        self.state = ServerState(self.engine, TOKENIZER, self._config, "tiny")  # type: ignore[arg-type]
        await serve(self.state, self.sock, self._stop, self._on_ready)

    def _on_ready(self) -> None:
        self.engine.forget_requests()  # the warm-up's
        self._ready.set()

    def call(self, function: Callable[[], Any]) -> None:
        """Runs `function` in the server's loop."""
        self._loop.call_soon_threadsafe(function)

    def request_stop(self) -> None:
        self.call(self._stop.set)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        """Open ones, as the system sees them."""
        port = self.sock.getsockname()[1]
        return sum(each.laddr.port == port and bool(each.raddr) for each in psutil.Process().net_connections("tcp"))

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=TIMEOUT_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=TIMEOUT_S, **options)


StartServer = Callable[..., RunningServer]

"""`fullbore serve`: from settings to a running server and back."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from fullbore import __version__
from fullbore.config import EngineConfig, ServerConfig
from fullbore.engine.async_client import AsyncEngineClient
from fullbore.engine.messages import EngineInfo
from fullbore.progress import StartProgress
from fullbore.server.request_log import set_up_logging
from fullbore.server.serve import allow_many_connections, bind, serve, stop_signals
from fullbore.server.state import ServerState
from fullbore.text.tokenizer import Tokenizer


def run(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serves until SIGINT or SIGTERM, then returns.

    Raises:
        FullboreError: it could not start, or the pipeline died.
    """
    engine_config.validate()
    server_config.validate()
    set_up_logging(server_config.log_format)
    allow_many_connections()
    with bind(server_config.host, server_config.port) as sock:  # before the model is loaded for nothing
        asyncio.run(_run(engine_config, server_config, sock))


async def _run(engine_config: EngineConfig, server_config: ServerConfig, sock: socket.socket) -> None:
    with stop_signals(lambda: _print_stopping(server_config)) as stop_requested:
        tokenizers: list[Tokenizer] = []

        def load_tokenizer(model_path: str) -> None:  # while the stages load; without one they need not
            tokenizers.append(Tokenizer.load(model_path))

        engine = await _start_engine(engine_config, stop_requested, load_tokenizer)
        if engine is None:
            return
        try:
            [tokenizer] = tokenizers
            model_name = server_config.served_model_name or engine.info.model_name
            state = ServerState(engine, tokenizer, server_config, model_name)
            await serve(state, sock, stop_requested, lambda: _print_ready(state, sock))
        finally:
            if engine.dead is not None and engine.dead.stack:
                _say(engine.dead.stack, sys.stderr)
            await engine.stop()


async def _start_engine(
    config: EngineConfig, stop_requested: asyncio.Event, on_model: Callable[[str], None]
) -> AsyncEngineClient | None:
    """The running engine; None when a signal came first."""
    with StartProgress() as progress:
        starting = AsyncEngineClient.start(config, progress.update, on_model, has_waiting_clients=True)
        start = asyncio.create_task(starting)
        stop = asyncio.create_task(stop_requested.wait())
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if start.done():
            return start.result()
        start.cancel()
        with suppress(asyncio.CancelledError):
            await start
        return None


def _print_ready(state: ServerState, sock: socket.socket) -> None:
    url = _url(sock)
    lines = [
        f"fullbore {__version__} serves {state.model_name}: {_describe(state.engine.info)}",
        f"API:  {url}/v1  (OpenAI-compatible)",
        f"Docs: {url}/docs" + (" (needs the API key)" if state.config.api_key else ""),
        f"Live: {url}/dashboard",
        "Try:",
        f"  {_curl(state, url)}",
        "Stop with Ctrl-C.",
    ]
    _say("\n".join(lines), sys.stdout)


def _print_stopping(config: ServerConfig) -> None:
    grace = f"{config.shutdown_grace_s:g} s"
    _say(f"Stopping: running requests get {grace} to finish; Ctrl-C again ends it at once.", sys.stderr)


def _say(text: str, file: TextIO) -> None:
    with suppress(OSError):  # a server whose log's disk is full serves all the same
        print(text, file=file, flush=True)


def _describe(info: EngineInfo) -> str:
    stages = ", ".join(
        f"layers {start}-{end - 1} on {stage.device}" for stage in info.stages for start, end in [stage.layers]
    )
    count = f"{len(info.stages)} stage" + ("s" if len(info.stages) > 1 else "")
    return f"{count} ({stages}), {info.dtype}, KV cache for {info.kv_capacity_tokens} tokens"


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _curl(state: ServerState, url: str) -> str:
    if state.tokenizer.has_chat_template:
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "What is a pipeline?"}], "max_tokens": 100}
    else:
        path = "completions"
        body = {"prompt": "A pipeline is", "max_tokens": 100}
    key = ' -H "Authorization: Bearer $FULLBORE_API_KEY"' if state.config.api_key else ""
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"

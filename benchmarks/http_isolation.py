"""Do long prompts of one client delay the tokens of others? Run: python benchmarks/http_isolation.py

A server over stages that sleep (so that the engine needs next to no processor), with a real tokenizer, and 64 clients
that stream. Their inter-token latencies alone, then while one more client sends texts of 30,000 tokens one after the
other: to /tokenize, which is HTTP and tokenizing alone, and to /v1/completions, where the engine works on them as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx

MODEL = "sleep://layers=8,layer_ms=2.5,vocab=49152,context=65536"
TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. " * 1600  # about 30,000 tokens
STARTED = "serving "


# ------------------------------------------------------------------------------------------------------ the server


async def run_server() -> None:
    """Serves MODEL with the default model's tokenizer until it is killed."""
    from fullbore.config import DEFAULT_MODEL, EngineConfig, ServerConfig
    from fullbore.engine.async_client import AsyncEngineClient
    from fullbore.model.resolve import resolve_model
    from fullbore.server.serve import bind, serve, stop_signals
    from fullbore.server.state import ServerState
    from fullbore.text.tokenizer import Tokenizer

    config = ServerConfig(port=0, disable_log_requests=True, shutdown_grace_s=0)
    engine_config = EngineConfig(model=MODEL, pp_size=2, max_total_tokens=200_000)
    with bind(config.host, config.port) as sock, stop_signals(lambda: None) as stop_requested:
        engine = await AsyncEngineClient.start(engine_config)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, resolve_model(DEFAULT_MODEL).path)
            state = ServerState(engine, tokenizer, config, "sleep")
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            await serve(state, sock, stop_requested, lambda: print(STARTED + url, flush=True))
        finally:
            await engine.stop()


# ----------------------------------------------------------------------------------------------------- the clients


async def stream(url: str, number: int, end_s: float, latencies_s: list[float]) -> None:
    """One client: asks again and again until `end_s`, and notes the times between its tokens."""
    body = json.dumps({"prompt": [number] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    while time.perf_counter() < end_s:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        last_s = None
        while time.perf_counter() < end_s and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    latencies_s.append(now_s - last_s)
                last_s = now_s
        writer.close()


async def post_long_texts(url: str, path: str, end_s: float) -> int:
    """The disturber; how many answers it got."""
    body = {"prompt": TEXT, "max_tokens": 1} if path == "/v1/completions" else {"prompt": TEXT}
    num_answers = 0
    async with httpx.AsyncClient(timeout=60) as client:
        while time.perf_counter() < end_s:
            answer = await client.post(url + path, json=body)
            answer.raise_for_status()
            num_answers += 1
    return num_answers


async def measure(url: str, num_clients: int, seconds: float, disturb: str | None) -> tuple[list[float], int]:
    """All inter-token latencies, sorted, and the disturber's answers."""
    end_s = time.perf_counter() + seconds
    latencies_s: list[float] = []
    streams = [stream(url, number, end_s, latencies_s) for number in range(num_clients)]
    disturber = asyncio.create_task(post_long_texts(url, disturb, end_s)) if disturb else None
    await asyncio.gather(*streams)
    num_answers = await disturber if disturber else 0
    return sorted(latencies_s), num_answers


async def compare(url: str, num_clients: int, seconds: float) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        count = (await client.post(f"{url}/tokenize", json={"prompt": TEXT})).json()["count"]
    print(f"{num_clients} clients, texts of {count} tokens; inter-token latency in ms")
    print("disturbed by      texts     n    p50    p99  p99.9    max")
    for disturb in (None, "/tokenize", "/v1/completions"):
        latencies_s, num_answers = await measure(url, num_clients, seconds, disturb)
        ms = [1e3 * latencies_s[min(int(len(latencies_s) * q), len(latencies_s) - 1)] for q in (0.5, 0.99, 0.999, 1.0)]
        print(f"{disturb or 'nobody':16} {num_answers:6} {len(latencies_s):6}" + "".join(f"{each:7.1f}" for each in ms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three measurements")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(run_server())
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = next(line for line in server.stdout if line.startswith(STARTED))
            asyncio.run(compare(line.removeprefix(STARTED).strip(), arguments.clients, arguments.seconds))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()

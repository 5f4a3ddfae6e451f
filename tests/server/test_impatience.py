"""Connections that never bring a whole request, or do not take what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fullbore_process import eventually
from running_server import TIMEOUT_S, RunningServer
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from fullbore.server import body as body_module
from fullbore.server import impatience
from fullbore.server.impatience import ImpatientProtocol

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", None), (HALF, b"408"), (b"\x16\x03\x01\r\n", b"400")], ids=["nothing", "half", "no HTTP"]
)
def test_they_are_closed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes | None
) -> None:
    monkeypatch.setattr(impatience, "HEAD_TIMEOUT_S", 0.1)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(sent)
        answer = sock.makefile("rb").read()  # to the end
    assert answer.split(b" ")[1:2] == ([] if status is None else [status])


def test_trickling_does_not_help(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impatience, "HEAD_TIMEOUT_S", 0.2)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.settimeout(0.01)
        sock.sendall(HALF)
        for _ in range(2000):
            try:
                answer = sock.recv(100)
                break
            except TimeoutError:
                sock.sendall(b"x")
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_later_request_of_a_connection_has_the_limit_too(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impatience, "HEAD_TIMEOUT_S", 0.3)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(WHOLE)
        assert sock.recv(10_000).startswith(b"HTTP/1.1 200")
        sock.sendall(HALF)
        answers = sock.makefile("rb").read()  # perhaps with the rest of the first one
    assert b"HTTP/1.1 408" in answers


def test_an_answer_may_take_longer(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impatience, "HEAD_TIMEOUT_S", 0.2)
    server.engine.token_delay_s = 0.1
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        for _ in range(2):  # over one connection
            response = client.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": 8})
            assert response.json()["choices"][0]["text"] == "abcdefgh"


# ------------------------------------------------------------------------------------------------------------- bodies

BODY_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def wait_for_answer(sock: socket.socket, trickle: bytes) -> bytes:
    """Sends `trickle` again and again until there is an answer."""
    sock.settimeout(0.02)
    for _ in range(1000):
        try:
            return sock.recv(10_000)
        except TimeoutError:
            sock.sendall(trickle)
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("head", "trickle"),
    [(b"Content-Length: 90000\r\n\r\n{", b" "), (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n")],
    ids=["declared", "chunked"],
)
def test_a_body_that_trickles_gets_408(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, head: bytes, trickle: bytes
) -> None:
    monkeypatch.setattr(body_module, "SILENCE_S", 0.5)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(BODY_HEAD + head)
        assert wait_for_answer(sock, trickle).startswith(b"HTTP/1.1 408")


def test_a_large_body_has_more_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes slowly, but not too slowly."""
    monkeypatch.setattr(body_module, "SILENCE_S", 0.5)
    monkeypatch.setattr(body_module, "LEAST_BYTES_PER_S", 10)

    def chunks() -> Iterator[bytes]:
        for piece in (b'{"prompt": "a",', b" " * 1000, b'"max_tokens": 1', b"}"):
            yield piece
            time.sleep(0.2)

    headers = {"Content-Type": "application/json"}
    assert server.post("/v1/completions", content=chunks(), headers=headers).status_code == 200


def test_a_storm_of_slow_bodies_disturbs_nobody(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.sock.getsockname())) for _ in range(500)]
        for sock in slow:
            sock.sendall(BODY_HEAD + b"Content-Length: 100000\r\n\r\n{")
        for number in range(10):
            answer = server.post("/v1/completions", json={"prompt": f"number {number}", "max_tokens": 20})
            assert answer.json()["choices"][0]["text"] == f"number {number}"
            for sock in slow:
                sock.sendall(b" " * 10)
    eventually(lambda: not server.num_connections)
    assert len(server.engine.requests) == 10


# ------------------------------------------------------------------------------------------------------ slow readers


@contextlib.contextmanager
def endless_answer(server: RunningServer, stream: bool) -> Iterator[socket.socket]:
    """Of a client that has little room for it."""
    server.engine.info.context_length = 10_000_000
    server.engine.reply = lambda request: [87] * 12_000
    body = json.dumps({"prompt": "p", "max_tokens": 12_000, "stream": stream, "logprobs": 20}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(TIMEOUT_S)
        sock.connect(server.sock.getsockname())
        sock.sendall(BODY_HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield sock


@pytest.mark.parametrize("num_bytes", [0, 1], ids=["nothing", "a byte at a time"])
def test_a_stream_that_nobody_takes_ends(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(impatience, "TAKE_PERIOD_S", 0.5)
    with endless_answer(server, stream=True) as sock:

        def has_ended() -> bool:
            if num_bytes:
                sock.recv(num_bytes)
            return bool(server.engine.aborted)

        eventually(has_ended)
        assert not server.engine.running
        eventually(lambda: not server.num_connections)
        server.engine.reply = lambda request: request.prompt_token_ids
        assert server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_whole_answer_that_nobody_takes_does_not_stay_in_memory(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impatience, "TAKE_PERIOD_S", 0.5)
    with endless_answer(server, stream=False) as sock:
        assert sock.recv(1)
        eventually(lambda: not server.num_connections)


def test_who_takes_enough_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transport:
        """With so many bytes that wait."""

        waiting_bytes = 500_000
        is_aborted = False

        def get_write_buffer_size(self) -> int:
            return self.waiting_bytes

        def abort(self) -> None:
            self.is_aborted = True

    async def main() -> None:
        protocol = ImpatientProtocol(uvicorn.Config(None, log_config=None), ServerState(), {})  # type: ignore[arg-type]
        protocol.transport = transport = Transport()  # type: ignore[assignment]
        protocol.flow = FlowControl(transport)  # type: ignore[arg-type]
        protocol.pause_writing()
        for _ in range(5):
            transport.waiting_bytes -= impatience.LEAST_TAKEN_BYTES
            protocol._look()
            assert not transport.is_aborted
        protocol.resume_writing()  # all is taken
        assert protocol._next_look is None
        protocol.pause_writing()
        transport.waiting_bytes -= impatience.LEAST_TAKEN_BYTES - 1
        protocol._look()
        assert transport.is_aborted

    asyncio.run(main())

"""Connections that never bring a whole request head."""

from __future__ import annotations

import socket

import httpx
import pytest
from running_server import TIMEOUT_S, RunningServer

from fullbore.server import impatience

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

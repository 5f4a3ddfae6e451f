"""Clients that leave, pipelines that die, servers that stop."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from running_server import TIMEOUT_S, RunningServer, StartServer

from fullbore.errors import ConfigError, EngineDeadError
from fullbore.server import serve as serve_module
from fullbore.server.serve import MOST_FILES, allow_many_connections, bind


def eventually(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextlib.contextmanager
def half_open_request(server: RunningServer, stream: bool):  # type: ignore[no-untyped-def]
    body = json.dumps({"prompt": "x" * 300, "max_tokens": 200, "stream": stream})
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        sock.sendall(f"{head}\r\n\r\n{body}".encode())
        eventually(lambda: server.engine.running)
        yield sock


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: RunningServer, stream: bool) -> None:
    server.engine.token_delay_s = 30
    with half_open_request(server, stream):
        pass
    eventually(lambda: server.engine.aborted == {0})
    assert not server.engine.running
    eventually(lambda: 'fullbore_requests_total{finish_reason="cancelled"} 1.0' in server.get("/metrics").text)


def test_a_client_that_goes_away_in_the_middle_of_a_stream(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.token_delay_s = 0.01
    stream = server.client().completions.create(model="tiny", prompt="x" * 300, max_tokens=200, stream=True)
    assert next(iter(stream)).choices[0].text == "x"
    stream.close()
    eventually(lambda: server.engine.aborted == {0})
    server.request_stop()
    server.join()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # no error of the server


def test_a_client_that_sends_half_a_request_leaves_nothing(server: RunningServer) -> None:
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 100\r\n\r\n{")
        assert server.get("/health").status_code == 200
    assert server.get("/health").status_code == 200
    assert not server.engine.requests


def test_half_a_request_does_not_outlive_the_server(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_module, "CLOSE_TIMEOUT_S", 0)
    server = start_server(shutdown_grace_s=0)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 100\r\n\r\n{")
        assert server.get("/health").status_code == 200  # so it has read the above
        server.request_stop()
        server.join()
        with sock.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert not any(record.exc_info for record in caplog.records)


def test_a_dead_pipeline_is_told_to_everyone(start_server: StartServer) -> None:
    server = start_server()
    server.engine.token_delay_s = 30
    request = {"model": "tiny", "prompt": "abc", "max_tokens": 3}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.client().completions.create, **request)  # type: ignore[arg-type]
        eventually(lambda: server.engine.running)
        server.call(server.engine.die)
        with pytest.raises(openai.InternalServerError) as error:
            waiting.result(TIMEOUT_S)
    assert error.value.status_code == 503
    assert "Stage 1" in error.value.message
    assert server.get("/health").status_code == 503
    assert server.post("/v1/completions", json=request).status_code == 503
    assert server.get("/metrics").status_code == 200
    server.join()
    assert isinstance(server.error, EngineDeadError)
    assert "Stage 1" in str(server.error)


def test_a_pipeline_that_dies_in_the_middle_of_a_stream(start_server: StartServer) -> None:
    server = start_server()
    server.engine.token_delay_s = 0.02
    request = {"prompt": "x" * 300, "max_tokens": 200, "stream": True}
    events = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, response.iter_lines()):
            events.append(line.removeprefix("data: "))
            if len(events) == 3:
                server.call(server.engine.die)
    *_, error, last = events
    assert last == "[DONE]"
    assert json.loads(error)["error"]["code"] == "engine_dead"
    server.join()


def test_the_official_client_raises_for_an_error_in_a_stream(start_server: StartServer) -> None:
    server = start_server()
    server.engine.token_delay_s = 0.02
    stream = server.client().completions.create(model="tiny", prompt="x" * 300, max_tokens=200, stream=True)
    next(iter(stream))
    server.call(server.engine.die)
    with pytest.raises(openai.APIError, match="Stage 1"):
        list(stream)
    server.join()


def test_stopping_lets_running_requests_finish_and_refuses_new_ones(start_server: StartServer) -> None:
    server = start_server(shutdown_grace_s=15)
    server.engine.token_delay_s = 0.01
    stream = server.client().completions.create(model="tiny", prompt="y" * 50, max_tokens=50, stream=True)
    text = next(iter(stream)).choices[0].text
    server.request_stop()
    eventually(lambda: server.state.is_stopping)
    refused = server.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert server.get("/health").status_code == 503
    assert text + "".join(chunk.choices[0].text for chunk in stream) == "y" * 50
    server.join()
    assert server.error is None


def test_stopping_cuts_what_is_left_after_the_grace_period(start_server: StartServer) -> None:
    server = start_server(shutdown_grace_s=0.1)
    server.engine.token_delay_s = 30
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.post, "/v1/completions", json={"prompt": "abc"})
        eventually(lambda: server.engine.running)
        server.request_stop()
        response = waiting.result(TIMEOUT_S)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "shutting_down"
    server.join()
    assert server.error is None


def test_an_idle_keep_alive_connection_does_not_delay_the_end(start_server: StartServer) -> None:
    server = start_server(shutdown_grace_s=15)
    with httpx.Client() as client:
        client.get(f"{server.url}/health")
        server.request_stop()
        server.join()


def test_a_port_in_use_is_a_settings_error() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        first.listen()
        with pytest.raises(ConfigError, match=str(port)):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_a_settings_error() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_the_second_of_two_servers_that_bound_one_port_ends_with_a_settings_error(start_server: StartServer) -> None:
    first = bind("127.0.0.1", 0)
    second = bind("127.0.0.1", first.getsockname()[1])  # possible while neither listens
    start_server(first, shutdown_grace_s=0.2)
    with pytest.raises(ConfigError, match="Cannot listen"):
        start_server(second)


def test_connections_may_be_as_many_as_the_system_lets_them() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    try:
        allow_many_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert hard == limits[1]
    assert soft == (MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))

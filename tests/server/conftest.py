"""Servers for one test each."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import RunningServer, StartServer

from fullbore.config import ServerConfig
from fullbore.server import serve as serve_module


@pytest.fixture
def start_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServer]:
    """Starts servers with the given settings; all have ended when the test has."""
    monkeypatch.setattr(serve_module, "DEATH_NOTICE_S", 0.5)
    servers: list[RunningServer] = []

    def start(sock: socket.socket | None = None, **settings: Any) -> RunningServer:
        servers.append(RunningServer(ServerConfig(port=0, **settings), sock))
        return servers[-1]

    yield start
    for server in servers:
        if server.is_alive:
            server.request_stop()
        server.join()


@pytest.fixture
def server(start_server: StartServer) -> RunningServer:
    return start_server(shutdown_grace_s=0.2)

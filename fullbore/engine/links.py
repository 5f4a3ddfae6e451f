"""The driver's ends of the control plane: messages from and to the client, and from the stages."""

from __future__ import annotations

import time
from collections.abc import Iterator

import zmq

from fullbore.engine import run_dir
from fullbore.engine.grammar import GrammarQueue
from fullbore.engine.messages import (
    FromDriver,
    FromStage,
    ToDriver,
    encode,
    from_stage_decoder,
    to_driver_decoder,
)

MOST_DRAIN_S = 0.005  # taking in what clients send; the rest has its turn after the next launch
POLL_MS = 100  # the most that deadlines, the supervisor's look and a stop may be late


class Links:
    """The driver's sockets to the client and from the stages."""

    def __init__(self, path: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from_client = self._socket(zmq.PULL)
        self._from_client.bind(run_dir.driver_address(path))
        self._to_client = self._socket(zmq.PUSH)
        self._to_client.connect(run_dir.client_address(path))
        self._from_stages = self._socket(zmq.PULL)
        self._from_stages.bind(run_dir.from_stages_address(path))
        self._poller = zmq.Poller()
        self._poller.register(self._from_client, zmq.POLLIN)
        self._poller.register(self._from_stages, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(0)  # bounded by the requests that run; a full queue would only block this loop
        return socket

    def wait_also_for(self, source: GrammarQueue) -> None:
        self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> None:
        self._poller.poll(timeout_ms)

    def client_messages(self) -> Iterator[ToDriver]:
        """What is there, as far as a few milliseconds reach: long prompts and their many choices take a while."""
        end_s = time.monotonic() + MOST_DRAIN_S
        for data in _drain(self._from_client):
            yield to_driver_decoder.decode(data)
            if time.monotonic() > end_s:  # the caller's work on the message included
                return

    def stage_messages(self) -> Iterator[FromStage]:
        for data in _drain(self._from_stages):
            yield from_stage_decoder.decode(data)

    def send(self, message: FromDriver) -> None:
        self._to_client.send(encode(message))

    def close(self) -> None:
        """Closes everything; what was sent to the client gets a second to leave."""
        self.context.destroy(linger=1000)


def _drain(socket: zmq.Socket[bytes], most: int = 256) -> Iterator[bytes]:
    """What is there now, but not without end: launches must not wait for a flood of messages to stop."""
    for _ in range(most):
        try:
            yield socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return

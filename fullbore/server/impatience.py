"""Connections on which no whole request head comes are closed; the server's library waits for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0  # from the connection, or from a later request's first byte, to the end of its head
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for heads. Between requests the library's own limit for idling holds."""

    _deadline: asyncio.TimerHandle | None = None
    _has_begun = False  # something of the head has come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        self._has_begun = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            if self._has_begun:  # to others an answer to nothing would be a riddle
                self.transport.write(_LATE)
            self.transport.close()

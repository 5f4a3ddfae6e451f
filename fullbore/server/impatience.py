"""Connections that get nowhere are closed, where the server's library waits for ever.

No request head comes, or what was sent is not taken.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0  # from the connection, or from a later request's first byte, to the end of its head
TAKE_PERIOD_S = 60.0  # in which a client has to take ...
LEAST_TAKEN_BYTES = 60 * 1024  # ... so much of what waits for it, or all of it
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with time limits. Between requests the library's own limit for idling holds.

    Bodies have theirs where they are read.
    """

    _deadline: asyncio.TimerHandle | None = None
    _has_begun = False  # something of the head has come
    _next_look: asyncio.TimerHandle | None = None  # set: something waits for the client to take it
    _waiting_bytes = 0  # as of the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # `pause_writing` is to be called as soon as the system takes no more.
        transport.set_write_buffer_limits(high=0)
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
        self._stop_looking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._stop_looking()
        super().resume_writing()

    def _look_again(self) -> None:
        self._waiting_bytes = self.transport.get_write_buffer_size()
        self._next_look = self.loop.call_later(TAKE_PERIOD_S, self._look)

    def _look(self) -> None:
        """Is what waits getting less? Whoever writes to this connection waits meanwhile."""
        if self._waiting_bytes - self.transport.get_write_buffer_size() < LEAST_TAKEN_BYTES:
            self.transport.abort()  # `close` would wait until all of it is taken
        else:
            self._look_again()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

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

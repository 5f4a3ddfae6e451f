"""Work on behalf of a client ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fullbore.server.errors import to_api_error
from fullbore.server.state import ServerState, shutting_down

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection.

    Raises:
        ClientDisconnect: the client went away.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait({task, watcher})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one per JSON document; closes the generator whichever way the response ends.

    Nothing is sent before the first document is there, so that an early error still gets its own status. A later one
    becomes the last event, in OpenAI's error form.
    """

    media_type = "text/event-stream"

    def __init__(self, documents: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._documents = documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._documents):
            first = await while_connected(receive, anext(self._documents))
            with suppress(ClientDisconnect):  # it has its status already, and nobody is there to be told another
                await while_connected(receive, self._send_all(first, send))

    async def _send_all(self, first: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_event(send, first.encode())
        try:
            async for document in self._documents:
                await _send_event(send, document.encode())
        except ClientDisconnect:
            raise
        except Exception as error:
            await _send_event(send, bytes(JSONResponse(to_api_error(error).body()).body))
        await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class CutWhenStopping:
    """Ends what a shutdown cannot wait for: clients that never send the rest of their request, or never read.

    The server cancels their tasks when its time is up; those without an answer get 503.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if not self._state.is_stopping:
                raise
            if not has_started:
                await shutting_down().response()(scope, receive, send)


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def document_response(document: BaseModel) -> Response:
    """A JSON document as the whole answer."""
    return Response(document.model_dump_json(), media_type="application/json")

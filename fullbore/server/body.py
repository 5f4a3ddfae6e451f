"""Reads JSON bodies strictly and within limits, before FastAPI validates them field by field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from fullbore.server.errors import ApiError
from fullbore.server.state import get_state

SILENCE_S = 30.0  # a client that sends nothing of its body for so long is given up ...
LEAST_BYTES_PER_S = 16 * 1024  # ... and one that sends less than this, on the whole, after as long

# Parsing keeps the interpreter busy, and with it all other clients: about 0.3 us for each list or object, 0.03 us for
# each item. A smaller body takes no longer than a few milliseconds, whatever is in it.
_SMALL_BODY_BYTES = 128 * 1024
_MOST_CONTAINERS = 100_000
_MOST_STRINGS = 200_000
_MOST_ITEMS = 2_000_000


class JsonRoute(APIRoute):
    """A route whose body is read by `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    """A request that refuses bodies which are too large (413), not declared as JSON (415) or not JSON (400)."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            # Also keeps web pages of other sites out: a browser lets them send JSON only where the server allows it.
            media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise ApiError(415, f"Send the header Content-Type: application/json (got {media_type or 'none'}).")
            self._body = await self._read(get_state(self).config.max_body_bytes)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        return _parse(body) if len(body) < _SMALL_BODY_BYTES else await asyncio.to_thread(_check_and_parse, body)

    async def _read(self, max_bytes: int) -> bytes:
        too_large = ApiError(
            413, f"The body is larger than {max_bytes} bytes (--max-body-bytes); send less.", code="body_too_large"
        )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        chunks: list[bytes] = []
        size, begin_s = 0, time.monotonic()
        stream = self.stream()
        while True:
            ahead_s = begin_s + size / LEAST_BYTES_PER_S - time.monotonic()
            chunk = await _next_chunk(stream, SILENCE_S + min(ahead_s, 0.0))
            if chunk is None:
                return b"".join(chunks)
            size += len(chunk)
            if size > max_bytes:  # a chunked body declares no length
                raise too_large
            chunks.append(chunk)


async def _next_chunk(stream: AsyncIterator[bytes], timeout_s: float) -> bytes | None:
    """None at the end. Raises ApiError when nothing comes for too long."""
    try:
        return await asyncio.wait_for(anext(stream, None), timeout_s)
    except TimeoutError:
        limits = f"at most {SILENCE_S:g} s of silence, and after as long {LEAST_BYTES_PER_S} bytes a second on average"
        raise ApiError(408, f"The body does not come fast enough: {limits}.", code="body_late") from None


def _parse(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error


def _check_and_parse(body: bytes) -> Any:
    if _count_structure(body) > _MOST_CONTAINERS and _is_too_complex(body):
        raise ApiError(413, "The body has too many lists, objects or values; send less.", code="body_too_complex")
    return _parse(body)


def _is_too_complex(body: bytes) -> bool:
    """Counts what is outside of strings, in passes of a few milliseconds each."""
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if without_escapes.count(b'"') > 2 * _MOST_STRINGS:
        return True
    outside = b"".join(without_escapes.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    return num_containers > _MOST_CONTAINERS or _count_structure(outside) > _MOST_ITEMS


def _count_structure(body: bytes) -> int:
    return len(body) - len(body.translate(None, b"[{,:"))

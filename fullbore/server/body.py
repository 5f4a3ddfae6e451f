"""Reads JSON bodies strictly and within limits, before FastAPI validates them field by field."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

from fullbore.server.errors import ApiError
from fullbore.server.state import get_state


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
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error

    async def _read(self, max_bytes: int) -> bytes:
        too_large = ApiError(
            413, f"The body is larger than {max_bytes} bytes (--max-body-bytes); send less.", code="body_too_large"
        )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        chunks, size = [], 0
        async for chunk in self.stream():  # a chunked body declares no length
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)

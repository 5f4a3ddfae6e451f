"""The API key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fullbore.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})


class RequireApiKey:
    """Lets only requests with `Authorization: Bearer KEY` through, and those for pages that say nothing of requests."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(Headers(scope=scope)):
            error = ApiError(
                401, "Missing or wrong API key; send the header Authorization: Bearer KEY.", code="invalid_api_key"
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in constant time: how long it takes tells nothing about the key.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)

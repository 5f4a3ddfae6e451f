"""Each request has an id, which it may bring, and one line in the log when it ends."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fullbore.server.errors import shortened

HEADER = "X-Request-Id"
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})  # asked for all the time

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request being served
access_logger = logging.getLogger("fullbore.access")

_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # what can stand in any log line


class RequestLog:
    """Gives each HTTP request its id, sends it back, and logs the request when it has ended."""

    def __init__(self, app: ASGIApp, is_logging: bool) -> None:
        self._app = app
        self._is_logging = is_logging

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        own_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(own_id)  # this task's context: nothing else sees it
        status = 499  # nobody waited for the answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = own_id
            await send(message)

        start_s = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._is_logging and scope["path"] not in QUIET_PATHS:
                _log(scope, status, time.perf_counter() - start_s)


def _log(scope: Scope, status: int, duration_s: float) -> None:
    path = shortened(scope["path"])
    fields = {"method": scope["method"], "path": path, "status": status, "duration_s": round(duration_s, 4)}
    # The path as JSON: line breaks in it must not look like lines of the log.
    text = f"{fields['method']} {json.dumps(path)} {status} in {duration_s:.3f} s"
    access_logger.info(text, extra={"fields": fields})


class TextFormatter(logging.Formatter):
    """`2026-12-01 12:00:00,000 INFO fullbore.access: POST … [request id]`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        own_id = request_id.get()
        return super().formatMessage(record) + (f" [{own_id}]" if own_id else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what is known beside: request id, fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (own_id := request_id.get()) is not None:
            document["request_id"] = own_id
        document.update(getattr(record, "fields", {}))
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def set_up_logging(log_format: str) -> None:
    """Warnings of all, and the lines about requests, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    access_logger.setLevel(logging.INFO)

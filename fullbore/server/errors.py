"""Every error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fullbore.errors import EngineDeadError, LogitsError, RequestError

MOST_CHARS = 500  # of a message
CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it
logger = logging.getLogger("fullbore.server")


class ApiError(HTTPException):
    """An answer other than 200. `message` is for the client; `param` names the offending field, if one does."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else headers
        super().__init__(status, shortened(message), headers=headers)
        self.param = None if param is None else shortened(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON document that the client gets."""
        return {
            "error": {
                "message": self.detail,
                "type": _error_type(self.status_code),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def shortened(text: str) -> str:
    """A client's own words may be megabytes long; nobody wants them back, or in a log."""
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} …"


def to_api_error(error: Exception) -> ApiError:
    """What the client is told about an exception; anything unforeseen is logged and answered with 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"The engine has stopped: {error}", code="engine_dead")
    if isinstance(error, LogitsError):
        logger.error("A request ended without a next token. %s", error)
        return ApiError(500, str(error), code="logits_not_finite")
    logger.error("Unexpected error while serving a request", exc_info=error)
    return ApiError(500, f"Internal error ({type(error).__name__}); the server's log has the details.")


def install(app: FastAPI) -> None:
    """Makes every error of the app, those of unknown paths and methods included, take OpenAI's shape."""

    async def on_error(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = ApiError(error.status_code, _describe(request, error)).response()
        response.headers.update(error.headers or {})
        return response

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _from_validation(error.errors()).response()

    async def on_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, RequestError, EngineDeadError, LogitsError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(ClientDisconnect, on_disconnect)


def _describe(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"Unknown URL: {request.method} {request.url.path}. The API is described at /docs."
    if error.status_code == 405:
        return f"{request.url.path} does not accept {request.method}. The API is described at /docs."
    return error.detail


def _from_validation(details: Sequence[Any]) -> ApiError:
    """One sentence for the first field that is wrong."""
    if len(details[0]["loc"]) < 2:
        return ApiError(400, "The body must be a JSON object.", code="invalid_json")
    field = details[0]["loc"][1]
    of_field = [detail for detail in details if detail["loc"][1] == field]
    # A field that accepts several types has an entry for each: what got deepest is what the client meant.
    depth = max(len(detail["loc"]) for detail in of_field)
    deepest = [detail for detail in of_field if len(detail["loc"]) == depth]
    param = _path(deepest[0]["loc"])
    if deepest[0]["type"] == "missing":
        return ApiError(400, f"{param} is required.", param)
    reasons = dict.fromkeys(_reason(detail["msg"]) for detail in deepest if _path(detail["loc"]) == param)
    return ApiError(400, f"Invalid value for {param}: {', or '.join(reasons)}.", param)


def _path(location: Sequence[int | str]) -> str:
    """`messages.0.content` from ("body", "messages", 0, "content", "str"): without names of types."""
    parts = (str(part) for part in location[1:] if isinstance(part, int) or (part.isidentifier() and part != "str"))
    return ".".join(parts)


def _reason(message: str) -> str:
    """Pydantic's "Input should be a valid integer" as a part of a sentence: "it should be a valid integer"."""
    message = message.replace("dictionary or object to extract fields from", "object")
    return message.replace("Input should", "it should")


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")

"""The HTTP application: routes, errors, API key, other origins, the log."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from fullbore import __version__
from fullbore.server import chat, completions, dashboard, docs_page, errors, info, timeline, tokens
from fullbore.server.auth import RequireApiKey
from fullbore.server.request_log import HEADER, RequestLog
from fullbore.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application that serves `state`."""
    config = state.config
    app = FastAPI(
        title="fullbore",
        version=__version__,
        description="OpenAI-compatible API of a pipeline-parallel LLM server.",
        docs_url=None,  # FastAPI's pages take their scripts from a CDN
        redoc_url=None,
    )
    app.state.server = state
    errors.install(app)
    for module in (completions, chat, tokens, info, timeline, dashboard, docs_page):
        app.include_router(module.router)
    # The last one added is the first to see a request.
    if config.api_key is not None:
        app.add_middleware(RequireApiKey, api_key=config.api_key)
    if config.allow_origins:  # outside of the key: a browser asks first, without it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", HEADER],
            expose_headers=[HEADER, "Retry-After"],
        )
    app.add_middleware(RequestLog, is_logging=not config.disable_log_requests)
    return app

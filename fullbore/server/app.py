"""The HTTP application: routes, errors, API key."""

from __future__ import annotations

from fastapi import FastAPI

from fullbore import __version__
from fullbore.server import chat, completions, errors, info, timeline
from fullbore.server.auth import RequireApiKey
from fullbore.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application that serves `state`."""
    app = FastAPI(
        title="fullbore",
        version=__version__,
        description="OpenAI-compatible API of a pipeline-parallel LLM server.",
    )
    app.state.server = state
    errors.install(app)
    for module in (completions, chat, info, timeline):
        app.include_router(module.router)
    if state.config.api_key is not None:
        app.add_middleware(RequireApiKey, api_key=state.config.api_key)
    return app

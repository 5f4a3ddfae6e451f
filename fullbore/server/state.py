"""What all handlers share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from fullbore.config import ServerConfig
from fullbore.engine.async_client import AsyncEngineClient
from fullbore.errors import EngineDeadError
from fullbore.server.errors import ApiError
from fullbore.server.metrics import Metrics
from fullbore.text.tokenizer import Tokenizer


@dataclass
class ServerState:
    """One running server."""

    engine: AsyncEngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    metrics: Metrics = field(default_factory=Metrics)
    is_stopping: bool = False  # running requests go on, new ones are refused
    started_unix_s: int = field(default_factory=lambda: int(time.time()))

    def check_admission(self) -> None:
        """Raises ApiError or EngineDeadError when no request can be served now."""
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead.message)
        if self.is_stopping:
            raise shutting_down()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError when a request is for another model."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404, f"The model {name} does not exist; this server has {self.model_name}.", "model", "model_not_found"
            )


def shutting_down() -> ApiError:
    """The answer to what comes, or is not done, when the server ends."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def get_state(request: Request) -> ServerState:
    """The state of the server that got this request."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


State = Annotated[ServerState, Depends(get_state)]

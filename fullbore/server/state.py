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
from fullbore.server.waiting import WaitingRequests
from fullbore.text.tokenizer import Tokenizer
from fullbore.text.tool_formats import HERMES, TOOL_FORMATS, ToolFormat, find_tool_format


@dataclass
class ServerState:
    """One running server."""

    engine: AsyncEngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    metrics: Metrics = field(default_factory=Metrics)
    is_warm: bool = False  # a request has gone all the way once
    is_stopping: bool = False  # running requests go on, new ones are refused
    started_unix_s: int = field(default_factory=lambda: int(time.time()))
    waiting: WaitingRequests = field(init=False)
    tool_format: ToolFormat = field(init=False)  # how the model writes function calls

    def __post_init__(self) -> None:
        self.waiting = WaitingRequests(self.config.max_queued_requests)
        self.tool_format = self._tool_format()

    def _tool_format(self) -> ToolFormat:
        if self.config.tool_call_parser != "auto":
            return TOOL_FORMATS[self.config.tool_call_parser]
        return find_tool_format(self.tokenizer.chat_template) if self.tokenizer.knows_tools else HERMES

    def check_health(self) -> None:
        """Raises ApiError or EngineDeadError when no request can be served any more."""
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead.message)
        if self.is_stopping:
            raise shutting_down()

    def check_admission(self) -> None:
        """Raises ApiError or EngineDeadError when no request can be served now."""
        self.check_health()
        self.waiting.check()

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

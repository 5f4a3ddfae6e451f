"""What the server is and how it is: /health, /ready, /v1/models, /server_info, /metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from fullbore import __version__
from fullbore.engine.messages import EngineStats
from fullbore.errors import EngineDeadError
from fullbore.server.errors import ApiError
from fullbore.server.responses import Model, ModelList
from fullbore.server.state import ServerState, State

STATS_TIMEOUT_S = 2.0
ACCOUNT_TIMEOUT_S = 5.0
SECRETS = frozenset({"api_key"})

router = APIRouter()


@router.get("/health")
async def health(state: State) -> dict[str, str]:
    """200 while requests are served; 503 once the pipeline is dead or the server is shutting down."""
    state.check_health()
    return {"status": "ok"}


@router.get("/ready")
async def ready(state: State) -> dict[str, str]:
    """200 when requests may be sent here: as /health, but only once a first request has gone all the way."""
    state.check_health()
    if not state.is_warm:
        raise ApiError(503, "The server is warming up.", code="warming_up")
    return {"status": "ready"}


@router.get("/v1/models")
async def list_models(state: State) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[_model(state)])


@router.get("/v1/models/{model:path}")
async def get_model(model: str, state: State) -> Model:
    """The model that is served, if that is its name."""
    state.check_model(model)
    return _model(state)


def _model(state: ServerState) -> Model:
    info = state.engine.info
    return Model(id=state.model_name, created=state.started_unix_s, max_model_len=info.context_length)


@router.get("/server_info")
async def server_info(state: State) -> dict[str, Any]:
    """All resolved settings (no secrets), the stages, and the capacity of the KV cache."""
    info = state.engine.info
    stages = [
        {"stage": stage.stage, "layers": list(stage.layers), "device": stage.device, "pid": stage.pid}
        for stage in info.stages
    ]
    server_settings = msgspec.structs.asdict(state.config)
    return {
        "version": __version__,
        **{name: value for name, value in server_settings.items() if name not in SECRETS},
        **msgspec.to_builtins(info.config),
        "served_model_name": state.model_name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "context_length": info.context_length,
        "vocab_size": info.vocab_size,
        "num_kv_blocks": info.num_kv_blocks,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "in_flight_limit": info.in_flight_limit,
        "stages": stages,
    }


@router.get("/metrics", response_class=Response)
async def metrics(state: State) -> Response:
    """Prometheus text format."""
    stats = await _engine_stats(state)
    if stats is not None:
        # What takes too long, or fails, is left out: the other metrics must not wait for it.
        with suppress(TimeoutError, EngineDeadError):
            await asyncio.wait_for(state.metrics.stage_time.update(state.engine), ACCOUNT_TIMEOUT_S)
    return Response(state.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


async def _engine_stats(state: ServerState) -> EngineStats | None:
    # A dead or busy engine must not take the server's own metrics with it.
    try:
        return await asyncio.wait_for(state.engine.stats(), STATS_TIMEOUT_S)
    except (TimeoutError, EngineDeadError):
        return None

"""What happened on the stages: /timeline (records) and /account (seconds by cause)."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from fullbore import __version__
from fullbore.server.state import ServerState, State
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.recording import StageDescription, Timeline
from fullbore.telemetry.report import account_document

Seconds = Annotated[float, Query(ge=0, le=3600, description="How far to look back.")]

router = APIRouter()


@router.get("/timeline", response_class=Response)
async def timeline(
    state: State,
    seconds: Seconds = 10.0,
    since_ns: Annotated[
        int | None, Query(description="Instead of `seconds`: `recording.end_ns` of the timeline before, to go on from.")
    ] = None,
) -> Response:
    """The records of driver and stages, as far as they are remembered; docs/recording-format.md describes them."""
    recording = await state.engine.records(seconds, since_ns)
    # Encoding takes a while for many stages; tokens of others must not wait for it.
    data = await asyncio.to_thread(msgspec.json.encode, describe(state, recording))
    return Response(data, media_type="application/json")


@router.get("/account")
async def get_account(state: State, seconds: Seconds = 10.0) -> dict[str, Any]:
    """Seconds by cause of each stage; on every stage they sum to `window_s`."""
    recording = await state.engine.records(seconds)
    return await asyncio.to_thread(account_document, recording)


def describe(state: ServerState, recording: Recording) -> Timeline:
    """The recording with what it is a recording of."""
    return Timeline(
        fullbore=__version__,
        model=state.model_name,
        stages=[StageDescription(stage.layers, stage.device) for stage in state.engine.info.stages],
        captured_unix_s=time.time(),
        recording=recording,
    )

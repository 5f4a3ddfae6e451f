"""GET /dashboard: what the pipeline does now, on one page that asks /account, /timeline and /metrics every second."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from fullbore.telemetry.report import LOOKS

router = APIRouter(include_in_schema=False)


@router.get("/dashboard")
async def dashboard() -> HTMLResponse:
    """The page. It holds nothing secret; what it shows, it asks for with the key that its user gives."""
    return HTMLResponse(_page())


@cache
def _page() -> str:
    looks = {cause: {"colour": look.page_colour, "meaning": look.meaning} for cause, look in LOOKS.items()}
    text = files("fullbore.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    return text.replace("/*LOOKS*/{}", json.dumps(looks))

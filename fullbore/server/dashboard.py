"""GET /dashboard: what the pipeline does now, on one page that asks /account, /timeline and /metrics every second."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from fullbore.telemetry.report import LOOKS

router = APIRouter(include_in_schema=False)

# Of each cause on white; terminals have their own in telemetry/report.py.
_COLOURS = {
    "compute": "#2a9d4a", "host": "#3cc4c4", "transfer": "#b04cc8", "control": "#e583e0", "no-requests": "#c8c8c8",
    "memory": "#d62f2f", "few-requests": "#3566d4", "packed": "#e0b000", "depth": "#ff6b5e", "uneven": "#f2dc4c",
    "imbalance": "#7aa6ff", "fill-drain": "#8ee0ea",
}  # fmt: skip


@router.get("/dashboard")
async def dashboard() -> HTMLResponse:
    """The page. It holds nothing secret; what it shows, it asks for with the key that its user gives."""
    return HTMLResponse(_page())


@cache
def _page() -> str:
    looks = {cause: {"colour": _COLOURS[cause], "meaning": look.meaning} for cause, look in LOOKS.items()}
    text = files("fullbore.server").joinpath("dashboard.html").read_text(encoding="utf-8")
    return text.replace("/*LOOKS*/{}", json.dumps(looks))

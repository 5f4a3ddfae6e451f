"""The page of /dashboard: that what it asks for exists. (What it looks like is for eyes.)"""

from __future__ import annotations

import re

import httpx
from running_server import RunningServer, StartServer

from fullbore.telemetry.accounting import CAUSES


def test_the_page_asks_for_what_there_is(server: RunningServer) -> None:
    page = server.get("/dashboard").text
    paths = re.findall(r'get\("([^"]+)"\)', page)
    assert len(paths) == 3
    for path in paths:
        assert server.get(f"/{path}").status_code == 200
    metrics = server.get("/metrics").text
    for name in [*re.findall(r'gauge\(metrics, "(\w+)"\)', page), "generated_tokens_total"]:
        assert f"\nfullbore_{name} " in metrics
    timeline = server.get("/timeline").json()
    fields = set(timeline["stage_fields"]) | set(timeline["driver_fields"])
    assert set(re.findall(r'record\("(\w+)"\)', page)) <= fields
    for cause in CAUSES:
        assert f'"{cause}": {{"colour": "#' in page
    assert "http" not in page, "nothing comes from elsewhere"


def test_the_page_is_open_but_what_it_shows_is_not(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    assert httpx.get(f"{server.url}/dashboard").status_code == 200
    assert httpx.get(f"{server.url}/account").status_code == 401

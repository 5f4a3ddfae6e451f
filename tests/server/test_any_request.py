"""Requests of every kind that the OpenAPI document describes, and of kinds that it does not: none is a server error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from running_server import RunningServer

from fullbore.config import ServerConfig

schemathesis = pytest.importorskip("schemathesis")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Cases as the document describes them, and otherwise.
CASES = {
    "/v1/completions": (500, 300),
    "/v1/chat/completions": (500, 300),
    "/tokenize": (150, 100),
    "/detokenize": (150, 100),
}
OTHER_CASES = (60, 40)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = RunningServer(ServerConfig(port=0, shutdown_grace_s=0.2, disable_log_requests=True))
    yield server
    server.request_stop()
    server.join()


def test_no_request_is_a_server_error(server: RunningServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        right, wrong = CASES.get(operation.path, OTHER_CASES)
        try_operation(operation, schemathesis.GenerationMode.POSITIVE, right, seen)
        with suppress(Unsatisfiable):  # nothing can be wrong about it
            try_operation(operation, schemathesis.GenerationMode.NEGATIVE, wrong, seen)
    assert sum(seen.values()) >= 2000, seen
    for path in CASES:
        assert seen[path, 200], f"nothing was right for {path}: {seen}"
        assert seen[path, 400]
    assert not server.engine.running
    assert len(server.state.waiting) == 0
    assert server.get("/health").status_code == 200


def try_operation(
    operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode, most: int, seen: Counter[tuple[str, int]]
) -> None:
    @settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_case(case: schemathesis.Case) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # or hardly any would get further
        response = case.call()
        seen[operation.path, response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code}: {response.text[:500]}\n{case.as_curl_command()}"
        if response.status_code >= 400:
            assert "error" in response.json(), response.text

    try_case()

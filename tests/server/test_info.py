"""/health, /v1/models, /server_info, /metrics, /openapi.json, and the key that guards them."""

from __future__ import annotations

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, StartServer

SECRET = "sk-very-secret"


def test_health(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200


def test_models(server: RunningServer) -> None:
    models = server.client().models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 512


def test_server_info(start_server: StartServer) -> None:
    info = start_server(api_key=SECRET, shutdown_grace_s=0.2).get(
        "/server_info", headers={"Authorization": f"Bearer {SECRET}"}
    )
    assert SECRET not in info.text
    values = info.json()
    assert values["pp_size"] == 2
    assert values["kv_capacity_tokens"] == 1024
    assert values["context_length"] == 512
    assert values["shutdown_grace_s"] == 0.2
    assert values["chunked_prefill_size"] == 512
    assert values["stages"] == [
        {"stage": 0, "layers": [0, 2], "device": "cpu", "pid": 4242},
        {"stage": 1, "layers": [2, 4], "device": "cpu", "pid": 4243},
    ]


def test_metrics(server: RunningServer) -> None:
    server.client().completions.create(model="tiny", prompt="abc", max_tokens=3)
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    assert all(name.startswith("fullbore_") for name in families)
    assert families["fullbore_generated_tokens"].samples[0].value == 11
    assert families["fullbore_kv_blocks_free"].samples[0].value == 64
    busy = families["fullbore_stage_busy_seconds"].samples
    assert {sample.labels["stage"]: sample.value for sample in busy} == {"0": 0.5, "1": 0.25}
    steps = {(s.labels["stage"], s.labels["mode"]): s.value for s in families["fullbore_stage_steps"].samples}
    assert steps == {("0", "graph"): 2, ("0", "eager"): 5, ("1", "graph"): 0, ("1", "eager"): 7}
    counts = {sample.name: sample.value for sample in families["fullbore_inter_token_latency_seconds"].samples}
    assert counts["fullbore_inter_token_latency_seconds_count"] == 2
    ended = families["fullbore_requests"].samples
    assert [(s.labels["finish_reason"], s.value) for s in ended if s.name.endswith("_total")] == [("length", 1)]


def test_two_servers_do_not_share_metrics(start_server: StartServer) -> None:
    first, second = start_server(shutdown_grace_s=0.2), start_server(shutdown_grace_s=0.2)
    first.client().completions.create(model="tiny", prompt="abc", max_tokens=3)
    assert "fullbore_time_to_first_token_seconds_count 1.0" in first.get("/metrics").text
    assert "fullbore_time_to_first_token_seconds_count 0.0" in second.get("/metrics").text


def test_the_api_is_described(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/CompletionRequest")
    assert server.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/metrics", "/docs", "/openapi.json", "/nothing"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {SECRET}", SECRET, "Bearer", f"Bearer {SECRET}x"])
def test_the_key_guards_all(keyed_server: RunningServer, path: str, header: str | None) -> None:
    response = keyed_server.get(path, headers={"Authorization": header} if header else {})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert SECRET not in response.text


def test_the_key_opens(keyed_server: RunningServer) -> None:
    assert keyed_server.get("/health").status_code == 200
    client = openai.OpenAI(base_url=f"{keyed_server.url}/v1", api_key=SECRET, max_retries=0)
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].text == "abc"
    with pytest.raises(openai.AuthenticationError):
        keyed_server.client().models.list()


@pytest.fixture
def keyed_server(start_server: StartServer) -> RunningServer:
    return start_server(api_key=SECRET, shutdown_grace_s=0.2)

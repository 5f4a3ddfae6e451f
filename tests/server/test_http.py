"""What every request gets from the HTTP side, whatever it asks for: ids, logs, keys, origins, limits, readiness."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fullbore_process import eventually
from running_server import TIMEOUT_S, RunningServer, StartServer, says

from fullbore.errors import RequestError
from fullbore.server import body as body_module
from fullbore.server import request_log
from fullbore.server.errors import ApiError
from fullbore.server.request_log import JsonFormatter, TextFormatter
from fullbore.server.waiting import WaitingRequests

ASK = {"prompt": "abc", "max_tokens": 2}


# ------------------------------------------------------------------------------------------------------- ids and logs


def test_a_request_keeps_its_id(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fullbore.access"):
        response = server.post("/v1/completions", json=ASK, headers={"X-Request-Id": "job-7/a"})
        eventually(lambda: caplog.records)
    assert response.headers["x-request-id"] == "job-7/a"
    [record] = caplog.records
    assert record.fields["path"] == "/v1/completions"  # type: ignore[attr-defined]
    assert record.fields["status"] == 200  # type: ignore[attr-defined]
    assert "POST" in record.getMessage()


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "é"])
def test_a_request_without_a_usable_id_gets_one(server: RunningServer, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    ids = {server.get("/nowhere", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)


def test_errors_have_the_id_too(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    assert server.get("/v1/models", headers={"X-Request-Id": "7"}).headers["x-request-id"] == "7"


def test_what_is_asked_all_the_time_is_not_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fullbore.access"):
        for path in ("/health", "/ready", "/metrics"):
            assert server.get(path).status_code == 200
        server.get("/v1/models")
        eventually(lambda: caplog.records)
    assert [record.fields["path"] for record in caplog.records] == ["/v1/models"]  # type: ignore[attr-defined]


def test_requests_need_not_be_logged(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(disable_log_requests=True)
    with caplog.at_level(logging.INFO, "fullbore.access"):
        server.get("/v1/models")
        server.get("/v1/models")
    assert not caplog.records


def test_keys_are_not_logged(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server(api_key="right-key")
    with caplog.at_level(logging.DEBUG):
        for key in ("right-key", "wrong-key"):
            server.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        eventually(lambda: len([record for record in caplog.records if record.name == "fullbore.access"]) == 2)
    own = [record for record in caplog.records if record.name.startswith(("fullbore", "uvicorn"))]
    logged = "\n".join(JsonFormatter().format(record) for record in own)
    assert "right-key" not in logged
    assert "wrong-key" not in logged
    assert "right-key" not in server.get("/server_info", headers={"Authorization": "Bearer right-key"}).text


def record_of(message: str) -> logging.LogRecord:
    return logging.LogRecord("fullbore.server", logging.ERROR, "x.py", 1, message, (), None)


def test_json_log_lines() -> None:
    record = record_of('two\nlines "quoted"')
    record.fields = {"status": 200}
    token = request_log.request_id.set("id-1")
    try:
        line = JsonFormatter().format(record)
        text = TextFormatter().format(record_of("plain"))
    finally:
        request_log.request_id.reset(token)
    assert "\n" not in line
    document = json.loads(line)
    assert document["message"] == 'two\nlines "quoted"'
    assert (document["level"], document["request_id"], document["status"]) == ("ERROR", "id-1", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document["time"])
    assert text.endswith("ERROR fullbore.server: plain [id-1]")


def test_json_log_lines_carry_exceptions() -> None:
    record = record_of("failed")
    try:
        raise ValueError("why")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]


# ---------------------------------------------------------------------------------------------------------- readiness


def test_ready_after_a_first_request_has_gone_all_the_way(server: RunningServer) -> None:
    assert server.get("/ready").json() == {"status": "ready"}
    server.state.is_warm = False
    response = server.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "warming_up"
    assert server.get("/health").status_code == 200


def test_probes_need_no_key(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 200
    assert server.get("/metrics").status_code == 401


# ------------------------------------------------------------------------------------------------------ other origins


def test_pages_of_other_origins_are_refused_unless_allowed(start_server: StartServer) -> None:
    origin = {"Origin": "https://page.example"}
    closed = start_server()
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=origin).headers
    server = start_server(allow_origins=("https://page.example",), api_key="secret")
    answer = server.get("/v1/models", headers={**origin, "Authorization": "Bearer secret"})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert httpx.options(f"{server.url}/v1/completions", headers=asked).status_code == 200
    other = {**asked, "Origin": "https://elsewhere.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{server.url}/v1/completions", headers=other).headers


# ------------------------------------------------------------------------------------------------------------- limits


def test_too_many_waiting_requests_are_told_when_to_try_again(start_server: StartServer) -> None:
    server = start_server(max_queued_requests=2)
    server.engine.token_delay_s = 30
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(server.post, "/v1/completions", json=ASK) for _ in range(2)]
        eventually(lambda: len(server.engine.running) == 2)
        response = server.post("/v1/completions", json=ASK)
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="tiny", prompt="abc")
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        server.request_stop()
        assert [each.result(TIMEOUT_S).status_code for each in waiting] == [503, 503]
    assert len(server.state.waiting) == 0


def test_requests_with_a_token_wait_no_more(start_server: StartServer) -> None:
    server = start_server(max_queued_requests=1)
    server.engine.token_delay_s = 0.01
    stream = server.client().completions.create(model="tiny", prompt="x" * 100, max_tokens=100, stream=True)
    next(iter(stream))
    assert server.post("/v1/completions", json=ASK).status_code == 200
    assert "x" * 50 in "".join(chunk.choices[0].text for chunk in stream)
    assert len(server.state.waiting) == 0


def test_waiting_outputs_enter_all_or_none() -> None:
    waiting = WaitingRequests(3)
    waiting.enter([1, 2])
    with pytest.raises(ApiError) as error:
        waiting.enter([3, 4])
    assert error.value.status_code == 429
    assert len(waiting) == 2
    waiting.enter([3])
    with pytest.raises(ApiError):
        waiting.check()
    for request_id in (1, 2, 3, 3):
        waiting.leave(request_id)
    waiting.enter(range(5))  # more than may wait, but nobody is before them
    assert len(waiting) == 5


def test_a_time_limit_reaches_the_engine(start_server: StartServer) -> None:
    server = start_server(request_timeout_s=60.0)
    for timeout_s in (None, 5.0, 100.0):
        server.post("/v1/completions", json={**ASK, "timeout_s": timeout_s})
    assert [request.timeout_s for request in server.engine.requests] == [60.0, 5.0, 60.0]


def test_a_request_that_takes_too_long_gets_504(server: RunningServer) -> None:
    server.engine.finish_reason = "timeout"
    response = server.post("/v1/completions", json={**ASK, "timeout_s": 5})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    assert "5 s" in response.json()["error"]["message"]


HOSTILE = {
    "deep": b'{"prompt": ' + b"[" * 4_000_000,
    "lists": b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}",
    "nested lists": b'{"prompt": [' + (b"[" * 150 + b"]" * 150 + b",") * 10_000 + b"[]]}",
    "strings": b'{"prompt": [' + b'"a",' * 1_000_000 + b'"a"]}',
    "keys": b"{" + b",".join(b'"%d":1' % key for key in range(300_000)) + b"}",
    "numbers": b'{"prompt": [' + b"1," * 3_000_000 + b"1]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bodies_that_would_take_seconds_to_parse_are_refused(server: RunningServer, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.post("/v1/completions", content=HOSTILE[name], headers=headers)
    assert response.status_code in (400, 413), response.text
    assert response.json()["error"]["code"] in ("invalid_json", "body_too_complex")


def test_a_large_body_of_text_with_many_brackets_is_no_problem(server: RunningServer) -> None:
    text = 'if (a[i] == "{") { b["\\n"] = [1, 2, {x: []}]; }\n' * 20_000
    response = server.post("/tokenize", json={"prompt": text})
    assert response.status_code == 400
    assert "context length" in response.json()["error"]["message"]  # so it was read


def test_a_chunked_body_has_no_more_room(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=1000)

    def chunks() -> object:
        for _ in range(100):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    assert server.post("/v1/completions", content=chunks(), headers=headers).status_code == 413


def test_half_a_body_gets_408(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "SILENCE_S", 0.2)
    with socket.create_connection(server.sock.getsockname(), timeout=TIMEOUT_S) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 100\r\n\r\n{")
        with sock.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_late"


# -------------------------------------------------------------------------------------------------- tokens and models


def test_tokenize_and_back(server: RunningServer) -> None:
    answer = server.post("/tokenize", json={"model": "tiny", "prompt": "aé", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"]) == (3, 512)
    assert answer["tokens"] == server.state.tokenizer.encode("aé")
    assert answer["token_strs"][0] == "a"
    text = server.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "aé"


def test_tokenize_a_conversation(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    server.client().chat.completions.create(model="tiny", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    answer = server.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == server.engine.requests[0].prompt_token_ids
    assert answer["token_strs"] is None
    shorter = server.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] < answer["count"]
    text = server.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "unknown": 1}, "unknown"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_bad_tokenize_requests(server: RunningServer, path: str, body: dict[str, object], param: str) -> None:
    response = server.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_detokenize_nothing(server: RunningServer) -> None:
    assert server.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_one_model(start_server: StartServer) -> None:
    server = start_server()
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("org/other")


def test_the_docs_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    page = server.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "response_format" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_a_refused_grammar_is_a_bad_request(server: RunningServer) -> None:
    server.engine.error = RequestError("The grammar or schema cannot be used: why.", "grammar")
    for stream in (False, True):
        response = server.post("/v1/completions", json={**ASK, "guided_regex": "(", "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "guided_regex"
    assert len(server.state.waiting) == 0


def test_a_grammar_too_complex_to_follow_is_a_bad_request(server: RunningServer) -> None:
    server.engine.finish_reason = "grammar"
    for stream in (False, True):
        response = server.post("/v1/completions", json={**ASK, "guided_regex": "(a|b){9}", "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("grammar_too_complex", "guided_regex")


def test_long_prompts_are_tokenized_beside_the_loop(server: RunningServer) -> None:
    """While one client's text is being tokenized, others are answered."""
    server.engine.reply = says("ok")
    tokenize = server.state.tokenizer.encode
    is_tokenizing = []

    def slowly(text: str, add_special_tokens: bool = True) -> list[int]:
        is_tokenizing.append(True)
        end_s = time.monotonic() + TIMEOUT_S
        while len(is_tokenizing) < 2:  # until another client has been answered
            assert time.monotonic() < end_s
            time.sleep(0.01)
        return tokenize(text, add_special_tokens)

    server.state.tokenizer.encode = slowly  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor() as threads:
            slow = threads.submit(server.post, "/v1/completions", json={**ASK, "prompt": "x" * 300})
            eventually(lambda: is_tokenizing)
            assert server.post("/v1/completions", json={"prompt": [65], "max_tokens": 2}).status_code == 200
            is_tokenizing.append(True)
            assert slow.result(TIMEOUT_S).status_code == 200
    finally:
        del server.state.tokenizer.encode  # type: ignore[method-assign]

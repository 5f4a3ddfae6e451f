"""A request for which the model gives NaN: its client is told, in every form of answer, and nobody else notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import openai
import pytest
from running_server import RunningServer

from fullbore.engine.messages import AddRequest


def fails_after(count: int) -> Callable[[AddRequest], list[int | None]]:
    """The prompt comes back, but after `count` tokens there is none."""
    return lambda request: [*request.prompt_token_ids[:count], None]


def complete(server: RunningServer, **options: Any) -> Any:
    return server.client().completions.create(model="tiny", prompt="abc", **options)


def chat(server: RunningServer, **options: Any) -> Any:
    messages = [{"role": "user", "content": "abc"}]
    return server.client().chat.completions.create(model="tiny", messages=messages, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(("stream", "count"), [(False, 0), (False, 2), (True, 0)])
def test_an_answer_that_has_not_begun_is_an_error(
    server: RunningServer, ask: Callable[..., Any], stream: bool, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.reply = fails_after(count)
    with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError) as caught:
        ask(server, stream=stream)
    assert caught.value.status_code == 500
    assert caught.value.type == "server_error"
    assert caught.value.code == "logits_not_finite"
    assert "not finite" in caught.value.message
    assert "--dtype" in caught.value.message
    assert "not finite" in caplog.text, "whoever runs the server must learn of it too"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_that_has_begun_ends_with_the_error(server: RunningServer, ask: Callable[..., Any]) -> None:
    server.engine.reply = fails_after(3)
    stream = iter(ask(server, stream=True))
    assert next(stream).choices[0].finish_reason is None
    with pytest.raises(openai.APIError, match="not finite"):
        list(stream)


def test_it_is_counted_and_the_next_request_is_served(server: RunningServer) -> None:
    server.engine.reply = fails_after(1)
    with pytest.raises(openai.InternalServerError):
        complete(server)
    server.engine.reply = lambda request: request.prompt_token_ids
    assert complete(server).choices[0].text == "abc"
    metrics = server.get("/metrics").text
    assert 'fullbore_requests_total{finish_reason="error"} 1.0' in metrics
    assert server.get("/health").status_code == 200
    assert server.engine.aborted == set(), "it has ended on the engine already"

"""The load generator against servers whose behaviour is known."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest
from mock_server import MockServer, running
from typer.testing import CliRunner

from fullbore.bench.load import closed_loop, open_loop
from fullbore.bench.measure import Level, measure, server_setup, stage_use
from fullbore.bench.prompts import Prompt, RandomPrompts, calibrated, calibration_texts, read_dataset
from fullbore.bench.report import html_report
from fullbore.bench.sweep import Sweep, calibrate, run
from fullbore.bench.target import BenchError, RequestResult, find_target, new_client
from fullbore.cli import app
from fullbore.errors import ConfigError


async def _sweep(mock: MockServer, **settings: object) -> list[Level]:
    target = await find_target(mock.url, None, None, is_chat=bool(settings.pop("is_chat", False)))
    sweep = Sweep(**{"prompts": RandomPrompts(40, 10), "concurrencies": (2,), "num_requests": 6, **settings})  # type: ignore[arg-type]
    sweep = await calibrate(sweep, target)
    mock.started_s.clear()
    mock.event_s.clear()
    mock.bodies.clear()
    return [level async for level in run(sweep, target, lambda *_: None)]


def sweep(mock: MockServer, **settings: object) -> list[Level]:
    with running(mock):
        return asyncio.run(_sweep(mock, **settings))


def test_tokens_are_the_servers_count_not_events() -> None:
    mock = MockServer(ttft_s=0.01, itl_s=0.002, tokens_per_event=5)
    (level,) = sweep(mock, prompts=RandomPrompts(40, 20), warmup_requests=0)
    assert level.output_tokens_mean == 20
    assert level.prompt_tokens_mean == pytest.approx(40, abs=2), "prompts have the wanted length in the server's tokens"
    assert level.requests == 6
    assert level.errors == 0


@pytest.mark.parametrize("is_chat", [False, True])
def test_chat_and_completions_are_streamed_with_usage(is_chat: bool) -> None:
    mock = MockServer(ttft_s=0.001, itl_s=0.001)
    sweep(mock, is_chat=is_chat)
    for body in mock.bodies:
        assert body["stream"]
        assert body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"]
        assert ("messages" in body) == is_chat


def test_ignore_eos_is_left_out_where_it_is_unknown() -> None:
    mock = MockServer(ttft_s=0.001, itl_s=0.001, knows_ignore_eos=False)
    (level,) = sweep(mock)
    assert level.errors == 0
    assert all("ignore_eos" not in body for body in mock.bodies)


def test_failures_are_counted_and_named() -> None:
    mock = MockServer(ttft_s=0.001, itl_s=0.001)

    async def go() -> list[Level]:
        target = await find_target(mock.url, None, None, is_chat=False)
        mock.bodies.clear()
        mock.fail_every, mock.break_every = 3, 4
        plan = Sweep(prompts=RandomPrompts(10, 4), concurrencies=(1,), num_requests=12, warmup_requests=0)
        return [level async for level in run(plan, target, lambda *_: None)]

    with running(mock):
        (level,) = asyncio.run(go())
    assert level.errors == 4 + 2  # of 12: each third answers 500, of the rest each fourth (4, 8) breaks off
    assert any("out of luck" in message for message in level.error_messages)
    assert any("without [DONE]" in message or "RemoteProtocolError" in message for message in level.error_messages)


def test_a_server_that_dies_gives_failures_and_no_hang() -> None:
    mock = MockServer(ttft_s=0.001, itl_s=0.001)

    async def go() -> list[Level]:
        plan = Sweep(prompts=RandomPrompts(10, 4), concurrencies=(4,), num_requests=40, warmup_requests=0)
        return [level async for level in run(plan, target, lambda *_: None)]

    with running(mock):
        target = asyncio.run(find_target(mock.url, None, None, is_chat=False))
    (level,) = asyncio.run(go())
    assert level.errors == level.requests == 40
    assert level.output_tok_s is None


def test_no_server_and_no_usage_are_explained() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(BenchError, match="No server answers"):
            asyncio.run(find_target(url, None, None, is_chat=False))
    with (
        running(MockServer(ttft_s=0.001, itl_s=0.001, reports_usage=False)) as mock,
        pytest.raises(BenchError, match="usage"),
    ):
        asyncio.run(find_target(mock.url, None, None, is_chat=False))


def test_open_loop_latency_counts_from_when_a_request_was_due() -> None:
    late = RequestResult(due_s=1.0, event_s=[1.5, 1.6], end_s=1.6, prompt_tokens=3, output_tokens=2)
    level = measure([late], concurrency=None, request_rate=2.0)
    assert level.ttft_ms_mean == pytest.approx(500)
    assert level.e2e_ms_mean == pytest.approx(600)


def test_figures_of_given_results() -> None:
    results = [
        RequestResult(0.0, [0.1, 0.2, 0.4], 0.4, prompt_tokens=10, output_tokens=7),
        RequestResult(0.0, [0.3, 0.5], 0.5, prompt_tokens=20, output_tokens=3),
        RequestResult(0.0, [], 1.0, error="no"),
    ]
    level = measure(results, concurrency=2, request_rate=None)
    assert (level.requests, level.errors, level.duration_s) == (3, 1, 1.0)
    assert level.output_tok_s == 10
    assert level.total_tok_s == 40
    assert level.ttft_ms_mean == pytest.approx(200)
    assert level.itl_ms_mean == pytest.approx(1000 * (0.3 + 0.2) / (6 + 2))
    assert level.itl_ms_p99 == pytest.approx(200, rel=0.01)


def test_nothing_measured_is_null() -> None:
    level = measure([], concurrency=1, request_rate=None, is_interrupted=True)
    assert level.output_tok_s is None
    assert level.ttft_ms_mean is None
    assert level.interrupted


def test_random_prompts_share_no_prefix_and_repeat_with_the_seed() -> None:
    first, again, other = (iter(RandomPrompts(50, 5, seed=seed)) for seed in (1, 1, 2))
    texts = [next(first).text for _ in range(20)]
    assert texts == [next(again).text for _ in range(20)]
    assert texts[0] != next(other).text
    assert len({" ".join(text.split()[:8]) for text in texts}) == 20


def test_calibration_gives_the_wanted_length() -> None:
    def tokens(text: str) -> int:
        return 7 + round(1.5 * len(text.split()))

    few, many = (tokens(text) for text in calibration_texts(0))
    prompts = calibrated(RandomPrompts(300, 5), few, many)
    assert tokens(next(iter(prompts)).text) == pytest.approx(300, abs=2)


def test_dataset(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n"two"\n{"prompt": "three", "max_tokens": 9}\n')
    assert read_dataset(path, 5) == [Prompt("one", 3), Prompt("two", 5), Prompt("three", 9)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"text": 1}', "line 1 has no text"),
        ('{"prompt": "a", "output_tokens": 0}', "at least 1"),
    ],
)
def test_broken_datasets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_dataset(path, 5)


def test_a_result_keeps_the_settings_that_it_depends_on() -> None:
    stages = [{"stage": 0, "layers": [0, 5], "device": "cpu"}, {"stage": 1, "layers": [5, 8], "device": "cpu"}]
    info = {"device": "cpu", "pp_size": 2, "stages": stages, "host": "127.0.0.1", "context_length": None}
    assert server_setup(info) == {"device": "cpu", "pp_size": 2, "layers_per_stage": [5, 3]}


def test_stage_use_is_fractions_of_the_window() -> None:
    seconds = {"compute": 2.0, "host": 0.5, "packed": 1.5, "transfer": 0.0}
    (use,) = stage_use({"window_s": 4.0, "stages": [{"stage": 0, "seconds": seconds}]})
    assert use.busy == pytest.approx(0.625)
    assert use.idle == {"packed": pytest.approx(0.375)}


def test_command_writes_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with running(MockServer(ttft_s=0.001, itl_s=0.001)) as mock:
        arguments = [
            "bench",
            "--url",
            mock.url + "/v1",
            "--concurrency",
            "1,3",
            "--input-len",
            "20",
            "--output-len",
            "4",
        ]
        done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    levels = json.loads(path.read_text())
    assert [level["concurrency"] for level in levels] == [1, 3]
    assert all(level["output_tok_s"] > 0 and level["ttft_ms_mean"] > 0 and level["itl_ms_mean"] > 0 for level in levels)
    assert all(len(line) <= 80 for line in done.output.splitlines())
    assert re.search(r"^\s*3 ", done.output, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "a"],
        ["--request-rate", "-1"],
        ["--input-len", "0"],
        ["--json", "/no/x"],
    ],
)
def test_bad_options_are_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ConfigError)


def test_page_is_self_contained() -> None:
    pytest.importorskip("plotly")
    results = [RequestResult(0.0, [0.1, 0.2], 0.2, prompt_tokens=10, output_tokens=2)]
    level = measure(results, concurrency=2, request_rate=None)
    level.stages = stage_use({"stages": [{"stage": 0, "seconds": {"compute": 1.0, "packed": 1.0}}]})
    page = html_report([level], "a title")
    assert "a title" in page
    assert "2: stage 0" in page, "one bar for each stage of each level"
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)


async def _results(mock: MockServer, is_open_loop: bool) -> list[RequestResult]:
    results: list[RequestResult] = []
    target = await find_target(mock.url, None, None, is_chat=False)
    mock.event_s.clear()
    async with new_client(16, 30) as client:
        prompts = iter(RandomPrompts(20, 20))
        if is_open_loop:
            await open_loop(target, client, prompts, 8.0, 16, results.append)
        else:
            await closed_loop(target, client, prompts, 4, 16, results.append)
    return results


def _largest_error(mock: MockServer, results: list[RequestResult]) -> float:
    """Relative error of the worst figure; the truth is what the server noted on the same clock."""
    level = measure(results, concurrency=4, request_rate=None)
    events = mock.event_s
    first_due_s, due_s = min(r.due_s for r in results), sum(r.due_s for r in results)
    truth = {
        "ttft_ms_mean": 1e3 * (sum(sent[0] for sent in events) - due_s) / 16,
        "itl_ms_mean": 1e3 * sum(sent[-1] - sent[0] for sent in events) / (16 * 19),
        "output_tok_s": 16 * 20 / (max(sent[-1] for sent in events) - first_due_s),
    }
    return max(abs(getattr(level, name) / value - 1) for name, value in truth.items())


@pytest.mark.slow
@pytest.mark.parametrize("is_open_loop", [False, True], ids=["closed", "open"])
def test_figures_are_the_servers_own_within_two_percent(is_open_loop: bool) -> None:
    # A busy machine wakes the client late; it cannot make a wrong figure right. So the best of a few runs counts.
    errors = []
    with running(MockServer(ttft_s=0.4, itl_s=0.05)) as mock:
        for _ in range(6):
            errors.append(_largest_error(mock, asyncio.run(_results(mock, is_open_loop))))
            if errors[-1] <= 0.02:
                return
    raise AssertionError(f"relative errors of {len(errors)} runs: {errors}")

"""`fullbore simulate` as a user types it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fullbore import cli, cli_simulate
from fullbore.errors import ConfigError


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(cli.app, ["simulate", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_issue_s_example() -> None:
    line = "--stages 8 --concurrency 16 --input-tokens 64 --output-tokens 64 --stage-ms 10 --driver-ms 2"
    found = figures(*line.split(), "--async-batch-depth", "auto", "--max-micro-batch-size", "auto")
    assert len(found["stage_busy"]) == 8
    assert min(found["stage_busy"]) > 0.98
    assert 190 < found["output_tokens_per_s"] < 205  # decodes alone: 16 per 80 ms
    assert 8 <= found["micro_batches_in_flight_mean"] <= 16
    assert found["itl_s"] == pytest.approx(0.08, rel=0.02)
    assert 0.08 < found["ttft_s"] < 0.2
    assert found["whole_run"]["output_tokens_per_s"] < found["output_tokens_per_s"] * 1.01


def test_depth_and_size_can_be_forced() -> None:
    packed = figures("--stages", "4", "--concurrency", "8", "--micro-batches", "1", "--output-tokens", "200")
    assert packed["requests_per_micro_batch"] == pytest.approx(8, rel=0.05)
    assert max(packed["stage_busy"]) < 0.27
    single = figures("--stages", "4", "--concurrency", "8", "--max-micro-batch-size", "1", "--async-batch-depth", "0")
    assert set(single["micro_batch_sizes"]) == {"1"}
    assert single["micro_batches_in_flight_mean"] <= 4


def test_stages_may_differ() -> None:
    found = figures("--stages", "3", "--stage-ms", "10,10,14", "--concurrency", "12", "--curve", "flat")
    first, second, last = found["stage_busy"]
    assert first / last == pytest.approx(10 / 14, rel=0.01)
    assert second == pytest.approx(first, rel=0.01)


def test_text_has_a_drawing_and_the_figures() -> None:
    result = invoke("--stages", "3", "--concurrency", "6", "--output-tokens", "8")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert sum(line.startswith("stage ") for line in lines) == 3
    assert max(len(line) for line in lines) <= 80
    for word in ("output tokens/s", "TTFT", "ITL", "in flight", "Whole run"):
        assert word in result.stdout


def test_arrivals_at_random_times_are_repeatable() -> None:
    arguments = ("--rate", "20", "--requests", "50", "--output-tokens", "4")
    assert figures(*arguments) == figures(*arguments)
    assert figures(*arguments) != figures(*arguments, "--seed", "1")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--stages", "0"], "--stages must be at least 1"),
        (["--stages", "1000000000"], "--stages must be at most"),
        (["--requests", "1000000000"], "lower --requests"),
        (["--concurrency", "1000000000", "--requests", "4"], "--concurrency must be at most"),
        (["--concurrency", "100000", "--output-tokens", "64"], "lower --requests, --concurrency"),
        (["--input-tokens", "1000000000"], "--input-tokens"),
        (["--output-tokens", "64,1e300"], "--output-tokens"),
        (["--draw-from-ms", "1e308"], "--draw-from-ms must be at least 0"),
        (["--draw-from-ms", "nan"], "--draw-from-ms must be at least 0"),
        (["--draw-ms", "1e-300"], "--draw-ms 0 or at least 0.001"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--stages", "3", "--stage-ms", "1,2"], "--stage-ms gives 2 times"),
        (["--stage-ms", "0"], "--stage-ms must be greater than 0"),
        (["--stage-ms", "ten"], "--stage-ms ten is not a number"),
        (["--input-tokens", "1.5"], "--input-tokens takes whole numbers"),
        (["--output-tokens", "0"], "--output-tokens must be greater than 0"),
        (["--kv-blocks", "3"], "--kv-blocks"),
        (["--driver-ms", "-1"], "--driver-ms must be at least 0"),
        (["--async-batch-depth", "-1"], "--async-batch-depth must be at least 0"),
        (["--rate", "nan"], "--rate must be a positive number"),
        (["--draw-ms", "-1"], "--draw-ms"),
        (["--png", "a.png", "--draw-ms", "0"], "--png"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], part: str) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, ConfigError)
    assert part in str(error)
    assert "\n" not in str(error)


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_simulate, "find_spec", lambda name: None)
    monkeypatch.setattr(cli_simulate, "_run", lambda *_: pytest.fail("ran"))
    error = invoke("--png", "a.png").exception
    assert isinstance(error, ConfigError)
    assert "pip install matplotlib" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_with_matplotlib_a_picture_is_written(tmp_path: Path) -> None:
    result = invoke("--requests", "32", "--output-tokens", "4", "--png", str(tmp_path / "timeline.png"))
    assert result.exit_code == 0
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    error = invoke("--requests", "32", "--output-tokens", "4", "--png", str(tmp_path / "no" / "a.png")).exception
    assert isinstance(error, ConfigError)

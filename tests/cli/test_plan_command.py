"""`fullbore plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fullbore.cli_plan import plan
from fullbore.errors import FullboreError

APP = typer.Typer()
APP.command()(plan)


def run(*words: str) -> str:
    """Standard output; a FullboreError is raised, as `main` would print it."""
    result = CliRunner().invoke(APP, words, catch_exceptions=True)
    if isinstance(result.exception, FullboreError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_reported_case_as_json() -> None:
    rows = json.loads(
        run(
            *("kimi-k2.6", "--hardware", "8x rtx-pro-6000", "--pp", "8", "--tp", "1", "--no-graphs"),
            *(
                "--micro-batches",
                "1",
                "--concurrency",
                "1,8",
                "--input-tokens",
                "1024",
                "--output-tokens",
                "256",
                "--json",
            ),
        )
    )
    assert [row["concurrency"] for row in rows] == [1, 8]
    assert rows[0]["output_tok_s"] == pytest.approx(24.7, rel=0.03)
    assert rows[1]["output_tok_s"] == pytest.approx(95.6, rel=0.15)


def test_one_layout_as_text() -> None:
    text = run(
        "qwen3-30b-a3b", "--hardware", "1x 4090 + 1x 3090", "--pp", "2", "--weights", "int4", "--concurrency", "4"
    )
    for word in ("PP2", "90 %", "stranded", "fullbore serve Qwen/Qwen3-30B-A3B --pp-size 2", "extrapolated"):
        assert word in text


def test_text_fits_a_terminal_but_commands_stay_on_one_line() -> None:
    text = run("qwen3-32b", "--hardware", "2x 4090 + 2x l40s", "--concurrency", "1,256", "--output-tokens", "32")
    commands = [line for line in text.splitlines() if len(line) > 80]
    assert len(commands) == 3
    assert all("--pp-size" in line or "--pipeline-parallel-size" in line for line in commands)


def test_quantised_weights_that_fullbore_cannot_read_are_named() -> None:
    words = ("--hardware", "8x rtx-pro-6000", "--pp", "8", "--concurrency", "1")
    assert "needs SGLang or vLLM" in " ".join(run("kimi-k2.6", *words).replace("\n#", "").split())
    assert "SGLang or vLLM" not in run("qwen3-32b", *words)


def test_search_with_page_and_json(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ("llama-3.1-8b", "--hardware", "2x h100", "--concurrency", "1,8", "--output-tokens", "32", "--json")
    rows = json.loads(run(*words, "--html", str(page)))
    picks = [row for row in rows if row.get("pick")]
    assert len(picks) == 1
    assert set(picks[0]["commands"]) == {"fullbore", "sglang", "vllm"}
    assert "<svg" in page.read_text()


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = json.loads(run(str(tmp_path), "--hardware", "h100", "--pp", "1", "--concurrency", "2", "--json"))
    assert rows[0]["partition"] == [8]


def test_own_hardware(tmp_path: Path) -> None:
    file = tmp_path / "cards.toml"
    file.write_text('hardware = "2x big"\n[device.big]\nlike = "h100"\nmemory_bytes = 300e9\n')
    rows = json.loads(run("llama-3.1-70b", "--hardware", str(file), "--pp", "2", "--concurrency", "2", "--json"))
    assert rows[0]["fits"]


def test_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    words = ("kimi-k2.6", "--hardware", "8x h100", "--pp", "8", "--concurrency", "1,8")
    rows = json.loads(run(*words, "--json"))
    assert [row["fits"] for row in rows] == [False, False]
    assert rows[0]["missing_bytes"] > 1e9
    with pytest.raises(FullboreError, match=r"kimi-k2.6 does not fit as PP8: stage \d needs"):
        run(*words)


def test_calibration_moves_the_prediction_towards_the_measurement(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps([{"concurrency": 1, "output_tok_s": 60.0, "itl_ms_mean": 16.5}]))
    words = ("llama-3.1-8b", "--hardware", "1x rtx-pro-6000", "--pp", "1", "--concurrency", "1", "--json")
    before, after = (json.loads(run(*words, *more))[0] for more in ((), ("--calibrate", str(bench))))
    assert abs(after["output_tok_s"] - 60) < 0.3 * abs(before["output_tok_s"] - 60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing-9b", "--hardware", "h100"), "neither a folder with a config.json nor a known model"),
        (("qwen3-32b", "--hardware", "0x h100"), "asks for 0 devices"),
        (("qwen3-32b", "--hardware", "8x gtx-1"), "Unknown card 'gtx-1'"),
        (("qwen3-32b", "--hardware", "no.toml"), "cannot be read"),
        (("qwen3-32b", "--hardware", "h100", "--pp", "0"), "--pp must be at least 1"),
        (("qwen3-32b", "--hardware", "h100", "--pp", "2"), "needs 2 devices"),
        (("qwen3-32b", "--hardware", "h100", "--concurrency", "0"), "--concurrency must be between 1"),
        (("qwen3-32b", "--hardware", "h100", "--concurrency", "a"), "not a list of whole numbers"),
        (("qwen3-32b", "--hardware", "h100", "--input-tokens", "0"), "--input-tokens must be between 1"),
        (("qwen3-32b", "--hardware", "h100", "--rate", "-1"), "--rate must be a positive number"),
        (("qwen3-32b", "--hardware", "h100", "--prefix-hit-rate", "1"), "less than 1"),
        (("qwen3-32b", "--hardware", "h100", "--as", "vlm"), "did you mean vllm"),
        (("qwen3-32b", "--hardware", "h100", "--kv-dtype", "int2"), "--kv-dtype int2 is unknown"),
        (("qwen3-32b", "--hardware", "h100", "--weights", "int2"), "Weight format 'int2' is unknown"),
        (("qwen3-32b", "--hardware", "h100", "--slo-itl", "0"), "--slo-itl must be a positive"),
        (("qwen3-32b", "--hardware", "h100", "--calibrate", "x.json"), "give its --pp and --tp"),
    ],
)
def test_nonsense_gets_one_helpful_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(FullboreError, match=message) as caught:
        run(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", '{"hidden_size": 5}'])
def test_configs_without_layers_get_one_helpful_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FullboreError) as caught:
        run(str(tmp_path), "--hardware", "h100")
    assert "\n" not in str(caught.value)
    with pytest.raises(FullboreError, match="is missing"):
        run(str(tmp_path / ".."), "--hardware", "h100")

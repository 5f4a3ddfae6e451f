"""The command line without an engine: options, help, errors."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from fullbore import __version__, cli
from fullbore.cli_options import takes_settings
from fullbore.config import EngineConfig, ServerConfig, flag

COMMANDS = [("serve", (EngineConfig, ServerConfig)), ("generate", (EngineConfig,))]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "FULLBORE_API_KEY": ""})


def parse(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig, str]:
    """What `serve` would get for these arguments; with a message instead if they are refused."""
    parsed: list[tuple[EngineConfig, ServerConfig]] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes_settings(EngineConfig, ServerConfig)
    def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
        parsed.append((engine_config, server_config))

    result = CliRunner(env={"FULLBORE_API_KEY": "", **(environment or {})}).invoke(app, arguments)
    return (*parsed[0], "") if parsed else (EngineConfig(), ServerConfig(), result.output)


def test_defaults_are_those_of_the_settings() -> None:
    assert parse([]) == (EngineConfig(), ServerConfig(), "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["org/name"], {"model": "org/name"}),
        (["--pp-size", "3"], {"pp_size": 3}),
        (["--pipeline-parallel-size", "3"], {"pp_size": 3}),
        (["--pp-layer-partition", "17,13"], {"pp_layer_partition": (17, 13)}),
        (["--pp-async-batch-depth", "2"], {"pp_async_batch_depth": 2}),
        (["--pp-async-batch-depth", "auto"], {"pp_async_batch_depth": "auto"}),
        (["--pp-max-micro-batch-size", "8"], {"pp_max_micro_batch_size": 8}),
        (["--dtype", "bfloat16", "--device", "cpu"], {"dtype": "bfloat16", "device": "cpu"}),
        (["--disable-cuda-graph"], {"disable_cuda_graph": True}),
        (["--devices", "cuda:0,cuda:1"], {"devices": ("cuda:0", "cuda:1")}),
        (["--context-length", "100"], {"context_length": 100}),
        (["--stage-timeout-s", "2.5"], {"stage_timeout_s": 2.5}),
    ],
)
def test_options_become_settings(arguments: list[str], expected: dict[str, object]) -> None:
    assert parse(arguments)[0] == msgspec.structs.replace(EngineConfig(), **expected)


def test_server_options_and_key_from_the_environment() -> None:
    arguments = ["--host", "0.0.0.0", "--port", "9", "--served-model-name", "m"]
    server_config = parse(arguments, {"FULLBORE_API_KEY": "k"})[1]
    assert server_config == ServerConfig(host="0.0.0.0", port=9, served_model_name="m", api_key="k")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pp-size", "two"],
        ["--pp-async-batch-depth", "1.5"],
        ["--pp-layer-partition", "17;13"],
        ["--dtype", "int4"],
        ["--no-such-option"],
        ["model", "another"],
    ],
)
def test_nonsense_is_refused_by_name(arguments: list[str]) -> None:
    message = parse(arguments)[2]
    assert arguments[0] in message or arguments[-1] in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("command", "settings"), COMMANDS)
def test_help_has_every_setting_with_its_default_in_80_columns(
    runner: CliRunner, command: str, settings: tuple[type[msgspec.Struct], ...]
) -> None:
    result = runner.invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    entries = [re.sub(r"\s+", " ", entry) for entry in re.split(r"\n  (?=--|MODEL)", result.output)]
    for field in (field for struct in settings for field in msgspec.structs.fields(struct)):
        name = "MODEL" if field.name == "model" else flag(field.name)
        [entry] = [entry for entry in entries if re.match(rf"{name}\b(?!-)", entry)]
        assert len(entry) > len(name) + 20
        if field.default is not None and field.default is not False and field.default != ():
            assert f"[default: {field.default}]" in entry


def test_the_key_is_not_shown_in_help(runner: CliRunner) -> None:
    assert (
        "very-secret" not in runner.invoke(cli.app, ["serve", "--help"], env={"FULLBORE_API_KEY": "very-secret"}).output
    )


def test_version(runner: CliRunner) -> None:
    assert runner.invoke(cli.app, ["--version"]).output == f"fullbore {__version__}\n"


def test_help_needs_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from fullbore import cli\n"
        "assert CliRunner().invoke(cli.app, ['serve', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'zmq', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["serve", "--pp-size", "0"], 2, "--pp-size must be at least 1"),
        (["serve", "--port", "99999"], 2, "--port must be between"),
        (["serve", "--pp-size", "2", "--pp-layer-partition", "1,2,3"], 2, "--pp-layer-partition names 3 stages"),
        (["serve", "--api-key", ""], 2, "--api-key must not be empty"),
        (["serve", "--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["generate", "--prompt", "x", "--temperature", "-1"], 1, "temperature must be between"),
    ],
)
def test_settings_that_cannot_work_are_one_line_on_standard_error(
    arguments: list[str],
    exit_code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fullbore", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fullbore: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err

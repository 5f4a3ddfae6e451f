"""The `fullbore` command: one thin function per verb. Heavy modules are imported by the verb that needs them."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from fullbore import __version__
from fullbore.cli_account import account, record
from fullbore.cli_bench import bench
from fullbore.cli_explain import explain
from fullbore.cli_options import takes_settings
from fullbore.cli_plan import plan
from fullbore.cli_simulate import simulate
from fullbore.cli_source import source
from fullbore.config import EngineConfig, ServerConfig
from fullbore.errors import FullboreError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line; a FullboreError becomes one line on standard error and the error's exit code."""
    try:
        app()
    except FullboreError as error:
        print(f"fullbore: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"fullbore {__version__}")
        raise typer.Exit


@app.callback()
def _fullbore(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pipeline-parallel LLM serving that stays full, and shows where every idle millisecond went when it doesn't."""


@app.command()
@takes_settings(EngineConfig, ServerConfig)
def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve a model with an OpenAI-compatible API."""
    from fullbore.server.command import run

    run(engine_config, server_config)


@app.command()
@takes_settings(EngineConfig)
def generate(
    engine_config: EngineConfig,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt in the model's chat format.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed and prompt: same output.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the output; may be repeated.")] = None,
) -> None:
    """Continue a prompt and print the text as it is generated."""
    from fullbore.llm import LLM
    from fullbore.progress import StartProgress
    from fullbore.scheduler.request import SamplingParams
    from fullbore.text.tokenizer import ChatMessage

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    params.validate()
    with StartProgress() as progress:
        llm = LLM(**msgspec.structs.asdict(engine_config), on_progress=progress.update)
    with llm:
        for text in llm.stream([ChatMessage(role="user", content=prompt)] if chat else prompt, params):
            print(text, end="", flush=True)
        print()


app.command(short_help="Predict a layout's speed, or find the best.")(plan)
app.command(short_help="Try the scheduler on a virtual clock.")(simulate)
app.command(short_help="Say why a pipeline is idle and what helps.")(explain)
app.command(short_help="Measure a server under load.")(bench)
app.command(short_help="Record what a server's stages do.")(record)
app.command(short_help="Show where the stages' time went.")(account)
app.command(short_help="Show what a setting does in the source.", context_settings={"ignore_unknown_options": True})(
    source
)  # FLAG may start with --

"""Command-line options made from the settings structs: each setting is written once, in config.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from fullbore.config import flag

ALIASES = {"pp_size": ["--pipeline-parallel-size"], "tokenizer_path": ["--tokenizer"]}
ENVIRONMENT = {"api_key": "FULLBORE_API_KEY"}
ARGUMENTS = frozenset({"model"})  # given without a flag


def takes_settings(*structs: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates `command(*settings, **own_options)`: on the command line it has one option per field of each struct.

    The decorated function is what typer registers; the command gets one instance of each struct, not yet validated.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            settings = [struct(**{name: values.pop(name) for name in struct.__struct_fields__}) for struct in structs]
            command(*settings, **values)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(structs) :]
        parameters = [parameter for struct in structs for parameter in _parameters(struct)]
        keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in [*own, *parameters]]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
        return run

    return decorate


def _parameters(struct: type[msgspec.Struct]) -> list[inspect.Parameter]:
    hints = get_type_hints(struct, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_annotation(field.name, *get_args(hints[field.name])),
        )
        for field in msgspec.structs.fields(struct)
    ]


def _annotation(name: str, kind: Any, meta: msgspec.Meta) -> Any:
    if name in ARGUMENTS:
        return Annotated[kind, typer.Argument(help=meta.description, metavar=name.upper())]
    names = [flag(name), *ALIASES.get(name, [])]
    options: dict[str, Any] = {"help": meta.description, "envvar": ENVIRONMENT.get(name), "show_envvar": False}
    alternatives = get_args(kind) if get_origin(kind) in (Union, type(int | None)) else (kind,)
    if kind == tuple[str, ...]:
        return Annotated[Any, typer.Option(*names, parser=_texts, metavar="TEXT,TEXT,...", **options)]
    if any(get_origin(each) is tuple for each in alternatives):
        return Annotated[Any, typer.Option(*names, parser=_numbers, metavar="N,N,...", **options)]
    if Literal["auto"] in alternatives:
        return Annotated[Any, typer.Option(*names, parser=_number_or_auto, metavar="N|auto", **options)]
    return Annotated[kind, typer.Option(*names, **options)]


def _texts(text: str | tuple[str, ...]) -> tuple[str, ...]:
    return text if isinstance(text, tuple) else tuple(filter(None, (part.strip() for part in text.split(","))))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 17,13.") from None


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor auto.") from None

"""Errors that a user can act on."""

from __future__ import annotations


class FullboreError(Exception):
    """A problem whose message, one or two sentences, tells the user what is wrong and what to do next.

    Commands print the message alone, without a traceback, and exit with `exit_code`.
    """

    exit_code = 1


class ConfigError(FullboreError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class ModelError(FullboreError):
    """The model cannot be found, read or run (missing file, unsupported architecture, broken checkpoint)."""


class OutOfMemoryError(FullboreError):
    """A stage's weights or the smallest useful KV cache do not fit."""


class RequestError(FullboreError):
    """A request that cannot be served as it is; `param` names the offending field in the API, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(RequestError):
    """A grammar that was compiled, but cannot be followed to an end; no other request ends."""

    def __init__(self) -> None:
        super().__init__(
            "The output cannot follow the grammar or schema any more, which became too complex or which nothing "
            "satisfies; simplify it.",
            "grammar",
        )


class LogitsError(FullboreError):
    """The model's logits for one request are NaN or infinite, so that it has no next token; no other request ends."""

    def __init__(self) -> None:
        super().__init__(
            "The model's logits for this request are not finite, so it cannot go on: the model's weights are broken, "
            "or its activations overflow in this number type; try the engine with --dtype float32 or bfloat16."
        )


class EngineDeadError(FullboreError):
    """The pipeline is gone (a stage died or stopped answering); every waiting request gets this error."""


class RecordingError(FullboreError):
    """A recording that cannot be read or made."""

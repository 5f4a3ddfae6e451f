"""What all documents from clients have in common: nothing is converted silently, nothing dropped."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast

from fullbore.server.errors import ApiError

# Parameters that change nothing about the output: accepted, not used.
HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
# Parameters that would change the output but are not supported: accepted only with a value that asks for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "annotations": ([],),
    # Of chat requests, in requests of other kinds.
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
}
ADVICE = {"best_of": "ask for n outputs with logprobs, and choose among them"}


class _HashableFailFast(FailFast):
    __hash__ = object.__hash__  # a type union needs hashable members


# For lists: with a million wrong items, one error is enough.
FIRST_ERROR = _HashableFailFast()
TokenIds = Annotated[list[int], FIRST_ERROR]


def _tell_that_others_are_refused(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = False


class Strict(BaseModel):
    """No silent conversions (a "12" is not a number), no NaN or Infinity, nothing unknown dropped."""

    # Unknown parameters are allowed here for `refuse_unsupported` to see them.
    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        extra="allow",
        protected_namespaces=(),
        json_schema_extra=_tell_that_others_are_refused,
    )


def refuse_unsupported(extra: dict[str, Any], prefix: str = "") -> None:
    """Raises ApiError for the first parameter that asks for something that would be ignored."""
    for name, value in extra.items():
        if value is None or name in HARMLESS or _asks_for_nothing(name, value):
            continue
        known = "not supported" if name in NEUTRAL_VALUES else "not a known parameter"
        advice = ADVICE.get(name, "leave it out")
        raise ApiError(400, f"{prefix}{name} is {known}; {advice}.", prefix + name, "unsupported_parameter")


def _asks_for_nothing(name: str, value: Any) -> bool:
    # To Python False equals 0, but `"logprobs": 0` asks for something and `"logprobs": false` does not.
    neutral_values = NEUTRAL_VALUES.get(name, ())
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)

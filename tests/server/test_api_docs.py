"""docs/api.md is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullbore.scheduler.request import SamplingParams
from fullbore.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from fullbore.server.strict import HARMLESS, NEUTRAL_VALUES

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
OF_MESSAGES = {"annotations", "tool_calls"}  # of messages, not of requests


@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_every_parameter_is_in_the_table(request_type: type[GenerationRequest]) -> None:
    names = {field.alias or name for name, field in request_type.model_fields.items()} | HARMLESS | set(NEUTRAL_VALUES)
    missing = {name for name in names - OF_MESSAGES if f"`{name}" not in TEXT and not name.startswith("guided_")}
    assert not missing


def test_the_python_api_has_the_same_names() -> None:
    names = set(SamplingParams.__struct_fields__)
    of_requests = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert names - of_requests == {"prompt_logprobs", "grammar"}

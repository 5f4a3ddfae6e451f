"""The documents that clients get, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


_omitted_if_none = Field(exclude_if=lambda value: value is None)


def header(prefix: str, model_name: str) -> dict[str, Any]:
    """The fields that a document has in common with all chunks of its stream."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}


class _Document(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class PromptTokensDetails(_Document):
    cached_tokens: int


class Usage(_Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Document):
    """Lists of one length, an element for each token; the first token of a prompt has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # in characters, from the beginning of the choice's text


class CompletionChoice(_Document):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class Completion(_Document):
    """Also the chunk of a stream: then with the text that is new, and usage only in the last one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(_Document):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Document):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(_Document):
    name: str
    arguments: str  # a JSON object; the model may have left it unfinished


class ToolCall(_Document):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_Document):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall] | None, _omitted_if_none] = None


class ChatChoice(_Document):
    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(_Document):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(_Document):
    name: Annotated[str | None, _omitted_if_none] = None
    arguments: str  # what is new


class ToolCallDelta(_Document):
    """The first one of a call has its id, type and name."""

    index: int
    id: Annotated[str | None, _omitted_if_none] = None
    type: Annotated[Literal["function"] | None, _omitted_if_none] = None
    function: FunctionDelta


class Delta(_Document):
    role: Annotated[Literal["assistant"] | None, _omitted_if_none] = None
    content: Annotated[str | None, _omitted_if_none] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, _omitted_if_none] = None


class ChatChunkChoice(_Document):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_Document):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(_Document):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fullbore"
    max_model_len: int


class ModelList(_Document):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(_Document):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Document):
    prompt: str

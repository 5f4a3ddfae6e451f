"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from fullbore.errors import RequestError
from fullbore.server.body import JsonRoute
from fullbore.server.connection import EventStream, document_response, while_connected
from fullbore.server.generation import Generation
from fullbore.server.protocol import ChatCompletionRequest
from fullbore.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    header,
)
from fullbore.server.state import ServerState, State
from fullbore.text.requests import encode_chat

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}})
async def create_chat_completion(body: ChatCompletionRequest, request: Request, state: State) -> Response:
    """Answers the last message of a conversation."""
    state.check_admission()
    state.check_model(body.model)
    body.check()
    try:
        generation = await _start(body, state)
    except RequestError as error:
        raise RequestError(str(error), body.name_of_param(error.param)) from error
    if body.stream:
        return EventStream(_chunks(generation, state.model_name, body.include_usage))
    return document_response(await while_connected(request.receive, _whole(generation, state.model_name)))


async def _start(body: ChatCompletionRequest, state: ServerState) -> Generation:
    params = body.sampling_params(body.output_limit)
    token_ids = await asyncio.to_thread(encode_chat, state.tokenizer, body.conversation(), state.engine.info)
    return Generation(state, token_ids, params)


async def _whole(generation: Generation, model_name: str) -> ChatCompletion:
    message = AssistantMessage(content=await generation.text())
    choice = ChatChoice(message=message, finish_reason=generation.finish_reason)
    return ChatCompletion(**header("chatcmpl", model_name), choices=[choice], usage=generation.usage)


async def _chunks(generation: Generation, model_name: str, include_usage: bool) -> AsyncGenerator[str, None]:
    fields = header("chatcmpl", model_name)
    role: Literal["assistant"] | None = "assistant"  # in the first chunk only
    async with aclosing(generation.pieces()) as pieces:
        async for text in pieces:
            choice = ChatChunkChoice(delta=Delta(role=role, content=text), finish_reason=None)
            yield ChatCompletionChunk(**fields, choices=[choice]).model_dump_json()
            role = None
    choice = ChatChunkChoice(delta=Delta(role=role), finish_reason=generation.finish_reason)
    yield ChatCompletionChunk(**fields, choices=[choice]).model_dump_json()
    if include_usage:
        yield ChatCompletionChunk(**fields, choices=[], usage=generation.usage).model_dump_json()

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
from fullbore.server.generation import Choice, Generation
from fullbore.server.logprobs import chat_logprobs
from fullbore.server.protocol import ChatCompletionRequest
from fullbore.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
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
    answer = _Answer(body, state, generation)
    if body.stream:
        return EventStream(answer.chunks())
    return document_response(await while_connected(request.receive, answer.whole()))


async def _start(body: ChatCompletionRequest, state: ServerState) -> Generation:
    params = body.sampling_params(body.output_limit, body.num_logprobs)
    token_ids = await asyncio.to_thread(encode_chat, state.tokenizer, body.conversation(), state.engine.info)
    return Generation(state, [token_ids], params)


class _Answer:
    """The choices of one request as OpenAI's documents."""

    def __init__(self, body: ChatCompletionRequest, state: ServerState, generation: Generation) -> None:
        self._body = body
        self._tokenizer = state.tokenizer
        self._generation = generation
        self._header = header("chatcmpl", state.model_name)

    async def whole(self) -> ChatCompletion:
        await self._generation.run()
        choices = [
            ChatChoice(
                index=choice.index,
                message=AssistantMessage(content=choice.text),
                logprobs=self._logprobs(choice, slice(None)),
                finish_reason=choice.finish_reason,
            )
            for choice in self._generation.choices
        ]
        return ChatCompletion(**self._header, choices=choices, usage=self._generation.usage)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The documents of a stream."""
        begun: set[int] = set()  # choices that had their first chunk, the only one with a role
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                role: Literal["assistant"] | None = None if piece.index in begun else "assistant"
                begun.add(piece.index)
                choice = ChatChunkChoice(
                    index=piece.index,
                    delta=Delta(role=role, content=piece.text or None),
                    logprobs=self._logprobs(self._generation.choices[piece.index], piece.tokens),
                    finish_reason=piece.finish_reason,
                )
                yield ChatCompletionChunk(**self._header, choices=[choice]).model_dump_json()
        if self._body.include_usage:
            usage = self._generation.usage
            yield ChatCompletionChunk(**self._header, choices=[], usage=usage).model_dump_json()

    def _logprobs(self, choice: Choice, tokens: slice) -> ChatLogprobs | None:
        num_top = self._body.num_logprobs
        if num_top is None or not choice.token_ids[tokens]:
            return None
        return chat_logprobs(self._tokenizer, choice.token_ids[tokens], choice.logprobs[tokens], num_top)

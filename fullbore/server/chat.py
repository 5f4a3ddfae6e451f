"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from fullbore.errors import RequestError
from fullbore.server.body import JsonRoute
from fullbore.server.calls import CallReader
from fullbore.server.connection import EventStream, document_response, while_connected
from fullbore.server.generation import Choice, Generation, Piece
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
    FinishReason,
    header,
)
from fullbore.server.state import ServerState, State
from fullbore.text.requests import encode_chat
from fullbore.text.tools import forced_format

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
    params = body.sampling_params(
        body.output_limit, body.num_logprobs, call_grammar=body.call_grammar(state.tool_format)
    )
    messages, tools = body.conversation(), body.offered_tools()
    token_ids = await asyncio.to_thread(encode_chat, state.tokenizer, messages, state.engine.info, tools)
    decode = state.tokenizer.decoder_that_keeps(state.tool_format.markers) if tools else None
    return Generation(state, [token_ids], params, body, decode)


class _Answer:
    """The choices of one request as OpenAI's documents."""

    def __init__(self, body: ChatCompletionRequest, state: ServerState, generation: Generation) -> None:
        self._body = body
        self._tokenizer = state.tokenizer
        self._generation = generation
        self._header = header("chatcmpl", state.model_name)
        tools, required = body.offered_tools(), body.required_tools()
        names = frozenset(tool.name for tool in required or tools)
        tool_format = forced_format(state.tool_format) if required else state.tool_format
        self._readers = [CallReader(tool_format, names) if tools else None for _ in generation.choices]

    async def whole(self) -> ChatCompletion:
        await self._generation.run()
        # In a thread, since log-probabilities may be many.
        choices = [await asyncio.to_thread(self._choice, choice) for choice in self._generation.choices]
        return ChatCompletion(**self._header, choices=choices, usage=self._generation.usage)

    def _choice(self, choice: Choice) -> ChatChoice:
        message, reason = AssistantMessage(content=choice.text), choice.finish_reason
        reader = self._readers[choice.index]
        if reader is not None:
            reader.push(choice.text, is_end=True)
            calls = reader.calls or None
            message = AssistantMessage(content=reader.content or (None if calls else ""), tool_calls=calls)
            reason = reader.finish_reason(reason)
        logprobs = self._logprobs(choice, slice(None))
        return ChatChoice(index=choice.index, message=message, logprobs=logprobs, finish_reason=reason)

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The documents of a stream."""
        begun: set[int] = set()  # choices that had their first chunk, the only one with a role
        num_told = [0] * len(self._generation.choices)  # tokens that the chunks so far are about
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                delta, reason = self._delta(piece)
                if not (delta.content or delta.tool_calls or reason):
                    continue  # held back: it may be the beginning of a call
                if piece.index not in begun:
                    delta.role = "assistant"
                    begun.add(piece.index)
                tokens = slice(num_told[piece.index], piece.tokens.stop)
                num_told[piece.index] = piece.tokens.stop
                choice = ChatChunkChoice(
                    index=piece.index,
                    delta=delta,
                    logprobs=self._logprobs(self._generation.choices[piece.index], tokens),
                    finish_reason=reason,
                )
                usage = self._generation.usage if self._body.wants_continuous_usage else None
                yield ChatCompletionChunk(**self._header, choices=[choice], usage=usage).model_dump_json()
        if self._body.include_usage:
            usage = self._generation.usage
            yield ChatCompletionChunk(**self._header, choices=[], usage=usage).model_dump_json()

    def _delta(self, piece: Piece) -> tuple[Delta, FinishReason | None]:
        reader = self._readers[piece.index]
        if reader is None:
            return Delta(content=piece.text or None), piece.finish_reason
        content, calls = reader.push(piece.text, is_end=piece.finish_reason is not None)
        return Delta(content=content or None, tool_calls=calls or None), reader.finish_reason(piece.finish_reason)

    def _logprobs(self, choice: Choice, tokens: slice) -> ChatLogprobs | None:
        num_top = self._body.num_logprobs
        if num_top is None or not choice.token_ids[tokens]:
            return None
        return chat_logprobs(self._tokenizer, choice.token_ids[tokens], choice.logprobs[tokens], num_top)

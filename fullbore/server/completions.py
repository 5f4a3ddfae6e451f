"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from fullbore.server.body import JsonRoute
from fullbore.server.connection import EventStream, document_response, while_connected
from fullbore.server.generation import Generation
from fullbore.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from fullbore.server.responses import Completion, CompletionChoice, header
from fullbore.server.state import ServerState, State
from fullbore.text.requests import encode_text

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses={200: {"model": Completion}})
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continues a text."""
    state.check_admission()
    state.check_model(body.model)
    body.check()
    generation = await _start(body, state)
    if body.stream:
        return EventStream(_chunks(generation, state.model_name, body.include_usage))
    return document_response(await while_connected(request.receive, _whole(generation, state.model_name)))


async def _start(body: CompletionRequest, state: ServerState) -> Generation:
    prompt = body.single_prompt()
    if isinstance(prompt, str):
        prompt = await asyncio.to_thread(encode_text, state.tokenizer, prompt, state.engine.info)
    max_tokens = body.max_tokens
    if max_tokens is None:  # the default never makes a prompt too long
        room = state.engine.info.context_length - len(prompt)
        max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, room))
    return Generation(state, prompt, body.sampling_params(max_tokens))


async def _whole(generation: Generation, model_name: str) -> Completion:
    choice = CompletionChoice(text=await generation.text(), finish_reason=generation.finish_reason)
    return Completion(**header("cmpl", model_name), choices=[choice], usage=generation.usage)


async def _chunks(generation: Generation, model_name: str, include_usage: bool) -> AsyncGenerator[str, None]:
    fields = header("cmpl", model_name)
    async with aclosing(generation.pieces()) as pieces:
        async for text in pieces:
            choice = CompletionChoice(text=text, finish_reason=None)
            yield Completion(**fields, choices=[choice]).model_dump_json()
    choice = CompletionChoice(text="", finish_reason=generation.finish_reason)
    yield Completion(**fields, choices=[choice]).model_dump_json()
    if include_usage:
        yield Completion(**fields, choices=[], usage=generation.usage).model_dump_json()

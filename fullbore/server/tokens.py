"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from fullbore.server.body import JsonRoute
from fullbore.server.connection import document_response
from fullbore.server.errors import ApiError
from fullbore.server.functions import OffersTools
from fullbore.server.messages import Message, conversation
from fullbore.server.responses import Detokenized, Tokenized
from fullbore.server.state import ServerState, State
from fullbore.server.strict import FIRST_ERROR, Strict, TokenIds, refuse_unsupported
from fullbore.text.requests import encode_text, format_chat

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(OffersTools):
    """A text, or a conversation."""

    model: str | None = None
    prompt: Annotated[str | None, Field(description="A text. Give it, or messages.")] = None
    messages: Annotated[
        Annotated[list[Message], FIRST_ERROR] | None, Field(description="A conversation, as in chat completions.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Add what the model wants at the start. Default: to a prompt only.")
    ] = None
    add_generation_prompt: Annotated[bool, Field(description="End a conversation where the answer starts.")] = True
    return_token_strs: Annotated[bool, Field(description="Also each token as the vocabulary writes it.")] = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[TokenIds, Field(description="Token ids.")]


@router.post("/tokenize", responses={200: {"model": Tokenized}})
async def tokenize(body: TokenizeRequest, state: State) -> Response:
    """The token ids of a text, or of a conversation as the model gets it."""
    state.check_model(body.model)
    refuse_unsupported(body.model_extra or {})
    body.check_tools()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", "prompt")
    # In a thread: tokens on their way to clients must not wait for it.
    return await asyncio.to_thread(_tokenize, body, state)


def _tokenize(body: TokenizeRequest, state: ServerState) -> Response:
    tokenizer, info = state.tokenizer, state.engine.info
    text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    if body.messages is not None:
        messages, tools = conversation(body.messages), body.offered_tools()
        text = format_chat(tokenizer, messages, tools, add_generation_prompt=body.add_generation_prompt)
        add_special_tokens = bool(body.add_special_tokens)
    token_ids = encode_text(tokenizer, text or "", info, add_special_tokens)
    document = Tokenized(
        count=len(token_ids),
        max_model_len=info.context_length,
        tokens=token_ids,
        token_strs=tokenizer.tokens(token_ids) if body.return_token_strs else None,
    )
    return document_response(document)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: State) -> Detokenized:
    """The text of token ids, special tokens included."""
    state.check_model(body.model)
    refuse_unsupported(body.model_extra or {})
    vocab_size = state.engine.info.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
        raise ApiError(400, f"tokens must be between 0 and {vocab_size - 1}.", "tokens")
    return Detokenized(prompt=await asyncio.to_thread(state.tokenizer.decode_all, body.tokens))

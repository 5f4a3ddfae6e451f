"""One request through the whole path before the server calls itself ready: template, tokenizer, engine, text."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from fullbore.errors import EngineDeadError, RequestError
from fullbore.scheduler.request import SamplingParams
from fullbore.server.state import ServerState
from fullbore.text.requests import encode_chat, encode_text, make_request
from fullbore.text.tokenizer import ChatMessage

_TEXT = "Hello"
_NUM_TOKENS = 2  # one from the prompt, one decoded


async def warm_up(state: ServerState) -> None:
    """Sets `is_warm` once a first answer is there. When the pipeline dies meanwhile, whoever serves notices."""
    info, tokenizer = state.engine.info, state.tokenizer
    try:
        if tokenizer.has_chat_template:
            messages = [ChatMessage(role="user", content=_TEXT)]
            prompt = await asyncio.to_thread(encode_chat, tokenizer, messages, info)
        else:
            prompt = await asyncio.to_thread(encode_text, tokenizer, _TEXT, info)
        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0, ignore_eos=True)
        request = make_request(state.engine.next_request_id(), prompt, params, info)
        async with aclosing(state.engine.generate(request)) as outputs:
            tokenizer.decode([output.token_id async for output in outputs if output.token_id is not None])
    except RequestError:
        pass  # a template that wants more than one message, or next to no room: not every request can be served
    except EngineDeadError:
        return
    state.is_warm = True

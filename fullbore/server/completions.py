"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from fullbore.errors import RequestError
from fullbore.server.body import JsonRoute
from fullbore.server.connection import EventStream, document_response, while_connected
from fullbore.server.generation import Choice, Generation
from fullbore.server.logprobs import CompletionLogprobsWriter
from fullbore.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from fullbore.server.responses import Completion, CompletionChoice, CompletionLogprobs, FinishReason, Usage, header
from fullbore.server.state import ServerState, State
from fullbore.text.requests import encode_text

MAX_ECHOED_LOGPROBS = 1_000_000  # in one answer: some 100 MB while it is put together

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses={200: {"model": Completion}})
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continues a text, or several."""
    state.check_admission()
    state.check_model(body.model)
    body.check()
    answer = await _Answer.start(body, state)
    if body.stream:
        return EventStream(answer.chunks())
    return document_response(await while_connected(request.receive, answer.whole()))


class _Answer:
    """The choices of one request and, with `echo`, the prompts before them."""

    def __init__(
        self, body: CompletionRequest, state: ServerState, prompts: list[list[int]], texts: list[str | None]
    ) -> None:
        """`texts`: the prompts' own; None for those that came as token ids."""
        self._body = body
        self._header = header("cmpl", state.model_name)
        params = body.sampling_params(_max_tokens(body, state, prompts), body.logprobs, body.prompt_logprobs)
        if body.prompt_logprobs is not None:
            _check_size(sum(map(len, prompts)) * params.n * (1 + body.prompt_logprobs))
        self._generation = Generation(state, prompts, params, body)
        if body.echo:  # what does not exist was refused above
            pairs = zip(prompts, texts, strict=True)
            self._texts = [state.tokenizer.decode(prompt) if text is None else text for prompt, text in pairs]
        self._writers = [CompletionLogprobsWriter(state.tokenizer) for _ in self._generation.choices]

    @classmethod
    async def start(cls, body: CompletionRequest, state: ServerState) -> _Answer:
        prompts: list[list[int]] = []
        texts: list[str | None] = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                prompts.append(await asyncio.to_thread(encode_text, state.tokenizer, prompt, state.engine.info))
                texts.append(prompt)
            else:
                prompts.append(prompt)
                texts.append(None)
        return cls(body, state, prompts, texts)

    async def whole(self) -> Completion:
        await self._generation.run()
        choices = []
        for choice in self._generation.choices:
            beginning = await asyncio.to_thread(self._beginning, choice) if self._body.echo else None
            if self._body.is_prompt_only:
                whole = _nothing(choice)
            else:  # in a thread, since log-probabilities may be many
                whole = await asyncio.to_thread(self._part, choice, choice.text, slice(None), choice.finish_reason)
            choices.append(whole if beginning is None else _joined(beginning, whole))
        return Completion(**self._header, choices=choices, usage=self._usage())

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The documents of a stream."""
        begun: set[int] = set()
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                choice = self._generation.choices[piece.index]
                if self._body.echo and piece.index not in begun:
                    begun.add(piece.index)
                    yield self._document([await asyncio.to_thread(self._beginning, choice)])
                if not self._body.is_prompt_only:
                    yield self._document([self._part(choice, piece.text, piece.tokens, piece.finish_reason)])
                elif piece.finish_reason is not None:
                    yield self._document([_nothing(choice)])
        if self._body.include_usage:
            yield self._document([], self._usage())

    def _beginning(self, choice: Choice) -> CompletionChoice:
        """The echoed prompt, in a thread, since it may be long.

        Its log-probabilities come with the first choice, whose tokens come before the others'.
        """
        prompt, number = divmod(choice.index, self._generation.n)
        found = self._generation.choices[choice.index - number].output.prompt_logprobs
        logprobs = None
        if found is not None:
            logprobs = self._writers[choice.index].write(choice.request.prompt_token_ids, found)
        return CompletionChoice(index=choice.index, text=self._texts[prompt], logprobs=logprobs, finish_reason=None)

    def _part(
        self, choice: Choice, text: str, tokens: slice, finish_reason: FinishReason | None = None
    ) -> CompletionChoice:
        """Some of the output."""
        logprobs = None
        if self._body.logprobs is not None and choice.token_ids[tokens]:
            logprobs = self._writers[choice.index].write(choice.token_ids[tokens], choice.logprobs[tokens])
        return CompletionChoice(index=choice.index, text=text, logprobs=logprobs, finish_reason=finish_reason)

    def _document(self, choices: list[CompletionChoice], usage: Usage | None = None) -> str:
        if self._body.wants_continuous_usage:
            usage = self._usage()
        return Completion(**self._header, choices=choices, usage=usage).model_dump_json()

    def _usage(self) -> Usage:
        usage = self._generation.usage
        if self._body.is_prompt_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage


def _max_tokens(body: CompletionRequest, state: ServerState, prompts: list[list[int]]) -> int:
    if body.is_prompt_only:
        return 1  # the engine gives one at least, which is not shown
    if body.max_tokens is not None:
        return body.max_tokens
    # The default never makes a prompt too long.
    room = state.engine.info.context_length - max(map(len, prompts))
    return max(1, min(DEFAULT_COMPLETION_TOKENS, room))


def _check_size(num_logprobs: int) -> None:
    """Of echoed prompts, which the engine computes once, but the answer has once for each choice."""
    if num_logprobs > MAX_ECHOED_LOGPROBS:
        raise RequestError(
            f"echo with logprobs asks for {num_logprobs} log-probabilities of prompts in one answer; at most "
            f"{MAX_ECHOED_LOGPROBS} are allowed: ask for fewer prompts, a smaller n or fewer logprobs.",
            "logprobs",
        )


def _nothing(choice: Choice) -> CompletionChoice:
    """An output of no tokens, as if it had ended at once."""
    return CompletionChoice(index=choice.index, text="", finish_reason="length")


def _joined(beginning: CompletionChoice, rest: CompletionChoice) -> CompletionChoice:
    """A prompt and its output in one."""
    logprobs = rest.logprobs or beginning.logprobs
    if beginning.logprobs is not None and rest.logprobs is not None:
        first, second = beginning.logprobs, rest.logprobs
        logprobs = CompletionLogprobs(
            tokens=first.tokens + second.tokens,
            token_logprobs=first.token_logprobs + second.token_logprobs,
            top_logprobs=first.top_logprobs + second.top_logprobs,
            text_offset=first.text_offset + second.text_offset,
        )
    return rest.model_copy(update={"text": beginning.text + rest.text, "logprobs": logprobs})

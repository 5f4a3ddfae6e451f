"""One HTTP request's outputs, from checked prompts to the last piece of text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fullbore.engine.messages import AddRequest
from fullbore.errors import GrammarError, LogitsError, RequestError
from fullbore.scheduler.logprobs import TokenLogprob
from fullbore.scheduler.request import SamplingParams, TokenOutput
from fullbore.server.errors import ApiError
from fullbore.server.protocol import GenerationRequest
from fullbore.server.responses import FinishReason, PromptTokensDetails, Usage
from fullbore.server.state import ServerState
from fullbore.text.output import OutputText
from fullbore.text.requests import make_requests

MAX_OUTPUTS = 1024  # of one HTTP request: prompts times n


@dataclass(frozen=True)
class Piece:
    """What is new of one choice. The last one of each choice has no text but its finish reason."""

    index: int
    text: str
    tokens: slice  # those of the choice whose text this is, or that came after the text's end
    finish_reason: FinishReason | None = None


@dataclass
class Choice:
    """One output: the prompt's number k has the choices from k * n on."""

    index: int
    request: AddRequest
    output: OutputText
    texts: list[str] = field(default_factory=list)
    num_tokens_told: int = 0  # that pieces have covered

    @property
    def text(self) -> str:
        """So far, as far as it is certain."""
        return "".join(self.texts)

    @property
    def token_ids(self) -> list[int]:
        return self.output.token_ids

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One for each token, if the request asked for them."""
        return self.output.logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """How the output ended. Raises LogitsError or ApiError where it was cut."""
        reason = self.output.finish_reason
        if reason == "stop" or reason == "length":
            return reason
        if reason == "error":
            raise LogitsError
        if reason == "timeout":
            limit = f"{self.request.timeout_s:g} s (timeout_s, --request-timeout-s)"
            raise ApiError(504, f"The request took longer than {limit}.", code="timeout")
        raise ApiError(503, "The output was cut because the server is shutting down.", code="shutting_down")

    def piece(self, text: str, finish_reason: FinishReason | None = None) -> Piece:
        """The next piece, which covers all tokens that no piece has covered."""
        start, self.num_tokens_told = self.num_tokens_told, len(self.token_ids)
        return Piece(self.index, text, slice(start, self.num_tokens_told), finish_reason)


class Generation:
    """Runs all choices of one HTTP request on the engine."""

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: GenerationRequest,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """
        Args:
            body: where the parameters come from: its time limit, and its names of parameters.
            decode: instead of the tokenizer's own.

        Raises:
            RequestError, ApiError: the engine cannot serve this.
        """
        num_outputs = len(prompts) * params.n
        if num_outputs > MAX_OUTPUTS:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n = {params.n} are {num_outputs} outputs; ask for {MAX_OUTPUTS} at most.",
                "n" if params.n > 1 else "prompt",
            )
        engine = state.engine
        requests = [
            request
            for prompt in prompts
            for request in make_requests(engine.next_request_id, prompt, params, engine.info)
        ]
        self.choices = [
            Choice(
                index,
                request,
                OutputText(
                    state.tokenizer,
                    request.prompt_token_ids,
                    params.stop,
                    params.stop_token_ids,
                    params.min_tokens,
                    decode,
                ),
            )
            for index, request in enumerate(requests)
        ]
        for request in requests:
            request.timeout_s = min(filter(None, (body.timeout_s, state.config.request_timeout_s)), default=None)
        self.n = params.n
        self._engine = engine
        self._metrics = state.metrics
        self._waiting = state.waiting
        self._body = body

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields the choices' texts as they become certain, then ends; `usage` is known from then on.

        Closing the generator early aborts what still runs.

        Raises:
            LogitsError: the model gave no usable logits.
            RequestError: the grammar is wrong, or the engine cannot serve this for another reason.
            ApiError: too many requests wait, or an output was cut.
            EngineDeadError: the pipeline is gone.
        """
        running = {choice.request.request_id: choice for choice in self.choices}
        with self._metrics.request() as timing:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    choice = running.get(output.request_id)
                    if choice is None:
                        continue  # tokens that were on their way when a stop string ended their choice
                    if output.finish_reason == "grammar":
                        error = GrammarError()
                        raise ApiError(400, str(error), self._body.name_of_param(error.param), "grammar_too_complex")
                    text = choice.output.push(output)
                    if output.token_id is not None:
                        timing.on_token(time.perf_counter(), choice.index)
                    if text:
                        choice.texts.append(text)
                        yield choice.piece(text)
                    if choice.output.finish_reason is not None:
                        yield choice.piece("", choice.finish_reason)
                        del running[output.request_id]
                        if not running:
                            break  # leaving ends what the engine still runs
                        if output.finish_reason is None:
                            self._engine.abort(output.request_id)
            timing.finish_reason = self.choices[0].finish_reason

    async def _outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """What the engine gives for all choices."""
        requests = [choice.request for choice in self.choices]
        self._waiting.enter(request.request_id for request in requests)
        try:
            async with aclosing(self._engine.generate(*requests)) as outputs:
                async for output in outputs:
                    self._waiting.leave(output.request_id)
                    yield output
        except RequestError as error:
            raise RequestError(str(error), self._body.name_of_param(error.param)) from error
        finally:
            for request in requests:
                self._waiting.leave(request.request_id)

    async def run(self) -> None:
        """All of it at once: afterwards `choices` are complete. Raises as `pieces` does."""
        async for _ in self.pieces():
            pass

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self.n]
        num_prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        num_output = sum(len(choice.token_ids) for choice in self.choices)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(choice.output.num_cached_tokens for choice in firsts)
            ),
        )

"""Offline generation: `LLM(model, pp_size=2).generate(prompts, params)`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from fullbore.config import DEFAULT_MODEL, EngineConfig
from fullbore.engine.client import EngineClient, OnProgress
from fullbore.engine.messages import AddRequest, EngineInfo, Outputs
from fullbore.errors import ConfigError, EngineDeadError, FullboreError, GrammarError, LogitsError, RequestError
from fullbore.progress import RequestProgress
from fullbore.scheduler.logprobs import TokenLogprob
from fullbore.scheduler.request import FinishReason, SamplingParams, TokenOutput
from fullbore.text.output import OutputText
from fullbore.text.requests import encode_chat, encode_text, make_requests
from fullbore.text.tokenizer import ChatMessage, Tokenizer

RECEIVE_TIMEOUT_S = 1.0
# Why an output ended before its time, by finish reason.
_ERRORS: dict[FinishReason | None, type[FullboreError]] = {"error": LogitsError, "grammar": GrammarError}

Prompt = str | Sequence[int]
Conversation = Sequence[ChatMessage]


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None = None  # why there is no more, when `finish_reason` is "error" or "grammar"
    logprobs: list[TokenLogprob] | None = None  # one for each of `token_ids`, if asked for


@dataclass(frozen=True)
class RequestOutput:
    """A request and what came of it. `prompt` is None when it was given as token ids or messages."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one for each prompt token, if asked for; None: the first

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first output, the end token included if the model gave one."""
        return self.outputs[0].token_ids


class LLM:
    """A model over `pp_size` pipeline stages, in processes of their own. For one thread at a time.

    Use it as a context manager or call `close`; at the end of the program it is closed anyway.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, on_progress: OnProgress | None = None, **settings: Any) -> None:
        """Starts the engine and waits until it is ready.

        Args:
            model: Hugging Face folder or hub id, or GGUF file.
            on_progress: called with every step of loading.
            settings: the other fields of `EngineConfig`, e.g. `pp_size=2`.

        Raises:
            FullboreError: the subclass that fits: ConfigError, ModelError, OutOfMemoryError ...
        """
        self._tokenizer: Tokenizer
        self._engine = EngineClient.start(_make_config(model, settings), on_progress, on_model=self._load_tokenizer)
        self._inboxes: dict[int, deque[TokenOutput]] = {}  # running request -> where its tokens go

    @property
    def info(self) -> EngineInfo:
        """The engine as it was set up: stages, KV capacity, context length, resolved settings."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues all prompts (texts or lists of token ids); the results are in their order.

        A prompt for which the model gives NaN ends alone, with finish reason "error" and the text until then; one whose
        grammar cannot be followed any more, with "grammar".

        Args:
            params: for all prompts, or one for each.
            show_progress: draw a progress bar on standard error.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing is generated.
            EngineDeadError: the pipeline is gone.
        """
        prompt_list = _prompt_list(prompts)
        each = _params_of_each(params, len(prompt_list))
        jobs = [self._prompt_jobs(prompt, params) for prompt, params in zip(prompt_list, each, strict=True)]
        return self._finish(jobs, show_progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, in the model's chat format. Otherwise as `generate`."""
        if not _is_list(messages):
            raise RequestError("messages must be a list of messages, or a list of such lists.", "messages")
        conversations: Any = [messages] if _is_conversation(messages) else messages
        each = _params_of_each(params, len(conversations))
        jobs = [self._chat_jobs(messages, params) for messages, params in zip(conversations, each, strict=True)]
        return self._finish(jobs, show_progress)

    def stream(self, prompt: Prompt | Conversation, params: SamplingParams | None = None) -> Iterator[str]:
        """Continues one prompt, or answers one conversation; yields text as it comes.

        Raises as `generate`, LogitsError where the model gives NaN, and GrammarError where the output cannot follow its
        grammar any more.
        """
        make_jobs: Any = self._chat_jobs if _is_conversation(prompt) else self._prompt_jobs
        [each] = _params_of_each(params, 1)
        if each.n > 1:
            raise RequestError("stream yields the text of one output; use generate or chat for n > 1.", "n")
        for job, text in self._run(make_jobs(prompt, each)):
            if text:
                yield text
            if job.text.finish_reason in _ERRORS:
                raise _ERRORS[job.text.finish_reason]()

    def close(self) -> None:
        """Ends all processes. Twice is fine."""
        self._engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load_tokenizer(self, model_path: str) -> None:
        self._tokenizer = Tokenizer.load(model_path)

    def _prompt_jobs(self, prompt: Prompt, params: SamplingParams) -> list[_Job]:
        if isinstance(prompt, str):
            return self._jobs(prompt, encode_text(self._tokenizer, prompt, self.info), params)
        if not _is_list(prompt):
            raise RequestError(f"A prompt must be a text or token ids, not {type(prompt).__name__}.", "prompt")
        return self._jobs(None, list(prompt), params)

    def _chat_jobs(self, messages: Conversation, params: SamplingParams) -> list[_Job]:
        try:
            msgspec.convert(messages, Conversation)
        except msgspec.ValidationError as error:  # a chat template would write it down as it is
            raise RequestError(f"messages are not as they should be: {error}.", "messages") from None
        return self._jobs(None, encode_chat(self._tokenizer, messages, self.info), params)

    def _jobs(self, prompt: str | None, token_ids: list[int], params: SamplingParams) -> list[_Job]:
        """One for each of the prompt's `n` outputs."""
        requests = make_requests(self._engine.next_request_id, token_ids, params, self.info)
        return [
            _Job(
                prompt,
                request,
                OutputText(self._tokenizer, token_ids, params.stop, params.stop_token_ids, params.min_tokens),
            )
            for request in requests
        ]

    def _finish(self, jobs_of_prompts: list[list[_Job]], show_progress: bool) -> list[RequestOutput]:
        num_tokens = 0
        jobs = [job for jobs in jobs_of_prompts for job in jobs]
        with RequestProgress(len(jobs), show_progress) as progress:
            for job, text in self._run(jobs):
                job.pieces.append(text)
                num_tokens += 1
                if job.text.finish_reason is not None:
                    progress.advance(num_tokens)
        return [_result(jobs) for jobs in jobs_of_prompts]

    def _run(self, jobs: list[_Job]) -> Iterator[tuple[_Job, str]]:
        """Runs all jobs at once; yields each with the text that is new. Leaving early aborts what still runs."""
        running = {job.request.request_id: job for job in jobs}
        inbox: deque[TokenOutput] = deque()  # one for each call, since several streams may be read in turn
        try:
            for job in jobs:
                self._engine.add(job.request)
                self._inboxes[job.request.request_id] = inbox
            while running:
                while not inbox:
                    self._receive()
                output = inbox.popleft()
                job_of_output = running.get(output.request_id)
                if job_of_output is None:
                    continue  # tokens that were on their way when a stop string ended their request
                text = job_of_output.text.push(output)
                if job_of_output.text.finish_reason is not None:
                    del running[output.request_id]
                    if output.finish_reason is None:
                        self._engine.abort(output.request_id)
                yield job_of_output, text
        finally:
            for job in jobs:
                self._inboxes.pop(job.request.request_id, None)
            with suppress(EngineDeadError):
                for request_id in running:
                    self._engine.abort(request_id)

    def _receive(self) -> None:
        """Waits for tokens and hands them to the calls that run their requests; nobody wants those of ended ones."""
        for message in self._engine.receive(RECEIVE_TIMEOUT_S):
            if isinstance(message, Outputs):
                for output in message.outputs:
                    if output.request_id in self._inboxes:
                        self._inboxes[output.request_id].append(output)
            elif message.request_id in self._inboxes:
                raise RequestError(message.message, message.param)


@dataclass
class _Job:
    """An output on its way."""

    prompt: str | None
    request: AddRequest
    text: OutputText
    pieces: list[str] = field(default_factory=list)

    def output(self) -> CompletionOutput:
        reason = self.text.finish_reason
        return CompletionOutput(
            index=self.request.choice,
            text="".join(self.pieces),
            token_ids=self.text.token_ids,
            finish_reason=reason,
            error=str(_ERRORS[reason]()) if reason in _ERRORS else None,
            logprobs=None if self.request.num_logprobs is None else self.text.logprobs,
        )


def _result(jobs: list[_Job]) -> RequestOutput:
    """Of one prompt's outputs."""
    first = jobs[0]
    return RequestOutput(
        prompt=first.prompt,
        prompt_token_ids=first.request.prompt_token_ids,
        outputs=[job.output() for job in jobs],
        num_cached_tokens=first.text.num_cached_tokens,
        prompt_logprobs=first.text.prompt_logprobs,
    )


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"prompts must be texts or token ids, not {type(prompts).__name__}.", "prompt")
    prompt_list = list(prompts)
    is_one = bool(prompt_list) and not isinstance(prompt_list[0], Iterable)  # its elements are token ids
    return [prompt_list] if is_one else prompt_list


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError("params must be SamplingParams, or a list of them, one for each prompt.")
    if len(params) != num_prompts:
        raise RequestError(
            f"{len(params)} sampling parameters for {num_prompts} prompts; give one for all, or each one."
        )
    return params


def _make_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    unknown = settings.keys() - set(EngineConfig.__struct_fields__)
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise ConfigError(f"Unknown setting {', '.join(sorted(unknown))}; there are: {known}.")
    try:
        return msgspec.convert({"model": str(model), **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Wrong type of a setting: {error}.") from error

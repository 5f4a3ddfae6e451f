"""The requests that clients send, checked field by field as they are parsed."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from fullbore.errors import RequestError
from fullbore.scheduler.request import MAX_TOP_LOGPROBS, SamplingParams
from fullbore.server.errors import ApiError
from fullbore.server.functions import OffersTools
from fullbore.server.messages import Message, conversation
from fullbore.server.output_grammar import OutputGrammar
from fullbore.server.strict import FIRST_ERROR, Strict, TokenIds, refuse_unsupported
from fullbore.text.tokenizer import ChatMessage
from fullbore.text.tool_formats import ToolFormat
from fullbore.text.tools import call_grammar, forced_format

# OpenAI's default for /v1/completions; chat answers are limited by the context length alone.
DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1000  # of one: looking for megabytes would keep all clients waiting

# Fields of a request that are SamplingParams' own, default for default.
_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)


# For the OpenAPI document: what SamplingParams checks.
_LIMITS: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "n": {"minimum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "min_tokens": {"minimum": 0},
}


def _tell_limits(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = False
    for name, limits in _LIMITS.items():
        schema["properties"][name].update(limits)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's and SGLang's: counts so far in every chunk


class GenerationRequest(OutputGrammar):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(json_schema_extra=_tell_limits)

    model: Annotated[str | None, Field(description="Name as listed by /v1/models; default: the served model.")] = None
    max_tokens: Annotated[int | None, Field(description="Most tokens to generate.")] = None
    temperature: Annotated[float | None, Field(description="0: greedy. Default 1.")] = None
    top_p: Annotated[float | None, Field(description="Sample from the likeliest tokens of this total share.")] = None
    top_k: Annotated[int | None, Field(description="Sample from this many likeliest tokens; 0 or -1: all.")] = None
    min_p: Annotated[float | None, Field(description="Least probability, as a share of the likeliest token's.")] = None
    presence_penalty: Annotated[
        float | None, Field(description="Taken off the logits of tokens that the output contains.")
    ] = None
    frequency_penalty: Annotated[float | None, Field(description="The same, once for each time.")] = None
    repetition_penalty: Annotated[
        float | None, Field(description="Makes tokens in prompt or output less likely when above 1.")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, Field(description="Added to the logits of these token ids; -100 to 100.")
    ] = None
    n: Annotated[int | None, Field(description="Outputs for each prompt; their random numbers differ.")] = None
    seed: Annotated[int | None, Field(description="Same seed and prompt: same output.")] = None
    stop: Annotated[
        str | Annotated[list[str], FIRST_ERROR] | None, Field(description="Texts that end the output; not part of it.")
    ] = None
    stop_token_ids: Annotated[TokenIds | None, Field(description="Tokens that end the output; not part of it.")] = None
    min_tokens: Annotated[int | None, Field(description="Until then nothing but max_tokens ends the output.")] = None
    timeout_s: Annotated[float | None, Field(gt=0, description="End with an error when it takes longer.")] = None
    ignore_eos: Annotated[bool | None, Field(description="Go on after the model's end token.")] = None
    stream: Annotated[bool | None, Field(description="Send the output as server-sent events.")] = None
    stream_options: Annotated[
        StreamOptions | None,
        Field(description="include_usage: count tokens at the end, and so far with continuous_usage_stats."),
    ] = None

    def check(self) -> None:
        """Raises ApiError, naming the parameter, for what is not supported or does not fit together."""
        refuse_unsupported(self.model_extra or {})
        if self.stream_options is not None:
            if not self.stream:
                raise ApiError(400, "stream_options is only allowed when stream is true.", "stream_options")
            refuse_unsupported(self.stream_options.model_extra or {}, "stream_options.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def name_of_param(self, name: str | None) -> str | None:
        """What this request calls the parameter that `name` is elsewhere."""
        found = self.output_grammar() if name == "grammar" else None
        return name if found is None else found[0]

    def sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        call_grammar: str | None = None,
    ) -> SamplingParams:
        """The engine's form of the parameters, validated.

        Args:
            call_grammar: of the calls that the output must consist of.

        Raises:
            RequestError, ApiError: a value is out of range, or parameters do not fit together.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", "stop")
        longest = max(map(len, stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise RequestError(f"stop has {longest} characters; at most {MAX_STOP_CHARS} are allowed.", "stop")
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        params = SamplingParams(
            **given,
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammar(call_grammar),
        )
        params.validate()
        return params

    def _grammar(self, call_grammar: str | None) -> str | None:
        found = self.output_grammar()
        if found is None:
            name, grammar = "tool_choice", call_grammar
        elif call_grammar is None:
            name, grammar = found
        else:
            raise ApiError(400, f"{found[0]} cannot be combined with a tool_choice that demands calls.", found[0])
        if grammar is not None and self.min_tokens:
            raise ApiError(400, f"min_tokens cannot be combined with {name}, which says where to end.", "min_tokens")
        return grammar


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        str | TokenIds | Annotated[list[str], FIRST_ERROR] | Annotated[list[TokenIds], FIRST_ERROR],
        Field(description="The text to continue, or its token ids, or a list of several of one kind."),
    ]
    echo: Annotated[bool | None, Field(description="Begin the output with the prompt.")] = None
    logprobs: Annotated[
        int | None, Field(description="Report log-probabilities, also of so many likeliest tokens.")
    ] = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Each on its own; raises ApiError when one is empty, or there are none."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts: list[Any] = [prompt] if is_one else prompt
        if not prompts or not all(prompts):
            raise ApiError(400, "The prompt is empty; give at least one token.", "prompt")
        return prompts

    @property
    def is_prompt_only(self) -> bool:
        """Nothing to generate: what counts is the prompt, and what the model thinks of it."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def prompt_logprobs(self) -> int | None:
        """Of the prompt, so many likeliest tokens at each place; None: no log-probabilities."""
        return self.logprobs if self.echo else None


class ChatCompletionRequest(GenerationRequest, OffersTools):
    messages: Annotated[list[Message], FIRST_ERROR, Field(description="The conversation so far.")]
    max_completion_tokens: Annotated[int | None, Field(description="Newer name of max_tokens.")] = None
    logprobs: Annotated[bool | None, Field(description="Report the log-probability of each token.")] = None
    top_logprobs: Annotated[int | None, Field(description="And those of so many likeliest ones; 0 to 20.")] = None

    def check(self) -> None:
        super().check()
        self.check_tools()
        if self.top_logprobs is None:
            return
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is only allowed when logprobs is true.", "top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ApiError(
                400, f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {self.top_logprobs}.", "top_logprobs"
            )

    @property
    def num_logprobs(self) -> int | None:
        """So many likeliest tokens at each place; None: no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    def conversation(self) -> list[ChatMessage]:
        """The messages as chat templates know them; raises ApiError when there are none or one is not supported."""
        return conversation(self.messages)

    def call_grammar(self, tool_format: ToolFormat) -> str | None:
        """The grammar of the calls that the model has to make; None: it need not make any. Raises RequestError."""
        required = self.required_tools()
        if not required:
            return None
        return call_grammar(required, forced_format(tool_format), may_repeat=self.may_repeat_calls)

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate, under whichever name it was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def name_of_param(self, name: str | None) -> str | None:
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if name == "grammar" and self.required_tools():
            return "tools"
        return "messages" if name == "prompt" else super().name_of_param(name)


def _token_id(key: str) -> int:
    """A key of logit_bias; JSON has no others than texts."""
    if not re.fullmatch("0|[1-9][0-9]*", key):  # 5 and 05 would be one token
        raise RequestError(f"logit_bias needs token ids as keys, got {key[:40]!r}.", "logit_bias")
    return int(key[:20])

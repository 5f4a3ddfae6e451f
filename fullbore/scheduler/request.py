"""A request: what the client asked for, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, force_setattr

from fullbore.errors import RequestError
from fullbore.scheduler.constraint import Constraint
from fullbore.scheduler.logprobs import Logprobs
from fullbore.scheduler.micro_batch import PromptLogprobs, Sampling
from fullbore.scheduler.shaper import LogitOptions, Shaper

MAX_CHOICES = 128  # of one prompt, as in the OpenAI API
MAX_TOP_LOGPROBS = 20  # as in the OpenAI API
MAX_LISTED_TOKENS = 4096  # of logit_bias or stop_token_ids: they travel with every token

# error: logits that are not finite; grammar: one that cannot be followed any more
FinishReason = Literal["stop", "length", "abort", "timeout", "error", "grammar"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to generate. Defaults are the OpenAI API's, except that `max_tokens` None means: up to the context length.

    What changes logits is applied in vLLM's order: bias, min_tokens, penalties, temperature, min_p, top_k, top_p.
    Log-probabilities are the model's own, before any of it.
    """

    n: int = 1  # outputs for each prompt; with one seed they differ, at temperature 0 they are equal
    max_tokens: int | None = None
    min_tokens: int = 0  # until then neither end token nor stop token nor stop string ends the output
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # least probability, as a share of the likeliest token's
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the output contains
    frequency_penalty: float = 0.0  # the same, once for each time
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones
    logit_bias: dict[int, float] = {}  # added to the logits of these token ids
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # log-probabilities of the output's tokens, and of so many likeliest ones
    prompt_logprobs: int | None = None  # the same for the prompt, which is then computed without the prefix cache
    grammar: str | None = None  # that the output must follow, as `fullbore.text.grammar` makes it

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # or each of its characters would be a stop string
            force_setattr(self, "stop", (self.stop,))

    def validate(self) -> None:
        """Raises RequestError, naming the parameter, if a value has a wrong type or is out of range (NaN included)."""
        try:
            convert(asdict(self), SamplingParams)
        except ValidationError as error:
            reason, _, path = str(error).partition(" - at ")
            name = path.rpartition("$.")[2].strip("`").partition("[")[0]  # "`$.stop[...]`", "`key` in `$.logit_bias`"
            raise RequestError(f"{name} has the wrong type: {reason}.", param=name) from None
        checks = [
            ("n", 1 <= self.n <= MAX_CHOICES, f"between 1 and {MAX_CHOICES}"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or 2**63), "at least 0 and at most max_tokens"),
            ("temperature", 0 <= self.temperature <= 2, "between 0 and 2"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for no limit"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            # One further from 1 would make logits infinite.
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of at most 64 bits"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS, f"between 0 and {MAX_TOP_LOGPROBS}"),
            (
                "prompt_logprobs",
                0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS,
                f"between 0 and {MAX_TOP_LOGPROBS}",
            ),
        ]
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)}.", param=name)
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string.", param="stop")
        if self.grammar is not None and self.min_tokens:
            raise RequestError("min_tokens cannot be combined with a grammar, which says where to end.", "min_tokens")
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if len(tokens) > MAX_LISTED_TOKENS:
                raise RequestError(
                    f"{name} has {len(tokens)} tokens; at most {MAX_LISTED_TOKENS} are allowed.", param=name
                )
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias must be between -100 and 100, got {bias} for the token id {token_id}.",
                    param="logit_bias",
                )

    @property
    def logit_options(self) -> LogitOptions | None:
        """Those parameters that change logits; None: all have their defaults."""
        options = LogitOptions(
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
        )
        return None if options == LogitOptions() else options


@dataclass(eq=False, slots=True)
class Request:
    """A request inside the scheduler. Only the scheduler changes the fields after `deadline_s`."""

    request_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # the model's end tokens unless ignored, and the client's
    shaper: Shaper | None = None  # None: nothing changes the logits
    num_logprobs: int | None = None  # None: no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    constraint: Constraint | None = None  # what limits its output to a grammar
    arrival_s: float = 0.0
    deadline_s: float | None = None

    arrival_order: int = 0  # set by Scheduler.add
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_launched_tokens: int = 0  # tokens whose KV is written, or will be by a micro-batch in flight
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_shared_blocks: int = 0  # leading blocks taken from the prefix cache at the latest admission
    may_share_blocks: bool = True  # False once logits over shared blocks were not finite: compute everything oneself
    epoch: int = 0
    ready_since_s: float = 0.0  # when the next run became possible: arrival, or the return of the last token
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of the chunks returned, until they are handed out

    def __post_init__(self) -> None:
        if self.num_prompt_logprobs is not None:  # all logits are needed, also those over cached blocks
            self.may_share_blocks = False

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start … end-1 of prompt and output together."""
        prompt_length = len(self.prompt_token_ids)
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : end - prompt_length]
        if end <= prompt_length:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt_length]

    def sampling(self, position: int) -> Sampling:
        """How the token at `position`, after those known, is drawn."""
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            self.choice,
            position,
            None if self.constraint is None else self.constraint.mask(),
            None if self.shaper is None else self.shaper.shaping(),
            self.num_logprobs,
        )

    def prompt_logprobs_due(self, num_top: int, end: int) -> PromptLogprobs | None:
        """What a run up to position `end` is to report; nothing once it is handed out, with the first token."""
        if self.output_token_ids:
            return None
        is_prompt_end = end == len(self.prompt_token_ids)
        return PromptLogprobs(num_top, None if is_prompt_end else self.prompt_token_ids[end])


class TokenOutput(Struct, array_like=True, gc=False):
    """What the scheduler hands out for one request: its next token, its end, or both."""

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None  # the token's, if the request asked for them
    prompt_logprobs: Logprobs | None = None  # with the first token: of all prompt tokens but the first

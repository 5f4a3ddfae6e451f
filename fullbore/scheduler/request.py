"""A request: what the client asked for, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, force_setattr

from fullbore.errors import RequestError
from fullbore.scheduler.constraint import Constraint

# error: logits that are not finite; grammar: one that became too complex while it was followed
FinishReason = Literal["stop", "length", "abort", "timeout", "error", "grammar"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to generate. Defaults are the OpenAI API's, except that `max_tokens` None means: up to the context length."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # or each of its characters would be a stop string
            force_setattr(self, "stop", (self.stop,))

    def validate(self) -> None:
        """Raises RequestError, naming the parameter, if a value has a wrong type or is out of range (NaN included)."""
        try:
            convert(asdict(self), SamplingParams)
        except ValidationError as error:
            reason, _, path = str(error).partition(" - at ")
            name = path.strip("`$.").partition("[")[0]
            raise RequestError(f"{name} has the wrong type: {reason}.", param=name) from None
        checks = [
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 2, "between 0 and 2"),
            ("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for no limit"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of at most 64 bits"),
        ]
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise RequestError(f"{name} must be {allowed}, got {getattr(self, name)}.", param=name)
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string.", param="stop")


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
    stop_token_ids: frozenset[int] = frozenset()  # the model's end tokens; empty with ignore_eos
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


class TokenOutput(Struct, array_like=True, gc=False):
    """What the scheduler hands out for one request: its next token, its end, or both."""

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None
    num_cached_tokens: int = 0

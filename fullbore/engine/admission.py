"""From a client's message to the scheduler's request; the last guard before the stages."""

from __future__ import annotations

from collections.abc import Collection

from fullbore.engine.messages import AddRequest
from fullbore.errors import RequestError
from fullbore.scheduler.constraint import Constraint
from fullbore.scheduler.request import Request
from fullbore.scheduler.shaper import Shaper


def make_scheduler_request(
    message: AddRequest,
    vocab_size: int,
    eos_token_ids: Collection[int],
    arrival_s: float,
    constraint: Constraint | None = None,
) -> Request:
    """The request as the scheduler keeps it.

    Raises:
        RequestError: a token id is not in the vocabulary; it would end a stage, and with it the engine.
    """
    prompt, options = message.prompt_token_ids, message.options
    _check_vocabulary(prompt, vocab_size, "prompt")
    _check_vocabulary(message.stop_token_ids, vocab_size, "stop_token_ids")
    _check_vocabulary([] if options is None else options.logit_bias, vocab_size, "logit_bias")
    stop_token_ids = frozenset(message.stop_token_ids).union(() if message.ignore_eos else eos_token_ids)
    return Request(
        request_id=message.request_id,
        prompt_token_ids=prompt,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        choice=message.choice,
        stop_token_ids=stop_token_ids,
        shaper=None if options is None else Shaper(options, prompt, stop_token_ids),
        num_logprobs=message.num_logprobs,
        num_prompt_logprobs=message.num_prompt_logprobs,
        constraint=constraint,
        arrival_s=arrival_s,
        deadline_s=None if message.timeout_s is None else arrival_s + message.timeout_s,
    )


def _check_vocabulary(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise RequestError(f"Token ids must be between 0 and {vocab_size - 1}.", param=param)

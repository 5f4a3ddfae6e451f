"""What a client asks for, checked against the engine that is to serve it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fullbore.engine.messages import AddRequest, EngineInfo
from fullbore.errors import RequestError
from fullbore.scheduler.request import SamplingParams


def make_request(
    request_id: int, prompt_token_ids: Sequence[int], params: SamplingParams, info: EngineInfo
) -> AddRequest:
    """The engine's form of a request; nothing that the engine cannot serve passes.

    Raises:
        RequestError: the prompt is empty, has unknown token ids or does not fit, or a parameter is out of range.
    """
    params.validate()
    _check_token_ids(prompt_token_ids, info.vocab_size)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        max_tokens=_output_limit(len(prompt_token_ids), params.max_tokens, info),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), info.vocab_size),
        seed=params.seed if params.seed is not None else _own_seed(info.config.random_seed, request_id),
        ignore_eos=params.ignore_eos,
    )


def longest_sequence_tokens(info: EngineInfo) -> int:
    """The most tokens, prompt and output together, that one request can have."""
    return min(info.context_length, info.kv_capacity_tokens)


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("The prompt is empty; give at least one token.", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"The prompt contains the token id {wrong}; this model's vocabulary has the ids 0 to {vocab_size - 1}.",
            "prompt",
        )


def _output_limit(num_prompt_tokens: int, max_tokens: int | None, info: EngineInfo) -> int:
    longest = longest_sequence_tokens(info)
    bound = "context length" if longest == info.context_length else "KV cache (--max-total-tokens)"
    room = longest - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens, but the {bound} is {longest} tokens, prompt and output "
            "together; shorten the prompt.",
            "prompt",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestError(
            f"max_tokens {max_tokens} and the prompt of {num_prompt_tokens} tokens exceed the {bound} of {longest} "
            f"tokens; ask for at most {room}, or shorten the prompt.",
            "max_tokens",
        )
    return max_tokens


def _own_seed(random_seed: int, request_id: int) -> int:
    """A seed for a request that brings none: different for each, the same again in the next run."""
    digest = hashlib.blake2b(f"{random_seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1

"""What a client asks for, checked against the engine that is to serve it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from fullbore.engine.messages import AddRequest, EngineInfo
from fullbore.errors import RequestError
from fullbore.scheduler.request import SamplingParams
from fullbore.text.tokenizer import ChatMessage, Tokenizer
from fullbore.text.tools import Tool, with_arguments_as_text, write_tools_into_messages


def make_request(
    request_id: int, prompt_token_ids: Sequence[int], params: SamplingParams, info: EngineInfo
) -> AddRequest:
    """The engine's form of a request; nothing that the engine cannot serve passes.

    Raises:
        RequestError: the prompt is empty, has unknown token ids or does not fit, or a parameter is out of range.
    """
    params.validate()
    prompt_token_ids = _plain_integers(prompt_token_ids)
    _check_token_ids(prompt_token_ids, info.vocab_size)
    _check_known(params.stop_token_ids, "stop_token_ids", info.vocab_size)
    _check_known(params.logit_bias, "logit_bias", info.vocab_size)
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_tokens=_output_limit(len(prompt_token_ids), params.max_tokens, info),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), info.vocab_size),
        seed=params.seed if params.seed is not None else _own_seed(info.config.random_seed, request_id),
        ignore_eos=params.ignore_eos,
        stop_token_ids=list(params.stop_token_ids),
        options=params.logit_options,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
        grammar=params.grammar,
    )


def make_requests(
    next_request_id: Callable[[], int], prompt_token_ids: Sequence[int], params: SamplingParams, info: EngineInfo
) -> list[AddRequest]:
    """The `n` choices of one prompt. All have one seed; the first reports on the prompt for all.

    Added one right after the other, they find the full KV blocks of the prompt in the prefix cache.

    Raises:
        RequestError: as `make_request`.
    """
    first = make_request(next_request_id(), prompt_token_ids, params, info)
    others = [
        replace(first, request_id=next_request_id(), choice=choice, num_prompt_logprobs=None)
        for choice in range(1, params.n)
    ]
    return [first, *others]


def encode_text(tokenizer: Tokenizer, text: str, info: EngineInfo, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a plain prompt. May take seconds for a long one.

    Raises:
        RequestError: the text cannot fit, whatever its tokens are, or is not valid Unicode.
    """
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= info.context_length:
        raise _too_long(f"at least {fewest}", info)
    return tokenizer.encode(text, add_special_tokens)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], info: EngineInfo, tools: Sequence[Tool] = ()
) -> list[int]:
    """Token ids of a conversation in the model's chat format, with the functions that the model may call.

    Raises:
        RequestError: as `encode_text`, or the model has no chat template, or its template refuses these messages.
    """
    return encode_text(tokenizer, format_chat(tokenizer, messages, tools), info, add_special_tokens=False)


def format_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """A conversation in the model's chat format; where its template knows no functions, they come as plain text.

    Raises:
        RequestError: the model has no chat template, or its template refuses these messages.
    """
    if not tokenizer.knows_tools:
        messages = write_tools_into_messages(messages, tools)
        return tokenizer.format_chat(messages, add_generation_prompt=add_generation_prompt)
    descriptions = [tool.for_template() for tool in tools]
    try:
        return tokenizer.format_chat(messages, descriptions, add_generation_prompt=add_generation_prompt)
    except RequestError:
        if not any("tool_calls" in message for message in messages):
            raise
    messages = with_arguments_as_text(messages)  # DeepSeek's templates put them together with other text
    return tokenizer.format_chat(messages, descriptions, add_generation_prompt=add_generation_prompt)


def _plain_integers(token_ids: Sequence[int]) -> list[int]:
    """Token ids as the driver takes them, NumPy's and PyTorch's integers too."""
    token_ids = list(token_ids)
    if set(map(type, token_ids)) <= {int}:
        return token_ids
    try:
        if any(isinstance(token_id, bool) for token_id in token_ids):
            raise TypeError
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise RequestError("The prompt must be a text, or token ids that are all integers.", "prompt") from None


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("The prompt is empty; give at least one token.", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"The prompt contains the token id {wrong}; this model's vocabulary has the ids 0 to {vocab_size - 1}.",
            "prompt",
        )


def _check_known(token_ids: Collection[int], param: str, vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} contains the token id {token_id}; this model's vocabulary has the ids 0 to {vocab_size - 1}.",
                param,
            )


def _output_limit(num_prompt_tokens: int, max_tokens: int | None, info: EngineInfo) -> int:
    room = info.context_length - num_prompt_tokens
    if room < 1:
        raise _too_long(str(num_prompt_tokens), info)
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestError(
            f"max_tokens {max_tokens} and the prompt of {num_prompt_tokens} tokens exceed the context length of "
            f"{info.context_length} tokens; ask for at most {room}, or shorten the prompt.",
            "max_tokens",
        )
    return max_tokens


def _too_long(length: str, info: EngineInfo) -> RequestError:
    return RequestError(
        f"The prompt has {length} tokens, but the context length is {info.context_length} tokens, prompt and output "
        "together; shorten the prompt.",
        "prompt",
    )


def _own_seed(random_seed: int, request_id: int) -> int:
    """A seed for a request that brings none: different for each, the same again in the next run."""
    digest = hashlib.blake2b(f"{random_seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1

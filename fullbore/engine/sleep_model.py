"""Settings and expected outputs of stages that sleep instead of computing (see sleep_runner). No torch.

sleep://layers=8,layer_ms=2,token_ms=0.1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fullbore.errors import ModelError

_SCHEME = "sleep://"
_WEIGHT_PERIOD = 1_000_003

Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]


class SleepModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings behind `sleep://`. A stage takes layers · (layer_ms + tokens · token_ms), the last + head_ms."""

    layers: Annotated[int, Meta(ge=1, le=10_000)] = 8
    layer_ms: Milliseconds = 1.0
    token_ms: Milliseconds = 0.0
    head_ms: Milliseconds = 0.0
    hop_ms: Milliseconds = 0.0  # a slow link: hidden states arrive so much later (see slow_link.py)
    vocab: Annotated[int, Meta(ge=1, le=2**24)] = 1000  # tokens travel as float32
    hidden: Annotated[int, Meta(ge=4, le=1_000_000)] = 16  # the first 4 columns are used
    context: Annotated[int, Meta(ge=1, le=2**24)] = 4096
    eos: Annotated[int, Meta(ge=-1)] = -1  # -1: none
    load_ms: Milliseconds = 0.0
    fail: Literal["", "raise", "memory", "exit", "hang"] = (
        ""  # what goes wrong on stage `fail_stage` in its `fail_at`-th micro-batch: raise, memory, exit or hang
    )
    fail_stage: int = 0
    fail_at: int = 0


def is_sleep_model(model: str) -> bool:
    return model.startswith(_SCHEME)


def parse(model: str) -> SleepModel:
    """`sleep://layers=8,layer_ms=2` -> SleepModel. Raises ModelError for an unknown key or a wrong value."""
    pairs = [item.partition("=") for item in model.removeprefix(_SCHEME).split(",") if item]
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, SleepModel, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{model} is not a valid sleep model: {error}.") from None


def hop_s(model: str) -> float:
    """What the links between stages add to each transfer; 0 for every model that really computes."""
    return parse(model).hop_ms * 1e-3 if is_sleep_model(model) else 0.0


def expected_tokens(model: SleepModel, prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """The first `count` tokens that any pipeline of this model gives; `seed` None: greedy. Ignores end tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(checksum(tokens), seed, 0, model.vocab))
    return tokens[len(prompt) :]


def checksum(tokens: Iterable[int]) -> int:
    """A number that depends on every token and on its position."""
    return sum((token + 1) * (position * 2_654_435_761 % _WEIGHT_PERIOD + 1) for position, token in enumerate(tokens))


def draw(checksum: int, seed: int | None, choice: int, vocab: int) -> int:
    """The token that follows a sequence of this checksum; `seed` None: greedy."""
    key = checksum if seed is None else checksum + 7919 * (seed % 2**64) + 104_729 * choice + 1
    return (key * 6_364_136_223_846_793_005 % 2**64 >> 33) % vocab


def allowed_tokens(mask: bytes, vocab: int) -> list[int]:
    """The tokens that a mask allows, see `scheduler.micro_batch.Sampling`."""
    return [token for token in range(min(vocab, 8 * len(mask))) if mask[token // 8] >> token % 8 & 1]

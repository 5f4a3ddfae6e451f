"""Log-probabilities on their way from the last stage to the client: packed, so that the driver only passes them on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct


class TokenLogprob(NamedTuple):
    """One token's, unpacked."""

    logprob: float  # natural logarithm of the model's probability, before temperature and everything else
    top: list[tuple[int, float]]  # the likeliest token ids at its place and theirs, in descending order


class Logprobs(Struct, array_like=True, gc=False):
    """Of n tokens, and of the k likeliest ones at each of their places. Little-endian; ids uint32, values float32."""

    of_tokens: bytes  # [n]
    top_ids: bytes  # [n, k]
    of_top: bytes  # [n, k]

    def unpack(self) -> list[TokenLogprob]:
        values: list[float] = array("f", self.of_tokens).tolist()
        top = list(zip(array("I", self.top_ids), array("f", self.of_top), strict=True))
        k = len(top) // max(len(values), 1)
        return [TokenLogprob(value, top[k * row : k * (row + 1)]) for row, value in enumerate(values)]

    def split(self, num_tokens: int) -> list[Logprobs]:
        """Each of the `num_tokens` tokens' own."""
        size = len(self.top_ids) // num_tokens
        return [
            Logprobs(
                self.of_tokens[4 * k : 4 * k + 4],
                self.top_ids[size * k : size * (k + 1)],
                self.of_top[size * k : size * (k + 1)],
            )
            for k in range(num_tokens)
        ]


class MicroBatchLogprobs(Struct, array_like=True, gc=False):
    """Those that a micro-batch's plan asked for."""

    sampled: list[Logprobs | None]  # per run with a token due; None: not asked for, or no token
    prompt: list[Logprobs]  # per run with `prompt_logprobs`


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Those of consecutive tokens in one."""
    return Logprobs(
        b"".join(part.of_tokens for part in parts),
        b"".join(part.top_ids for part in parts),
        b"".join(part.of_top for part in parts),
    )

"""What a request asks of its logits, kept up to date as its tokens come, so that every plan can carry it whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fullbore.scheduler.micro_batch import Shaping


class LogitOptions(Struct, frozen=True, kw_only=True):
    """The parameters of a request that change logits. A request that has the defaults throughout has none of these."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # until then no stop token is drawn


class Shaper:
    """Makes the `Shaping` of a request's next draw: a function of its options and tokens only, preempted or not."""

    def __init__(self, options: LogitOptions, prompt_token_ids: Sequence[int], stop_token_ids: Iterable[int]) -> None:
        has_repetition = options.repetition_penalty != 1.0
        self._is_counting = has_repetition or bool(options.presence_penalty or options.frequency_penalty)
        self._min_tokens = options.min_tokens
        self._num_tokens = 0
        self._counts = TokenCounts()
        self._banned_ids = _pack_ids(sorted(stop_token_ids))
        self._constant = Shaping(
            bias_ids=_pack_ids(options.logit_bias),
            bias_values=array("f", options.logit_bias.values()).tobytes(),
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            prompt_ids=_pack_ids(dict.fromkeys(prompt_token_ids)) if has_repetition else b"",
            min_p=options.min_p,
        )
        self._is_constant_needed = self._constant != Shaping()

    def add(self, token_id: int) -> None:
        """Takes note of a token of the output."""
        self._num_tokens += 1
        if self._is_counting:
            self._counts.add(token_id)

    def shaping(self) -> Shaping | None:
        """For the token after those added; None when nothing changes its logits."""
        is_banning = self._num_tokens < self._min_tokens
        if is_banning or self._is_counting:
            return replace(
                self._constant,
                banned_ids=self._banned_ids if is_banning else b"",
                output_ids=self._counts.ids.tobytes(),
                output_counts=self._counts.counts.tobytes(),
            )
        return self._constant if self._is_constant_needed else None


class TokenCounts:
    """The distinct tokens of a growing text, in order of appearance, and how often each occurs."""

    def __init__(self) -> None:
        self.ids = array("I")
        self.counts = array("I")
        self._place: dict[int, int] = {}

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.counts.append(0)
        self.counts[place] += 1


def _pack_ids(token_ids: Iterable[int]) -> bytes:
    return array("I", token_ids).tobytes()

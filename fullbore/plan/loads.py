"""What one micro-batch asks of a stage: all that a cost function may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fullbore.scheduler.micro_batch import MicroBatch


class Load(NamedTuple):
    """The work in a micro-batch, the same on every stage."""

    decodes: int = 0  # runs of one token
    prefill_tokens: int = 0  # tokens of longer runs
    prefill_token_pairs: int = 0  # Σ (context + tokens)² - context² over the longer runs: their attention work
    sampled: int = 0  # tokens that the last stage draws
    context_tokens: int = 0  # cached tokens that all runs read

    @property
    def tokens(self) -> int:
        """Rows of the hidden-state tensor."""
        return self.decodes + self.prefill_tokens


class StageCosts(Protocol):
    """How long a micro-batch takes."""

    def seconds(self, load: Load) -> Sequence[float]:
        """Seconds on each stage, in order. The caller does not change the result, so it may be a cached one."""


def load_of(micro_batch: MicroBatch) -> Load:
    """Adds up the runs of a micro-batch."""
    decodes = tokens = pairs = sampled = context = 0
    for run in micro_batch.runs:
        length, start = len(run.token_ids), run.start
        context += start
        if run.sampling is not None:
            sampled += 1
        if length == 1:
            decodes += 1
        else:
            tokens += length
            pairs += (start + length) ** 2 - start**2
    return Load(decodes, tokens, pairs, sampled, context)

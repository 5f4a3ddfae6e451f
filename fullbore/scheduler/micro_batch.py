"""The plan of one micro-batch: what the driver decides and every stage obeys."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

LaunchReason = Literal["slot-freed", "token-returned", "request-arrived", "memory-freed"]


class Shaping(Struct, array_like=True, frozen=True, gc=False):
    """What few requests ask for, so that the others need not carry it: changes to the logits before the draw.

    Token ids are distinct within a field and packed as uint32, values as float32, both little-endian: they may be many
    and are sent with every token, since stages remember nothing about requests.
    """

    bias_ids: bytes = b""
    bias_values: bytes = b""  # added to the logits of `bias_ids`
    banned_ids: bytes = b""  # never drawn
    repetition_penalty: float = 1.0  # of tokens in prompt or output
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, for each time
    prompt_ids: bytes = b""
    output_ids: bytes = b""
    output_counts: bytes = b""  # uint32: how often each of `output_ids` occurs
    min_p: float = 0.0  # least probability, as a share of the likeliest token's


class Sampling(Struct, array_like=True, frozen=True, gc=False):
    """How the last stage draws one token. A pure function of logits and this, so it depends on neither batch nor P."""

    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    seed: int
    choice: int  # which of the request's `n` outputs; part of the random key
    position: int  # position in the sequence of the token to draw; part of the random key
    # Allowed tokens, one bit each: of token i bit i % 8 of byte i // 8. Tokens beyond its end are not allowed.
    mask: bytes | None = None
    shaping: Shaping | None = None
    num_logprobs: int | None = None  # report the token's log-probability, and those of so many likeliest tokens


class PromptLogprobs(Struct, array_like=True, frozen=True, gc=False):
    """Report the log-probabilities of the prompt tokens that a run's tokens are followed by."""

    num_top: int  # and those of so many likeliest tokens at each place
    next_token_id: int | None  # after the run's last token; None: the prompt ends there


class Run(Struct, array_like=True, gc=False):
    """Consecutive tokens of one request inside a micro-batch: one when decoding, n for a prefill chunk."""

    request_id: int
    epoch: int  # how often the request was preempted; results of an older epoch are dropped
    start: int  # position of token_ids[0] in the sequence
    token_ids: list[int]
    block_ids: list[int]  # KV blocks of the request, in order; at least ceil((start + len(token_ids)) / page_size)
    sampling: Sampling | None  # None: no token is due after this run (a prefill chunk that is not the last)
    prompt_logprobs: PromptLogprobs | None = None


class MicroBatch(Struct, array_like=True, gc=False):
    """Runs of several requests that travel the pipeline together. Stages execute micro-batches in order of `id`."""

    id: int
    runs: list[Run]
    launch_reason: LaunchReason
    launch_reason_since_s: float  # when the last precondition for this launch became true (the scheduler's clock)

    def for_earlier_stages(self) -> MicroBatch:
        """Without what only the last stage uses and may be large; itself where there is nothing of the kind."""
        if not any(run.sampling is not None and _is_large(run.sampling) for run in self.runs):
            return self
        return replace(self, runs=[_without_shaping(run) for run in self.runs])

    @property
    def num_tokens(self) -> int:
        """Rows of the hidden-state tensor that the stages pass on."""
        return sum(len(run.token_ids) for run in self.runs)

    @property
    def num_sampled(self) -> int:
        """How many tokens the last stage returns, in the order of `runs`."""
        return sum(run.sampling is not None for run in self.runs)


def _is_large(sampling: Sampling) -> bool:
    return sampling.mask is not None or sampling.shaping is not None


def _without_shaping(run: Run) -> Run:
    if run.sampling is None or not _is_large(run.sampling):
        return run
    return replace(run, sampling=replace(run.sampling, mask=None, shaping=None))

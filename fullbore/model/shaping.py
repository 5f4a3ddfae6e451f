"""Changes one row of logits as a request asks: allowed tokens, bias, banned tokens, penalties, in this order.

Penalties are vLLM's. Repetition (CTRL, arXiv 1909.05858): the logit of a token in prompt or output is divided by the
penalty where it is positive, multiplied where it is not. Presence and frequency (OpenAI): from the logit of a token in
the output, `presence_penalty + frequency_penalty * (how often it occurs)` is subtracted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fullbore.scheduler.micro_batch import Sampling, Shaping

_NEVER = float("-inf")


def is_shaped(sampling: Sampling) -> bool:
    """Whether there is anything to do, `min_p` included, which the draw itself applies."""
    return sampling.mask is not None or sampling.shaping is not None


def shape_row(logits: torch.Tensor, sampling: Sampling) -> None:
    """Applies mask and shaping in place. `logits`: [vocab_size], float32."""
    if sampling.mask is not None:
        logits.masked_fill_(_forbidden(sampling.mask, len(logits), logits.device), _NEVER)
    shaping = sampling.shaping
    if shaping is None:
        return
    if shaping.bias_ids:
        logits[_ids(shaping.bias_ids, logits)] += _tensor(shaping.bias_values, np.float32, logits)
    if shaping.banned_ids:
        logits[_ids(shaping.banned_ids, logits)] = _NEVER
    if shaping.repetition_penalty != 1.0:
        _penalise_repetition(logits, shaping)
    if shaping.output_ids and (shaping.presence_penalty or shaping.frequency_penalty):
        counts = _tensor(shaping.output_counts, np.uint32, logits).float()
        penalty = counts.mul_(shaping.frequency_penalty).add_(shaping.presence_penalty)
        logits[_ids(shaping.output_ids, logits)] -= penalty


def _forbidden(mask: bytes, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[vocab_size] bool: True where the mask's bit is 0 or missing."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8)[: -(-vocab_size // 8)], bitorder="little")[:vocab_size]
    forbidden = np.ones(vocab_size, dtype=np.bool_)
    np.equal(bits, 0, out=forbidden[: len(bits)])
    return torch.from_numpy(forbidden).to(device)


def _penalise_repetition(logits: torch.Tensor, shaping: Shaping) -> None:
    # A token in both lists is written twice, with the same value.
    seen = torch.cat([_ids(shaping.prompt_ids, logits), _ids(shaping.output_ids, logits)])
    values = logits[seen]
    penalty = shaping.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _ids(packed: bytes, like: torch.Tensor) -> torch.Tensor:
    return _tensor(packed, np.uint32, like)


def _tensor(packed: bytes, kind: Any, like: torch.Tensor) -> torch.Tensor:
    """Packed numbers as a tensor on the device of `like`; integers as int64, as indices must be."""
    numbers = np.frombuffer(packed, kind)
    numbers = numbers.astype(np.int64) if kind is np.uint32 else numbers.copy()
    return torch.from_numpy(numbers).to(like.device)

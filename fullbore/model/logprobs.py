"""Log-probabilities of the model's own distribution: log softmax of the logits as they are, whatever the draw does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from fullbore.scheduler.logprobs import Logprobs
from fullbore.scheduler.micro_batch import Sampling


def sampled_logprobs(
    logits: torch.Tensor, samplings: Sequence[Sampling], token_ids: Sequence[int | None]
) -> list[Logprobs | None]:
    """For each row that asks for them and got a token.

    Args:
        logits: [rows, vocab_size], float32.
    """
    found: list[Logprobs | None] = [None] * len(samplings)
    rows_of: defaultdict[int, list[int]] = defaultdict(list)  # by number of likeliest tokens: nearly always one group
    for row, (sampling, token_id) in enumerate(zip(samplings, token_ids, strict=True)):
        if sampling.num_logprobs is not None and token_id is not None:
            rows_of[sampling.num_logprobs].append(row)
    for num_top, rows in rows_of.items():
        some = logits if len(rows) == len(samplings) else logits[rows]
        together = logprobs(some, [token_id for row in rows if (token_id := token_ids[row]) is not None], num_top)
        for row, part in zip(rows, together.split(len(rows)), strict=True):
            found[row] = part
    return found


def logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> Logprobs:
    """Of one token per row, and of the `num_top` likeliest ones of the row.

    Args:
        logits: [rows, vocab_size], float32.
    """
    total = logits.logsumexp(-1, keepdim=True)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return Logprobs(
        _float32(logits.gather(1, ids) - total),
        top_ids.cpu().numpy().astype(np.uint32).tobytes(),
        _float32(top - total),
    )


def _float32(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().astype(np.float32, copy=False).tobytes()

"""Draws tokens from logits: exact, and a pure function of one row of logits and its `Sampling`.

Every draw uses one uniform number keyed by (seed, choice, position) and the inverse of the cumulative distribution in
token order, so that a result depends on neither the other rows, nor the number of stages, nor earlier draws.

Order of operations (vLLM's): allowed tokens, bias, banned tokens, penalties (see shaping.py); then temperature, min_p,
top_k, top_p. Log-probabilities (see logprobs.py) are those of the model, before any of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np
import torch
from torch.nn.functional import threshold as zero_up_to

from fullbore.model.shaping import is_shaped, shape_row
from fullbore.scheduler.micro_batch import Sampling

_GREEDY_BELOW = 1e-5  # temperatures below differ from greedy only between logits that are equal for all purposes
_BLOCK = 256  # tokens per partial sum of the cumulative distribution
_LARGEST_TOPK = 256  # beyond, a full sort is faster
_BELOW_ONE = 1 - 2**-53
_MASK_64 = 2**64 - 1


def sample(logits: torch.Tensor, samplings: Sequence[Sampling]) -> list[int | None]:
    """One token id per row; None where the row has no finite maximum (NaN, infinite logits, or no token allowed).

    `min_p` applies before `top_k`, and `top_k` before `top_p`, which counts within the k tokens. Tokens that tie with
    the last one allowed are allowed too, so that the choice does not depend on the order of a sort.

    Args:
        logits: [rows, vocab_size], float32; not changed.
        samplings: one per row.
    """
    if not samplings:
        return []
    highest, best_ids = _highest(logits)
    # NaN passes for the highest, so the maximum alone tells whether a row can be used.
    usable = [isfinite(maximum) for maximum in highest.tolist()]
    shaped_rows = [row for row, sampling in enumerate(samplings) if is_shaped(sampling)]
    if shaped_rows:
        logits = logits.clone()
        for row in shaped_rows:
            shape_row(logits[row], samplings[row])
        highest, best_ids = _highest(logits)
        usable = [was and isfinite(maximum) for was, maximum in zip(usable, highest.tolist(), strict=True)]
    token_ids = [token_id if is_usable else None for token_id, is_usable in zip(best_ids.tolist(), usable, strict=True)]
    random_rows = [row for row, s in enumerate(samplings) if token_ids[row] is not None and not _is_greedy(s)]
    if random_rows:
        if len(random_rows) < len(samplings):
            logits, highest = logits[random_rows], highest[random_rows]
        drawn = _draw(logits, highest, [samplings[row] for row in random_rows])
        for row, token_id in zip(random_rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, NaN if there is any, and where it is; the first of several."""
    if logits.device.type != "cpu":
        highest, best_ids = logits.max(-1)
        return highest, best_ids
    best_ids = torch.from_numpy(logits.numpy().argmax(-1))  # a twelfth of the time of torch's own
    return logits.gather(-1, best_ids[:, None]).squeeze(-1), best_ids


def uniform(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, always the same for the same key."""
    state = 0
    for part in (seed, choice, position):
        state = _mix((state ^ part) & _MASK_64)
    return (state >> 11) * 2**-53


def _mix(state: int) -> int:
    """SplitMix64: one step of its counter and its finaliser, a bijection of 64-bit integers."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def _draw(logits: torch.Tensor, highest: torch.Tensor, samplings: list[Sampling]) -> list[int]:
    """Draws from softmax(logits / temperature), limited to the tokens that top_k and top_p allow."""
    rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)
    padded = logits.new_zeros(rows, num_blocks * _BLOCK)
    weights = padded[:, :vocab_size]  # unnormalised probabilities; the highest is 1
    temperature = torch.tensor([sampling.temperature for sampling in samplings], device=logits.device)
    torch.sub(logits, highest[:, None], out=weights)
    weights.div_(temperature[:, None]).exp_()
    for row, sampling in enumerate(samplings):
        if sampling.shaping is not None and sampling.shaping.min_p > 0:
            _zero_below(weights[row], np.float32(sampling.shaping.min_p))
    blocks = padded.view(rows, num_blocks, _BLOCK)
    for row, threshold in _thresholds(weights, blocks, samplings).items():
        _zero_below(weights[row], threshold)

    uniforms = [uniform(sampling.seed, sampling.choice, sampling.position) for sampling in samplings]
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    block, rest = _invert_cumulative(blocks.sum(-1).double(), target)
    inside, _ = _invert_cumulative(blocks[torch.arange(rows, device=logits.device), block].double(), rest)
    token_ids: list[int] = (block * _BLOCK + inside).tolist()
    return token_ids


def _zero_below(weights: torch.Tensor, threshold: np.float32) -> None:
    zero_up_to(weights, np.nextafter(threshold, np.float32(0)).item(), 0, inplace=True)  # what is equal stays


def _invert_cumulative(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index at which the cumulative share exceeds `target`, and how far `target` lies into its weight.

    An index of weight 0 is never chosen. Shapes: [rows, n] float64 and [rows] in [0, 1) -> [rows] and [rows] in [0, 1).
    """
    cumulative = weights.cumsum(-1)
    wanted = (target * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, wanted, right=True)
    own = weights.gather(1, index)
    before = cumulative.gather(1, index) - own
    share = ((wanted - before) / own).clamp(0, _BELOW_ONE)
    return index[:, 0], share[:, 0]


def _thresholds(weights: torch.Tensor, blocks: torch.Tensor, samplings: list[Sampling]) -> dict[int, np.float32]:
    """The least weight that top_k and top_p allow, for the rows that have a limit."""
    vocab_size = weights.shape[1]
    top_ks = {row: s.top_k for row, s in enumerate(samplings) if 0 < s.top_k < vocab_size}
    top_ps = [row for row, s in enumerate(samplings) if s.top_p < 1 and row not in top_ks]
    thresholds: dict[int, np.float32] = {}
    for row, heaviest in zip(top_ks, _heaviest(weights, list(top_ks), max(top_ks.values(), default=0)), strict=True):
        allowed = heaviest[: top_ks[row]]
        thresholds[row] = _nucleus(allowed, samplings[row].top_p * allowed.sum(dtype=np.float64))
    totals = blocks.sum(-1).double().sum(-1).tolist() if top_ps else []
    for row in top_ps:
        # Less than this no allowed token can weigh: before the last one is added, more than 1 - top_p of the total is
        # missing, and none of those that are missing weighs more than it does.
        least = (1 - samplings[row].top_p) * totals[row] / vocab_size
        thresholds[row] = _nucleus(_descending(weights[row], least), samplings[row].top_p * totals[row])
    return thresholds


def _nucleus(heaviest: np.ndarray, wanted: float) -> np.float32:
    """The weight at which the sum of the heaviest weights, in descending order, reaches `wanted`."""
    index = int(np.searchsorted(heaviest.cumsum(dtype=np.float64), wanted))
    result: np.float32 = heaviest[min(index, len(heaviest) - 1)]
    return result


def _heaviest(weights: torch.Tensor, rows: list[int], count: int) -> Iterable[np.ndarray]:
    """The `count` greatest weights of each of the given rows, or more, in descending order, on the host."""
    if count <= _LARGEST_TOPK:
        return weights[rows].topk(count, dim=-1).values.cpu().numpy()
    return (_descending(weights[row], 0.0) for row in rows)


def _descending(weights: torch.Tensor, least: float) -> np.ndarray:
    """A row's weights of `least` and more (a little less, for rounding), the heaviest first, on the host."""
    least *= 1 - 1e-6
    if weights.device.type == "cpu":  # numpy selects and sorts many times as fast as torch here
        values = weights.numpy()
        return np.sort(values[values >= np.float32(least)])[::-1]
    return weights[weights >= least].sort(descending=True).values.cpu().numpy()

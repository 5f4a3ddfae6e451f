"""Stage costs by formula: a decode curve, a factor per stage, and prompt tokens on top.

The shapes are those between which real stages lie: `flat` is bound by reading the weights, `linear` by computing,
`affine` by both, `moe` by reading the experts that a micro-batch touches, `step` by padded batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from fullbore.plan.loads import Load
from fullbore.plan.models import distinct_experts

CurveName = Literal["linear", "flat", "affine", "moe", "step"]

AFFINE_FIXED_REQUESTS = 4  # the fixed part of `affine` costs as much as so many requests
MOE_EXPERTS, MOE_EXPERTS_PER_TOKEN = 384, 8  # Kimi K2
STEP_REQUESTS = 4  # `step` rises after every so many requests


_SHAPES: dict[CurveName, Callable[[int], float]] = {
    "linear": lambda size: size,
    "flat": lambda size: 1.0,
    "affine": lambda size: AFFINE_FIXED_REQUESTS + size,
    "moe": lambda size: distinct_experts(size, MOE_EXPERTS, MOE_EXPERTS_PER_TOKEN),
    "step": lambda size: ceil(size / STEP_REQUESTS),
}


def decode_curve(name: CurveName, reference_size: int, reference_s: float) -> Callable[[int], float]:
    """The curve of that name, scaled to take `reference_s` for `reference_size` requests."""
    shape = _SHAPES[name]
    scale_s = reference_s / shape(reference_size)
    return lambda size: scale_s * shape(size)


@dataclass(frozen=True, kw_only=True)
class CurveCosts:
    """Stage i takes factor_i · (decode_s(decodes) + tokens · prefill_token_s + pairs · prefill_token_pair_s)."""

    decode_s: Callable[[int], float]  # decode_s(0): what a micro-batch costs however little is in it
    stage_factors: Sequence[float]
    prefill_token_s: float = 0.0
    prefill_token_pair_s: float = 0.0
    _memo: dict[tuple[int, int, int], tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, load: Load) -> Sequence[float]:
        key = load[:3]
        found = self._memo.get(key)
        if found is None:
            decodes, tokens, pairs = key
            unit_s = self.decode_s(decodes) + tokens * self.prefill_token_s + pairs * self.prefill_token_pair_s
            found = tuple(factor * unit_s for factor in self.stage_factors)
            if load.prefill_tokens == 0:  # few; those with prompt chunks hardly ever come twice
                self._memo[key] = found
        return found

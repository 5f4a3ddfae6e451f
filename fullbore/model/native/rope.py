"""Rotary position embedding: the angle by which each pair of a head's elements turns at each position."""

from __future__ import annotations

import math

import torch

from fullbore.model.native.config import RopeConfig

_FIRST_POSITIONS = 1024


class RotaryTables:
    """Cosines and sines, [positions, head_dim / 2] float32, for as many positions as were needed so far."""

    def __init__(self, config: RopeConfig, head_dim: int, device: str) -> None:
        frequencies, self._factor = frequencies_and_factor(config, head_dim)
        self._frequencies = frequencies.to(device)
        self.cosines = self.sines = torch.empty(0)
        self.require(_FIRST_POSITIONS)

    def require(self, positions: int) -> None:
        """Makes the tables at least that long."""
        if positions <= len(self.cosines):
            return
        length = 1 << (positions - 1).bit_length()
        steps = torch.arange(length, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(steps, self._frequencies)
        self.cosines = angles.cos() * self._factor
        self.sines = angles.sin() * self._factor


def frequencies_and_factor(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position for each pair [head_dim / 2], and a factor of all cosines and sines.

    Formulas: RoPE (arXiv 2104.09864), YaRN (2309.00071), Llama 3.1's smoothed scaling. "dynamic" scales only beyond the
    model's context length, where nothing is computed.

    Raises:
        KeyError: the config lacks a parameter of its type.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / torch.pow(config.theta, powers)
    parameters = config.parameters
    if config.kind == "linear":
        return plain / parameters["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow pairs are scaled, fast ones are not, those between are blended by their turns in the original context."""
    parameters = config.parameters
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = plain * float(parameters["original_max_position_embeddings"]) / (2 * math.pi)
    share_plain = torch.clamp((turns - low) / (high - low), 0, 1)
    return plain * share_plain + plain * (1 - share_plain) / float(parameters["factor"])


def _yarn(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """As Llama 3's, but blended over the index of the pair; longer contexts make attention sharper by a factor."""
    parameters = config.parameters
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.context_length / original

    def index_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first = index_of(parameters.get("beta_fast") or 32)
    last = index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    share_scaled = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain / factor * share_scaled + plain * (1 - share_scaled), _yarn_factor(config, factor)


def _yarn_factor(config: RopeConfig, factor: float) -> float:
    given = config.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    of_scores, of_all = config.parameters.get("mscale"), config.parameters.get("mscale_all_dim")

    def grow(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grow(of_scores) / grow(of_all) if of_scores and of_all else grow(1.0)

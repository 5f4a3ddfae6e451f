"""Sampling: the exact distribution, a pure function of one row and its key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fullbore.model import sampling as sampling_module
from fullbore.model.sampling import sample, uniform
from fullbore.scheduler.micro_batch import Sampling

NUM_DRAWS = 20_000


def make_sampling(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, choice: int = 0, position: int = 0
) -> Sampling:
    return Sampling(temperature, top_p, top_k, seed, choice, position)


def draw_many(logits: torch.Tensor, count: int = NUM_DRAWS, **settings: float) -> np.ndarray:
    """How often each token comes at positions 0 … count-1."""
    counts = np.zeros(len(logits), dtype=np.int64)
    for begin in range(0, count, 500):
        positions = range(begin, min(begin + 500, count))
        rows = logits.expand(len(positions), -1).contiguous()
        token_ids = sample(rows, [make_sampling(**settings, position=position) for position in positions])
        counts += np.bincount(token_ids, minlength=len(logits))
    return counts


def probabilities(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    return torch.softmax(logits.double() / temperature, -1).numpy()


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square at about p = 0.001, over the tokens expected at least 5 times; the rest are one bin."""
    expected = expected * counts.sum()
    assert not counts[expected == 0].any()
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    limit = freedom * (1 - 2 / (9 * freedom) + 3.1 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert chi_square < limit, f"chi-square {chi_square:.1f} > {limit:.1f} with {freedom} degrees of freedom"


# ------------------------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("varying", ["seed", "choice", "position"])
def test_uniform_is_uniform_along_each_part_of_the_key(varying: str) -> None:
    fixed = {"seed": 7, "choice": 0, "position": 3}
    numbers = np.array([uniform(**{**fixed, varying: value}) for value in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert_distributed(np.bincount((numbers * 32).astype(int), minlength=32), np.full(32, 1 / 32))
    # Neighbours are independent: pairs fill the square.
    cells = (numbers[:-1] * 6).astype(int) * 6 + (numbers[1:] * 6).astype(int)
    assert_distributed(np.bincount(cells, minlength=36), np.full(36, 1 / 36))


def test_uniform_differs_for_every_key() -> None:
    keys = [(seed, choice, position) for seed in range(12) for choice in range(12) for position in range(12)]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_uniform_never_changes() -> None:
    assert uniform(1234, 0, 56) == 0.9014452520658384, "seeded results must survive upgrades"


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
def test_uniform_takes_every_seed_of_64_bits(seed: int) -> None:
    assert 0 <= uniform(seed, 0, 0) < 1
    assert uniform(seed, 0, 0) != uniform(0, 0, 0)


# --------------------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.5, 1.5, -3.0, 0.3, -0.2, float("-inf"), 0.9])
    assert_distributed(draw_many(logits, temperature=temperature), probabilities(logits, temperature))


def test_draws_follow_the_softmax_of_a_vocabulary_of_many_blocks() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 2
    assert_distributed(draw_many(logits), probabilities(logits))


def test_each_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * 3
    cumulative = probabilities(logits, 0.9).cumsum()
    rows = logits.expand(400, -1).contiguous()
    token_ids = sample(rows, [make_sampling(0.9, seed=5, position=position) for position in range(400)])
    for position, token_id in enumerate(token_ids):
        number = uniform(5, 0, position)
        lower = cumulative[token_id - 1] if token_id else 0.0
        assert lower - 1e-6 <= number <= cumulative[token_id] + 1e-6


@pytest.mark.parametrize(("number", "expected"), [(0.0, 300), (1 - 2**-53, 700)])
def test_the_extreme_numbers_never_draw_a_token_of_probability_0(
    number: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "uniform", lambda *key: number)
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 300:701] = torch.randn(401, generator=torch.Generator().manual_seed(8))
    assert sample(logits, [make_sampling()]) == [expected]


def test_seeds_choices_and_positions_give_different_draws() -> None:
    logits = torch.zeros(1, 50_000)
    keys = [{"seed": 1}, {"seed": 2}, {"choice": 1}, {"choice": 2}, {"position": 1}, {"position": 2}]
    assert len({sample(logits, [make_sampling(**key)])[0] for key in keys}) == len(keys)


# ---------------------------------------------------------------------------------------------------- top-k, top-p


def test_top_k_allows_exactly_the_k_highest() -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(3))
    expected = probabilities(logits)
    expected[np.argsort(-expected)[20:]] = 0
    assert_distributed(draw_many(logits, top_k=20), expected / expected.sum())


@pytest.mark.parametrize(("scale", "top_p"), [(4.0, 0.7), (1.0, 0.5), (0.1, 0.97)], ids=["peaked", "medium", "flat"])
def test_top_p_allows_exactly_the_smallest_set(scale: float, top_p: float) -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(4)) * scale
    expected = probabilities(logits)
    order = np.argsort(-expected)
    size = int(np.searchsorted(expected[order].cumsum(), top_p)) + 1
    expected[order[size:]] = 0
    counts = draw_many(logits, top_p=top_p)
    assert_distributed(counts, expected / expected.sum())
    if scale == 0.1:
        assert size > 500, "the case must need more than the first candidates"
        assert (counts > 0).sum() == size


def test_top_p_counts_within_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two highest, 0.4 / 0.7 = 57 % are enough for 0.5; of the whole vocabulary 40 % would not be.
    assert draw_many(logits, 300, top_k=2, top_p=0.5).tolist() == [300, 0, 0, 0]
    assert (draw_many(logits, 300, top_p=0.5) > 0).tolist() == [True, True, False, False]


def test_top_p_reached_by_the_highest_alone() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    assert {sample(logits, [make_sampling(top_p=0.5, position=p)])[0] for p in range(100)} == {1}


def test_limits_beyond_the_vocabulary_limit_nothing() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    for position in range(50):
        free = sample(logits, [make_sampling(position=position)])
        assert sample(logits, [make_sampling(top_k=40, position=position)]) == free
        assert sample(logits, [make_sampling(top_k=1000, position=position)]) == free
        assert sample(logits, [make_sampling(top_k=-1, position=position)]) == free


# ----------------------------------------------------------------------------------------- greedy, batches, bad rows


def test_greedy_takes_the_first_of_the_highest() -> None:
    logits = torch.zeros(3, 1000)
    logits[:, 700] = logits[:, 333] = 5.0
    assert sample(logits, [make_sampling(0.0), make_sampling(1.0, top_k=1), make_sampling(1e-9)]) == [333] * 3


def test_low_temperature_draws_the_highest() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(6))
    best = int(logits.argmax())
    assert all(sample(logits, [make_sampling(2e-5, position=p)]) == [best] for p in range(20))


def test_a_row_alone_gives_what_it_gives_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(40, 1237, generator=generator) * 2  # odd, so that rows are aligned differently
    kinds = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.8, 1.0, 30), (0.8, 0.9, 0), (1.5, 0.5, 300), (1.0, 0.99, 0)]
    samplings = [make_sampling(*kinds[row % 6], seed=row, position=10 * row) for row in range(40)]
    together = sample(logits, samplings)
    alone = [sample(logits[row : row + 1].clone(), [samplings[row]])[0] for row in range(40)]
    assert together == alone
    order = torch.randperm(40, generator=generator).tolist()
    assert sample(logits[order], [samplings[row] for row in order]) == [together[row] for row in order]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 100), []) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[float("nan"), 1.0, 2.0], [float("inf"), 1.0, 2.0], [float("-inf")] * 3])
def test_unusable_logits_give_no_token_and_leave_other_rows_alone(bad: list[float], temperature: float) -> None:
    good = [1.0, 2.0, 3.0]
    samplings = [make_sampling(temperature, seed=row) for row in range(4)]
    token_ids = sample(torch.tensor([bad, good, bad, good]), samplings)
    expected = sample(torch.tensor([good] * 4), samplings)
    assert token_ids == [None, expected[1], None, expected[3]]

"""Masks, biases, penalties and min_p, against plain loops over one row."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fullbore.model.logprobs import logprobs, sampled_logprobs
from fullbore.model.sampling import sample
from fullbore.model.shaping import shape_row
from fullbore.scheduler.micro_batch import Sampling, Shaping
from fullbore.scheduler.shaper import LogitOptions, Shaper

VOCAB_SIZE = 203  # neither a multiple of 8 nor of 32


def row(seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def mask_of(allowed: Collection[int], num_bits: int = VOCAB_SIZE) -> bytes:
    mask = bytearray(-(-num_bits // 8))
    for token_id in allowed:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def shaping_of(
    prompt: Sequence[int] = (), output: Sequence[int] = (), stop: Collection[int] = (), **options: Any
) -> Shaping | None:
    shaper = Shaper(LogitOptions(**options), prompt, stop)
    for token_id in output:
        shaper.add(token_id)
    return shaper.shaping()


def shaped_by_loops(
    logits: Sequence[float],
    allowed: Collection[int],
    bias: Mapping[int, float],
    banned: Collection[int],
    repetition: float,
    presence: float,
    frequency: float,
    prompt: Sequence[int],
    output: Sequence[int],
) -> list[float]:
    """As vLLM's documentation describes it."""
    result = []
    for token_id, logit in enumerate(logits):
        if token_id not in allowed or token_id in banned:
            result.append(-math.inf)
            continue
        logit += bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        if token_id in output:
            logit -= frequency * output.count(token_id) + presence
        result.append(logit)
    return result


@pytest.mark.parametrize("seed", range(20))
def test_everything_at_once_against_loops(seed: int) -> None:
    chance = random.Random(seed)
    some = [chance.randrange(VOCAB_SIZE) for _ in range(60)]
    prompt, output = some[:35], some[25:]
    allowed = chance.sample(range(VOCAB_SIZE), 150)
    bias = {token_id: chance.uniform(-100, 100) for token_id in chance.sample(range(VOCAB_SIZE), 40)}
    repetition, presence, frequency = chance.uniform(0.3, 2), chance.uniform(-2, 2), chance.uniform(-2, 2)
    banned = [7, 150] if seed % 2 else []
    logits = row(seed)
    shaping = shaping_of(
        prompt,
        output,
        banned,
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        min_tokens=len(output) + 1,
    )
    before = logits.clone()
    expected = shaped_by_loops(logits.tolist(), allowed, bias, banned, repetition, presence, frequency, prompt, output)
    shape_row(logits, Sampling(1.0, 1.0, 0, 0, 0, 0, mask_of(allowed), shaping))
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-4)
    assert not torch.equal(before, logits)


@pytest.mark.parametrize(
    ("options", "is_raised"),
    [({"presence_penalty": -1.5}, True), ({"frequency_penalty": 1.5}, False), ({"repetition_penalty": 1.3}, False)],
    ids=str,
)
def test_each_penalty_alone(options: dict[str, Any], is_raised: bool) -> None:
    logits = row(1)
    before = logits.clone()
    shape_row(logits, Sampling(1.0, 1.0, 0, 0, 0, 0, None, shaping_of([3, 4], [5, 5, 6], **options)))
    changed = set(torch.nonzero(logits != before).flatten().tolist())
    assert changed == ({3, 4, 5, 6} if "repetition_penalty" in options else {5, 6})
    assert all((logits[token_id] > before[token_id]) == is_raised for token_id in changed)
    if "frequency_penalty" in options:
        assert (before - logits)[5].item() == pytest.approx(2 * (before - logits)[6].item(), rel=1e-4)


@pytest.mark.parametrize("num_bits", [8, 64, VOCAB_SIZE, 1024])
def test_a_mask_may_be_shorter_or_longer_than_the_vocabulary(num_bits: int) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    shape_row(logits, Sampling(0.0, 1.0, 0, 0, 0, 0, mask_of(range(0, num_bits, 2), num_bits)))
    allowed = torch.nonzero(logits == 0).flatten().tolist()
    assert allowed == list(range(0, min(num_bits, VOCAB_SIZE), 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    logits = row(2)[None]
    worst = logits[0].argsort()[:5].tolist()
    samplings = [Sampling(temperature, 1.0, 0, 0, 0, position, mask_of(worst)) for position in range(200)]
    drawn = set(sample(logits.expand(200, -1).contiguous(), samplings))
    assert drawn == ({worst[4]} if temperature == 0 else drawn & set(worst))
    assert sample(logits, [Sampling(temperature, 1.0, 0, 0, 0, 0, mask_of([]))]) == [None]


def test_a_bias_forces_and_forbids() -> None:
    logits = row(3)[None]
    best = int(logits.argmax())
    for bias, expected in [({9: 100.0}, {9}), ({best: -100.0}, {int(logits[0].topk(2).indices[1])})]:
        assert set(sample(logits, [Sampling(0.0, 1.0, 0, 0, 0, 0, None, shaping_of(logit_bias=bias))])) == expected


def test_min_p_allows_what_is_likely_enough_before_top_k_and_top_p() -> None:
    logits = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05]).log()[None].repeat(3000, 1)

    def drawn(min_p: float, top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> np.ndarray:
        shaping = shaping_of(min_p=min_p)
        samplings = [Sampling(temperature, top_p, top_k, 1, 0, k, None, shaping) for k in range(3000)]
        return np.bincount(np.array(sample(logits, samplings)), minlength=5) / 3000

    assert (drawn(0.3) > 0).tolist() == [True, True, True, False, False]
    assert drawn(0.3) == pytest.approx(np.array([0.4, 0.25, 0.2, 0, 0]) / 0.85, abs=0.04)
    assert (drawn(1.0) > 0).tolist() == [True, False, False, False, False]
    # Of what min_p leaves, 0.65 / 0.85 = 76 % are the first two; of everything, only 65 %.
    assert (drawn(0.3, top_p=0.7) > 0).tolist() == [True, True, False, False, False]
    assert (drawn(0.0, top_p=0.7) > 0).tolist() == [True, True, True, False, False]
    assert (drawn(0.3, top_k=2) > 0).tolist() == [True, True, False, False, False]
    # The share is that of the probabilities after temperature.
    assert (drawn(0.3, temperature=4.0) > 0).all()


def test_min_p_of_one_keeps_ties() -> None:
    logits = torch.tensor([[2.0, 2.0, 1.9]]).repeat(200, 1)
    samplings = [Sampling(1.0, 1.0, 0, 1, 0, k, None, shaping_of(min_p=1.0)) for k in range(200)]
    assert set(sample(logits, samplings)) == {0, 1}


def test_a_shaped_row_gives_alone_what_it_gives_in_a_batch_and_changes_nothing() -> None:
    logits = torch.stack([row(seed, 1237) for seed in range(24)])
    kinds: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"min_p": 0.1},
        {"logit_bias": {5: 4.0, 900: -3.0}},
        {"min_tokens": 9},
    ]
    output = [int(logits[0].argmax()), 5, 900]
    samplings = [
        Sampling(
            float(k % 2), 0.9, 0, k, 0, k, mask_of(range(0, 1237, 3), 1237) if k % 5 == 0 else None,
            shaping_of([1, 2], output, [3], **kinds[k % 6]),
        )
        for k in range(24)
    ]  # fmt: skip
    before = logits.clone()
    together = sample(logits, samplings)
    assert torch.equal(logits, before)
    assert together == [sample(logits[k : k + 1], [samplings[k]])[0] for k in range(24)]
    plain = [Sampling(*[getattr(s, name) for name in Sampling.__struct_fields__[:6]]) for s in samplings]
    assert together != sample(logits, plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_mask_does_not_hide_logits_that_are_not_finite(bad: float) -> None:
    logits = row(4)[None]
    logits[0, 100] = bad
    assert sample(logits, [Sampling(1.0, 1.0, 0, 0, 0, 0, mask_of(range(50)))]) == [None]


# ----------------------------------------------------------------------------------------------- log-probabilities


def test_logprobs_are_log_softmax() -> None:
    logits = torch.stack([row(seed) for seed in range(5)])
    expected = torch.log_softmax(logits.double(), -1)
    for num_top in (0, 1, 20):
        found = logprobs(logits, [7, 0, 202, 9, 9], num_top).unpack()
        assert [each.logprob for each in found] == pytest.approx(
            [expected[k, token_id].item() for k, token_id in enumerate([7, 0, 202, 9, 9])], abs=1e-5
        )
        for k, each in enumerate(found):
            values, ids = expected[k].topk(num_top)
            assert [token_id for token_id, _ in each.top] == ids.tolist()
            assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_are_those_before_temperature_and_penalties() -> None:
    logits = row(5)[None]
    plain = Sampling(1.0, 1.0, 0, 0, 0, 0, num_logprobs=3)
    shaped = Sampling(0.1, 0.5, 1, 0, 0, 0, mask_of([1, 2]), shaping_of(logit_bias={1: 50.0}), num_logprobs=3)
    (expected,), (found,) = (sampled_logprobs(logits, [sampling], [1]) for sampling in (plain, shaped))
    assert expected is not None
    assert expected == found


def test_logprobs_only_for_rows_that_ask_and_have_a_token() -> None:
    logits = torch.stack([row(6)] * 4)
    samplings = [Sampling(1.0, 1.0, 0, 0, 0, 0, num_logprobs=n) for n in (None, 2, 0, 2)]
    none, two, zero, without = sampled_logprobs(logits, samplings, [1, 1, 1, None])
    assert none is None
    assert without is None
    assert two is not None
    assert zero is not None
    assert [len(each.unpack()[0].top) for each in (two, zero)] == [2, 0]
    assert two.of_tokens == zero.of_tokens


def test_more_top_logprobs_than_tokens() -> None:
    [found] = logprobs(torch.zeros(1, 3), [1], 20).unpack()
    assert len(found.top) == 3


def test_packed_numbers_are_32_bits_wide() -> None:
    assert array("I").itemsize == array("f").itemsize == 4

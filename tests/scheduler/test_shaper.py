"""What travels with the plans for requests that ask for more than a draw, and what does not for all others."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from fullbore.engine.messages import Execute, encode, encode_plan, to_stage_decoder
from fullbore.errors import RequestError
from fullbore.scheduler.logprobs import Logprobs, join
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling, Shaping
from fullbore.scheduler.request import SamplingParams
from fullbore.scheduler.shaper import LogitOptions, Shaper


def ids_of(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def test_counts_are_those_of_all_tokens() -> None:
    chance = random.Random(1)
    prompt = [chance.randrange(50) for _ in range(100)]
    shaper = Shaper(LogitOptions(repetition_penalty=1.1, frequency_penalty=0.5), prompt, [])
    output: list[int] = []
    for _ in range(200):
        shaping = shaper.shaping()
        assert shaping is not None
        assert dict(zip(ids_of(shaping.output_ids), ids_of(shaping.output_counts), strict=True)) == Counter(output)
        assert ids_of(shaping.prompt_ids) == list(dict.fromkeys(prompt))
        output.append(chance.randrange(60))
        shaper.add(output[-1])


def test_the_prompt_is_sent_only_for_repetition() -> None:
    shaping = Shaper(LogitOptions(presence_penalty=1.0), [1, 2, 3], []).shaping()
    assert shaping is not None
    assert shaping.prompt_ids == b""


def test_stop_tokens_are_banned_until_there_are_enough_tokens() -> None:
    shaper = Shaper(LogitOptions(min_tokens=2), [1], {9, 4})
    banned = []
    for token_id in range(4):
        shaping = shaper.shaping()
        banned.append(None if shaping is None else ids_of(shaping.banned_ids))
        shaper.add(token_id)
    assert banned == [[4, 9], [4, 9], None, None]


def test_nothing_is_made_for_default_parameters() -> None:
    assert SamplingParams().logit_options is None
    assert (
        SamplingParams(temperature=0.3, top_p=0.5, top_k=4, seed=1, stop=("a",), n=3, logprobs=2).logit_options is None
    )
    changed: list[dict[str, Any]] = [
        {"min_p": 0.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 2.0},
        {"logit_bias": {1: 1.0}}, {"min_tokens": 1},
    ]  # fmt: skip
    for parameters in changed:
        options = SamplingParams(**parameters).logit_options
        assert options is not None
        shaping = Shaper(options, [5], [6]).shaping()
        assert shaping is not None
        assert shaping != Shaping()


def run_of(shaping: Shaping | None = None, mask: bytes | None = None, request_id: int = 1) -> Run:
    return Run(request_id, 0, 100, [17], list(range(7)), Sampling(1.0, 1.0, 0, 5, 0, 101, mask, shaping))


def test_a_default_request_costs_four_bytes_more_than_its_own_fields() -> None:
    """No mask, no shaping, no log-probabilities of token and prompt: a byte of each."""
    run = run_of()
    assert run.sampling is not None
    own = [1, 0, 100, [17], list(range(7)), [1.0, 1.0, 0, 5, 0, 101]]
    assert len(msgspec.msgpack.encode(run)) == len(msgspec.msgpack.encode(own)) + 4


def test_only_the_last_stage_gets_masks_and_shaping() -> None:
    plain = MicroBatch(1, [run_of(), run_of(request_id=2)], "slot-freed", 0.0)
    for_earlier, for_last = encode_plan(plain)
    assert for_earlier is for_last

    shaping = Shaping(bias_ids=b"1234" * 100, bias_values=b"5678" * 100)
    large = MicroBatch(1, [run_of(), run_of(shaping), run_of(mask=b"x" * 500)], "slot-freed", 0.0)
    for_earlier, for_last = encode_plan(large)
    assert for_last == encode(Execute(large))
    assert len(for_earlier) < 200 < 1000 < len(for_last)
    received = to_stage_decoder.decode(for_earlier)
    assert isinstance(received, Execute)
    assert received.micro_batch == MicroBatch(1, [run_of(), run_of(), run_of()], "slot-freed", 0.0)
    assert large.runs[1].sampling is not None
    assert large.runs[1].sampling.shaping is shaping


def test_logprobs_are_joined_in_order() -> None:
    parts = [
        Logprobs(array("f", [k]).tobytes(), array("I", [k, k + 1]).tobytes(), array("f", [k, -k]).tobytes())
        for k in range(3)
    ]
    whole = join(parts).unpack()
    assert whole == [part.unpack()[0] for part in parts]
    assert all(first.logprob < second.logprob for first, second in pairwise(whole))
    assert join([]).unpack() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 129), ("min_p", -0.1), ("min_p", float("nan")), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
        ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21), ("min_tokens", -1),
        ("logit_bias", {1: 100.5}), ("logit_bias", {1: float("nan")}), ("logit_bias", {"1": 1.0}),
        ("logit_bias", dict.fromkeys(range(5000), 1.0)), ("stop_token_ids", ["1"]),
        ("stop_token_ids", tuple(range(5000))), ("n", 1.0), ("logprobs", True),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_parameters_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{name: value}).validate()
    assert raised.value.param == name
    assert name in str(raised.value)


def test_min_tokens_and_a_grammar() -> None:
    """Where the grammar allows nothing but the end there would be no token left."""
    with pytest.raises(RequestError, match="grammar") as raised:
        SamplingParams(min_tokens=1, grammar="{}").validate()
    assert raised.value.param == "min_tokens"


def test_min_tokens_beyond_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5).validate()
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5).validate()

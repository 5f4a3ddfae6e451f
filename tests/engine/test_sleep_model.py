from __future__ import annotations

import pytest
import torch

from fullbore.engine.sleep_model import expected_tokens, parse
from fullbore.engine.sleep_runner import SleepRunner
from fullbore.errors import ModelError
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

MODEL = parse("sleep://layers=4,layer_ms=0")


def greedy(position: int) -> Sampling:
    return Sampling(0.0, 1.0, 0, 0, 0, position)


def stages(partition: tuple[int, ...]) -> list[SleepRunner]:
    runners = [SleepRunner(MODEL, stage, partition, 2) for stage in range(len(partition))]
    for runner in runners:
        runner.allocate_kv(8)
    return runners


@pytest.mark.parametrize(
    "model",
    [
        "sleep://layer=3",
        "sleep://layers=x",
        "sleep://layers",
        "sleep://layers=0",
        "sleep://layers=99999999999999999999",
        "sleep://layer_ms=-1",
        "sleep://layer_ms=nan",
        "sleep://load_ms=inf",
        "sleep://vocab=0",
        "sleep://hidden=3",
        "sleep://context=-9",
        "sleep://fail=no-such-thing",
    ],
)
def test_bad_settings_are_refused(model: str) -> None:
    with pytest.raises(ModelError, match="not a valid sleep model"):
        parse(model)


def test_tokens_depend_on_every_token_and_its_place() -> None:
    first = expected_tokens(MODEL, [1, 2, 3, 4], 6)
    assert first == expected_tokens(MODEL, [1, 2, 3, 4], 6)
    assert expected_tokens(MODEL, [2, 1, 3, 4], 6) != first
    assert expected_tokens(MODEL, [1, 2, 3], 6) != first
    assert expected_tokens(MODEL, [1, 2, 3, 4], 6, seed=1) != expected_tokens(MODEL, [1, 2, 3, 4], 6, seed=2)


def test_stages_compute_the_expected_token() -> None:
    first, last = stages((1, 3))
    micro_batch = MicroBatch(0, [Run(7, 0, 0, [5, 6, 7], [3, 1], greedy(3))], "request-arrived", 0.0)
    tokens = last.sample(micro_batch, last.forward(micro_batch, first.forward(micro_batch, None)))
    assert tokens == expected_tokens(MODEL, [5, 6, 7], 1)


def test_wrong_data_is_found_out() -> None:
    first, last = stages((1, 3))
    prompt = MicroBatch(0, [Run(7, 0, 0, [5, 6, 7], [3, 1], greedy(3))], "request-arrived", 0.0)
    hidden = first.forward(prompt, None)
    with pytest.raises(RuntimeError, match="did not pass"):
        last.forward(prompt, hidden - torch.tensor([0.0, 0.0, 1.0] + [0.0] * 13))
    other = MicroBatch(1, [Run(7, 0, 1, [5, 6, 7], [3, 1], greedy(4))], "request-arrived", 0.0)
    with pytest.raises(RuntimeError, match="not in place"):
        last.forward(other, hidden)
    last.forward(prompt, hidden.clone())

    decode = MicroBatch(1, [Run(7, 0, 3, [9], [3, 1], greedy(4))], "token-returned", 0.0)
    hidden = first.forward(decode, None)
    other = MicroBatch(1, [Run(7, 0, 3, [9], [3, 2], greedy(4))], "token-returned", 0.0)
    with pytest.raises(RuntimeError, match="never written"):
        last.forward(other, hidden.clone())
    other = MicroBatch(1, [Run(7, 0, 3, [9], [1, 1], greedy(4))], "token-returned", 0.0)
    with pytest.raises(RuntimeError, match="differs from stage 0"):
        last.forward(other, hidden.clone())


def test_masks_are_obeyed() -> None:
    first, last = stages((1, 3))
    allowed = {3, 8, 500}
    mask = bytearray(125)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    drawn = set()
    for position in range(3, 40):
        sampling = Sampling(1.0, 1.0, 0, position, 0, 3, bytes(mask))
        micro_batch = MicroBatch(0, [Run(7, 0, 0, [5, 6, 7], [3, 1], sampling)], "request-arrived", 0.0)
        drawn.update(last.sample(micro_batch, last.forward(micro_batch, first.forward(micro_batch, None))))
    assert drawn == allowed

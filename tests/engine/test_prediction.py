"""The simulator, fed with stage times of the same run, predicts the engine's tokens/s: both have one scheduler."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from engine_helpers import config

from fullbore.engine.client import EngineClient

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("pp_size", [4, 8])
def test_tokens_per_second_are_predicted(pp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping stages overlap also where there are fewer cores than stages."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    prediction = importlib.import_module("prediction")
    with EngineClient.start(config(pp_size, f"sleep://layers={pp_size},layer_ms=12,token_ms=1")) as client:
        for concurrency in (1, 4, 8, 16):
            # A neighbour's burst in the middle of a run is nobody's to predict: one of two runs must be right.
            error = prediction.compare(client, concurrency, 16, 24).error
            if abs(error) >= 0.1:
                error = prediction.compare(client, concurrency, 16, 24).error
            assert abs(error) < 0.1, concurrency

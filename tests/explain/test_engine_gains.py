"""Real engines, started wrong on purpose: the verdict from the recording, and the gain that the fix then brings."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    "name", ["one client", "all in one micro-batch", "bad layer split", "slow link", "tiny KV cache"]
)
def test_verdict_and_gain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping stages overlap also where there are fewer cores than stages."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("explain_gains")
    fault = next(fault for fault in benchmark.FAULTS if fault.name == name)
    outcome = benchmark.try_out(fault)
    # A neighbour's burst in the middle of a run is nobody's to predict: one of two must be right.
    if outcome.verdict != fault.verdict or abs(outcome.error) > 0.2:
        outcome = benchmark.try_out(fault)
    assert outcome.verdict == fault.verdict
    assert outcome.measured > 1.2
    assert abs(outcome.error) <= 0.2, outcome

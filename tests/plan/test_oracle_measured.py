"""Published measurements: the share of statements that hold. `python tests/plan/measured_oracle.py` lists the rest."""

from __future__ import annotations

import re

import pytest
from measured_oracle import Verdict, check, read, share, statements, tensorrt_statements

ROWS = read("measured.csv")


def modelled(rows: list[dict[str, str]], pattern: str = "") -> list[Verdict]:
    verdicts = [check(row) for row in rows if re.search(pattern, row["id"])]
    return [each for each in verdicts if not each.why]


def failures(verdicts: list[Verdict]) -> list[str]:
    return [f"{each.row['id']}: {each.predicted}" for each in verdicts if not each.holds]


def test_ratios_and_orders_of_other_engines_hold() -> None:
    verdicts = modelled(statements(ROWS, ("ratio", "order", "bound")), "^(?!trt)")
    assert len(verdicts) >= 20
    assert share(verdicts) >= 0.9, failures(verdicts)


def test_values_that_were_measured_hold() -> None:
    verdicts = modelled(statements(ROWS, ("value",)))
    assert len(verdicts) >= 20
    # What fails has more context than the KV cache holds: those requests shared their prompts.
    assert share(verdicts) >= 0.85, failures(verdicts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ratios_and_orders_of_nvidias_tables_hold() -> None:
    verdicts = modelled(tensorrt_statements())
    assert share(verdicts) >= 0.9, failures(verdicts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_absolute_throughputs_of_nvidias_tables_are_within_their_tolerance() -> None:
    verdicts = modelled(statements(ROWS, ("value",), ("anchor",)), "^trt")
    assert share(verdicts) >= 0.9, failures(verdicts)

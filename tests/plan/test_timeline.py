"""Timelines as text."""

from __future__ import annotations

import pytest
from plan_helpers import pipeline, run

from fullbore.plan.simulation_report import WIDTH, drawing
from fullbore.plan.timeline import Bar, bars, draw, ruler
from fullbore.plan.workload import closed_loop


def test_each_column_shows_who_had_most_of_it() -> None:
    chart = [Bar(0, 0.0, 2.0, "A"), Bar(0, 2.0, 2.6, "b"), Bar(0, 2.6, 4.0, "c"), Bar(1, 2.0, 3.4, "A")]
    assert draw(chart, 2, 0.0, 5.0, 5) == ["AAbc.", "..A.."]


def test_a_part_of_the_run_can_be_drawn() -> None:
    chart = [Bar(0, 0.0, 2.0, "a"), Bar(0, 3.0, 9.0, "b")]
    assert draw(chart, 1, 1.0, 5.0, 8) == ["aa..bbbb"]


def test_ruler_has_round_times_at_their_columns() -> None:
    line = ruler(0.0, 0.3, 60)  # 5 ms a column
    assert line.index("|0 ms") == 0
    assert line.index("|100 ms") == 20
    assert line.index("|200 ms") == 40
    assert len(line) == 60
    assert ruler(0.105, 0.405, 60).index("|200 ms") == 19


def test_prompts_are_upper_case() -> None:
    result = run(pipeline([1.0, 1.0]), closed_loop(1, 1, 64, 3), record_until_s=1e9)
    assert [bar.letter for bar in bars(result.spans, result.driver_records) if bar.stage == 0] == ["A", "b", "c"]


def test_picture_of_a_lone_request() -> None:
    """One request on two stages: never both busy."""
    result = run(pipeline([1.0, 1.0]), closed_loop(1, 1, 64, 3), record_until_s=1e9)
    rows = draw(bars(result.spans, result.driver_records), 2, 0.0, 6.0, 6)
    assert rows == ["A.b.c.", ".A.b.c"]


@pytest.mark.parametrize("num_stages", [1, 8, 64])
def test_drawings_fit_a_terminal(num_stages: int) -> None:
    result = run(pipeline([1.0] * num_stages), closed_loop(4, 8, 64, 3), record_until_s=1e9)
    lines = drawing(result, 0.0, 30.0).splitlines()
    assert len(lines) == num_stages + 2
    assert max(len(line) for line in lines) == WIDTH

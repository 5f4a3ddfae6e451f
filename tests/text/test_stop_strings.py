"""Stop strings against the plain definition on the whole text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.text.stop_strings import StopMatcher


def text_before_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition: the stop string complete first ends the text; of several at one character, the longest."""
    for end in range(1, len(text) + 1):
        complete = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def push_all(matcher: StopMatcher, text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [matcher.push(text[start:end]) for start, end in itertools.pairwise(borders)]


letters = st.text("ab", max_size=30)  # few letters: many near misses and overlaps
patterns = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


@given(letters, patterns, st.lists(st.integers(0, 100), max_size=10))
@settings(max_examples=1000, deadline=None)
def test_equals_the_definition_wherever_the_text_is_cut(text: str, stop: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stop)
    emitted = "".join(push_all(matcher, text, cuts))
    expected, is_stopped = text_before_stop(text, stop)
    assert (matcher.found is not None) == is_stopped
    assert emitted + matcher.flush() == expected


@given(letters, patterns)
@settings(max_examples=500, deadline=None)
def test_emits_as_early_as_is_safe(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    emitted = ""
    for index, character in enumerate(text):
        emitted += matcher.push(character)
        if matcher.found is not None:
            return
        seen = text[: index + 1]
        held = len(seen) - len(emitted)
        could_begin = [n for pattern in stop for n in range(1, len(pattern)) if seen.endswith(pattern[:n])]
        assert held == max(could_begin, default=0)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.push("three") == ""
    assert matcher.flush() == ""
    assert matcher.found == "END"


def test_a_false_beginning_is_given_back() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n") == "a"
    assert matcher.push("b") == "\nb"


@pytest.mark.timeout(20)
def test_time_is_linear_for_the_worst_pattern() -> None:
    # Quadratic work would be 2 * 10**10 comparisons.
    matcher = StopMatcher(["a" * 100_000 + "b"])
    emitted = "".join(matcher.push("a" * 1000) for _ in range(200))
    assert len(emitted) + len(matcher.flush()) == 200_000

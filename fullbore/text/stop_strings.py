"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text before the stop string that is complete first; of several complete at one character, the longest.

    Wherever the pieces are cut, the same text comes out, and each character as early as is safe: held back is only what
    may still turn out to be the beginning of a stop string. Time is linear in the text (Knuth, Morris, Pratt).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: the strings to look for, none of them empty."""
        self._patterns = list(stop)
        self._borders = [_borders(pattern) for pattern in stop]
        self._matched = [0] * len(self._patterns)  # per pattern: how many of its characters end the text so far
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Adds text; returns what can be emitted. After a stop string is found, always ""."""
        if self.found is not None:
            return ""
        if not self._patterns:
            return text
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = self._advance(text[end - 1])
            if complete is not None:
                self.found = complete
                self._held = ""
                return text[: end - len(complete)]
        num_safe = len(text) - max(self._matched)
        self._held = text[num_safe:]
        return text[:num_safe]

    def flush(self) -> str:
        """The text held back, to be called when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        longest = None
        for index, pattern in enumerate(self._patterns):
            length = self._matched[index]
            while length and pattern[length] != character:
                length = self._borders[index][length - 1]
            length += pattern[length] == character
            if length == len(pattern):
                longest = pattern if longest is None or len(pattern) > len(longest) else longest
            self._matched[index] = length
        return longest


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = borders[length - 1]
        length += pattern[length] == pattern[index]
        borders[index] = length
    return borders

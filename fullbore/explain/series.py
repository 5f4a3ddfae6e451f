"""Statistics of arbitrarily many numbers in constant memory."""

from __future__ import annotations

_KEPT = 512


class Series:
    """Numbers in the order they came. Count, mean and extremes are exact; quantiles come from an even sample."""

    __slots__ = ("_kept", "_skip", "_stride", "count", "first", "last", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = float("inf")
        self.maximum = float("-inf")
        self.first: float | None = None
        self.last: float | None = None
        self._kept: list[float] = []
        self._stride = 1
        self._skip = 0

    def add(self, value: float) -> None:
        if self.first is None:
            self.first = value
        self.last = value
        self.count += 1
        self.total += value
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        if self._skip:
            self._skip -= 1
            return
        self._kept.append(value)
        if len(self._kept) == _KEPT:
            self._kept = self._kept[::2]
            self._stride *= 2
        self._skip = self._stride - 1

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def mean(self) -> float:
        """Raises ZeroDivisionError on an empty series."""
        return self.total / self.count

    def quantile(self, share: float) -> float:
        """The value below which `share` of the numbers lie; of an empty series NaN."""
        if not self._kept:
            return float("nan")
        ordered = sorted(self._kept)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def sample(self) -> list[float]:
        """An even sample of at most 512 numbers, in order."""
        return list(self._kept)

"""What a micro-batch costs on each stage, learned from the stages' own records.

Decode: s_i(b, T) = drift · (curve_i(b) + k_i·T), where the curve goes through points (requests, seconds) with linear
interpolation, T is the cached tokens that the requests read together, and drift follows what all sizes have in common
(a busier machine). Without T, long contexts would look like a dearer fixed part, which splitting would have to pay
again in every micro-batch. Prefill: seconds = c + b·x + a·q, where x is the chunk's tokens and q = (L+x)² - L² its
attention work after L earlier tokens (the a·L² + b·L + c of SGLang's dynamic chunking, summed over a micro-batch's
chunks).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_NEW_POINT_SAMPLES = 8  # a size's own point follows its first records; later ones move the drift
_DRIFT_WEIGHT = 0.05
_OVERHEAD_WEIGHT = 0.1
_FIT_DECAY = 0.995
_MIN_FIT_SAMPLES = 8
_RECONSIDER_EVERY = 16  # micro-batches
_MOVED = 0.01


@dataclass
class DecodeCurve:
    """Seconds of one stage for a decode micro-batch, by number of requests and what they read from the KV cache."""

    sizes: list[int] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)  # without reading any cached token
    samples: dict[int, int] = field(default_factory=dict)
    context_token_s: float = 0.0
    drift: float = 1.0

    def add_point(self, size: int, seconds: float) -> None:
        """Sets the time of one size, as measured by a probe."""
        if size not in self.seconds:
            insort(self.sizes, size)
        self.seconds[size] = seconds
        self.samples[size] = _NEW_POINT_SAMPLES

    def add_context_point(self, size: int, context_tokens: int, seconds: float) -> None:
        """Sets what a cached token costs, as a probe measured it for a size that is known without any."""
        self.context_token_s = max(seconds - self.at(size), 0.0) / context_tokens

    def observe(self, size: int, seconds: float, context_tokens: int = 0) -> None:
        """Takes in one record of serving."""
        reading_s = self.context_token_s * context_tokens
        count = self.samples.get(size, 0)
        if count < _NEW_POINT_SAMPLES:
            mean = self.seconds.get(size, 0.0)
            if count == 0:
                insort(self.sizes, size)
            # Never less than half: if reading costs less than was thought, the drift will tell.
            own_s = max(seconds / self.drift - reading_s, seconds / self.drift / 2)
            self.seconds[size] = mean + (own_s - mean) / (count + 1)
            self.samples[size] = count + 1
        else:
            ratio = seconds / max(self.seconds[size] + reading_s, 1e-12)
            # A lone outlier (a page fault, a neighbour's burst) must not move the curve by more than its weight.
            ratio = min(max(ratio, self.drift / 2), self.drift * 2)
            self.drift += _DRIFT_WEIGHT * (ratio - self.drift)

    def at(self, size: int, context_tokens: float = 0) -> float:
        """Seconds for `size` requests that read `context_tokens` together."""
        return (self._without_context(size) + self.context_token_s * context_tokens) * self.drift

    def _without_context(self, size: int) -> float:
        """Between the points on straight lines; beyond them, along the last segment."""
        sizes = self.sizes
        if len(sizes) == 1:
            return self.seconds[sizes[0]]
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        if size == high:
            return self.seconds[high]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        value = self.seconds[low] + slope * (size - low)
        if not low < size < high:  # a noisy segment must not extrapolate to nothing
            value = max(value, min(self.seconds.values()) / 2)
        return value


def sizes_to_measure(most_requests: int) -> list[int]:
    """1, 2, 4, 8, … `most_requests`, then 3, 6, 12, … between them: whenever time is up, what is known reaches far."""
    powers = [1]
    while 2 * powers[-1] < most_requests:
        powers.append(2 * powers[-1])
    middles = [power + power // 2 for power in powers[1:] if power + power // 2 < most_requests]
    return powers + [most_requests] * (most_requests > 1) + middles


class PrefillFit:
    """Least squares of seconds over (1, x, q), older records fading."""

    def __init__(self) -> None:
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._vector = [0.0] * 3
        self.samples = 0
        self._fitted_samples = 0
        self.base_s = 0.0
        self.per_token_s = 0.0
        self.per_token_pair_s = 0.0

    def observe(self, tokens: int, token_pairs: float, seconds: float) -> None:
        features = (1.0, tokens / 1e3, token_pairs / 1e6)  # scaled, so that the equations stay well-conditioned
        for i in range(3):
            self._vector[i] = self._vector[i] * _FIT_DECAY + features[i] * seconds
            for j in range(3):
                self._matrix[i][j] = self._matrix[i][j] * _FIT_DECAY + features[i] * features[j]
        self.samples += 1

    @property
    def is_known(self) -> bool:
        return self.samples >= _MIN_FIT_SAMPLES and self.per_token_s > 0

    def chunk_s(self, tokens: float, context: int = 0) -> float:
        """Seconds that a chunk of `tokens` after `context` earlier tokens adds, without the fixed part."""
        return self.per_token_s * tokens + self.per_token_pair_s * ((context + tokens) ** 2 - context**2)

    def refit(self) -> None:
        """Least squares with no negative coefficient (costs cannot be less): the best of all choices of terms."""
        if self.samples == self._fitted_samples:
            return
        self._fitted_samples = self.samples
        best = 0.0
        for terms in ((0, 1, 2), (0, 1), (1, 2), (1,)):
            solution = _solve(self._matrix, self._vector, terms)
            if solution is None or min(solution) < 0:
                continue
            explained = sum(x * self._vector[term] for x, term in zip(solution, terms, strict=True))
            if explained > best:  # the squares' sum less the squared errors' sum
                best = explained
                coefficients = dict(zip(terms, solution, strict=True))
                self.base_s = coefficients.get(0, 0.0)
                self.per_token_s = coefficients.get(1, 0.0) / 1e3
                self.per_token_pair_s = coefficients.get(2, 0.0) / 1e6


def _solve(matrix: list[list[float]], vector: list[float], terms: tuple[int, ...]) -> list[float] | None:
    """Solves the normal equations restricted to `terms` by elimination; None if they do not determine the terms."""
    rows = [[matrix[i][j] for j in terms] + [vector[i]] for i in terms]
    size = len(terms)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        scale = max(matrix[t][t] for t in terms)
        if abs(rows[pivot][column]) <= 1e-9 * scale:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(size):
            if r != column:
                factor = rows[r][column] / rows[column][column]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def _towards(mean: float, value: float) -> float:
    """Exponential average; the first value counts in full."""
    value = max(value, 0.0)
    return value if mean == 0 else mean + _OVERHEAD_WEIGHT * (value - mean)


class CostModel:
    """Estimates for all stages of one pipeline."""

    def __init__(self, num_stages: int) -> None:
        self.decode = [DecodeCurve() for _ in range(num_stages)]
        self.prefill = [PrefillFit() for _ in range(num_stages)]
        self.plan_s = 0.0  # from launch to the plan's arrival at stage 0
        self.hops_s = [0.0] * num_stages  # transfer into each stage
        self.return_s = 0.0  # from the last stage's sample to the driver
        self.version = 0  # changes when estimates moved enough to reconsider decisions
        self._considered: list[float] = []  # the estimates when `version` last changed
        self._observed = 0
        self._memo: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def knows_decode(self) -> bool:
        """At least two sizes known on every stage: sizes can be compared."""
        return all(len(curve.sizes) >= 2 for curve in self.decode)

    @property
    def knows_prefill(self) -> bool:
        return all(fit.is_known for fit in self.prefill)

    @property
    def overhead_s(self) -> float:
        """Σh + c: what a micro-batch's round trip takes beyond the stages' own times."""
        return self.plan_s + sum(self.hops_s) + self.return_s

    def seed_decode(self, stage: int, num_requests: int, seconds: float) -> None:
        """A probe's measurement of one stage."""
        self.decode[stage].add_point(num_requests, seconds)
        self._reconsider()

    def seed_context(self, stage: int, num_requests: int, context_tokens: int, seconds: float) -> None:
        """A probe's measurement of requests that read `context_tokens` together."""
        self.decode[stage].add_context_point(num_requests, context_tokens, seconds)
        self._reconsider()

    def observe(
        self, stage: int, num_decodes: int, tokens: int, token_pairs: float, seconds: float, context_tokens: int = 0
    ) -> None:
        """One stage's record of a micro-batch.

        It has `num_decodes` decodes, which read `context_tokens` together, and prefill chunks of `tokens` in all.
        """
        curve = self.decode[stage]
        if tokens == 0:
            curve.observe(num_decodes, seconds, context_tokens)
        elif num_decodes == 0:
            self.prefill[stage].observe(tokens, token_pairs, seconds)
        elif curve.sizes:
            # What the chunk added: keep the fixed part in, it is paid once whether decodes ride along or not.
            added = seconds - curve.at(num_decodes, context_tokens) + self.prefill[stage].base_s
            if added > 0:
                self.prefill[stage].observe(tokens, token_pairs, added)
        self._observed += 1
        if self._observed % (_RECONSIDER_EVERY * len(self.decode)) == 0:
            self._reconsider()

    def observe_plan(self, seconds: float, is_exact: bool) -> None:
        """Inexact: it took no longer than `seconds`; that tells something only if it was thought to take longer."""
        if is_exact or seconds < self.plan_s:
            self.plan_s = _towards(self.plan_s, seconds)

    def observe_hop(self, stage: int, seconds: float, is_exact: bool) -> None:
        """The transfer into `stage`; inexact as above."""
        if is_exact or seconds < self.hops_s[stage]:
            self.hops_s[stage] = _towards(self.hops_s[stage], seconds)

    def observe_return(self, seconds: float) -> None:
        self.return_s = _towards(self.return_s, seconds)

    def decode_s(self, num_requests: int, context: int = 0) -> tuple[float, float]:
        """(Σ_i s_i, max_i s_i) for a decode micro-batch of that many requests of `context` tokens each.

        Callers round `context`: every value is remembered until the estimates move.
        """
        found = self._memo.get((num_requests, context))
        if found is None:
            times = [curve.at(num_requests, num_requests * context) for curve in self.decode]
            found = self._memo[num_requests, context] = (sum(times), max(times))
        return found

    def decode_points(self) -> list[dict[int, float]]:
        """For each stage: requests -> seconds, for the sizes that were measured."""
        return [{size: curve.at(size) for size in curve.sizes} for curve in self.decode]

    def slowest_prefill(self) -> PrefillFit:
        """The fit of the stage that gates prefill."""
        return max(self.prefill, key=lambda fit: fit.per_token_s)

    def fixed_s(self) -> float:
        """What a micro-batch of prompt chunks costs however few tokens are in it; 0 if that is not known.

        Chunks of one size do not tell the fixed part from the rest, so the cheapest decode is a second witness.
        """
        base_s = max(fit.base_s for fit in self.prefill)
        if all(curve.sizes for curve in self.decode):
            base_s = max(base_s, self.decode_s(1)[1])
        return base_s

    def _reconsider(self) -> None:
        """Refits, and starts a new version if an estimate has moved so far that decisions may change."""
        for fit in self.prefill:
            fit.refit()
        points = [curve.drift * curve.seconds[size] for curve in self.decode for size in curve.sizes]
        round_trip_s = self.overhead_s + sum(curve.at(curve.sizes[0]) for curve in self.decode if curve.sizes)
        estimates = [round_trip_s, *points]
        known = self._considered
        if len(estimates) != len(known) or any(abs(x - y) > _MOVED * y for x, y in zip(estimates, known, strict=True)):
            self._considered = estimates
            self.version += 1
            self._memo.clear()

"""From what happened in a simulated run to its figures, over the whole run and over its steady part.

The steady window leaves out fill and drain. In a closed loop it opens when every client has got a first token and the
first answer is complete (by then the pipe is full, and from here to the close lie whole generations of requests), and
closes when a client first finds no request left to send. If all requests are of the first generation there is no such
time; the window then opens as soon as every client has got a first token. With arrivals it lasts from the end of the
first tenth of the requests to the last arrival. A run in which none of this happens in that order has no steady part;
its figures are the whole run's.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fullbore.telemetry.spans import DriverRecord, StageRecord


@dataclass(frozen=True)
class Latency:
    """Seconds; all 0 if there was nothing to measure."""

    mean_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was seen between two moments of a run."""

    start_s: float
    end_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts count when their first output token comes
    ttft: Latency  # of first tokens that came in this time; of all if none did
    itl: Latency
    stage_busy: list[float]  # fraction of the time, per stage
    micro_batches_in_flight_mean: float  # between launch and result applied, over time
    sizes: dict[int, int]  # requests in a micro-batch -> launches
    prefill_share: float  # of launches with prompt tokens

    @property
    def micro_batches(self) -> int:
        return sum(self.sizes.values())

    @property
    def requests_per_micro_batch(self) -> float:
        return sum(size * number for size, number in self.sizes.items()) / max(self.micro_batches, 1)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Figures, and records as far as they were wanted."""

    steady: Figures
    whole: Figures
    spans: list[StageRecord]
    driver_records: list[DriverRecord]
    preemptions: int = 0


@dataclass(frozen=True)
class Moment:
    """How busy every stage had been up to a time."""

    time_s: float
    busy_s: Sequence[float]


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted values, linear between neighbours."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def latency(values: Sequence[float]) -> Latency:
    if not values:
        return Latency()
    ordered = sorted(values)
    return Latency(sum(ordered) / len(ordered), quantile(ordered, 0.5), quantile(ordered, 0.99))


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Meter:
    """Takes in the events of one run, in order of time."""

    num_tokens: int = 0
    _token_s: array[float] = field(default_factory=_doubles)  # of tokens that are not a request's first
    _gap_s: array[float] = field(default_factory=_doubles)  # … and the time since the one before
    _first_token_s: array[float] = field(default_factory=_doubles)
    _ttft_s: array[float] = field(default_factory=_doubles)
    _first_prompt_tokens: list[int] = field(default_factory=list)
    _launched_s: array[float] = field(default_factory=_doubles)
    _returned_s: array[float] = field(default_factory=_doubles)
    _sizes: list[int] = field(default_factory=list)
    _has_prefill: list[bool] = field(default_factory=list)
    _pending: dict[int, tuple[int, float]] = field(default_factory=dict)  # before the first token
    _last_token_s: dict[int, float] = field(default_factory=dict)  # after it

    def arrived(self, request_id: int, prompt_tokens: int, now_s: float) -> None:
        self._pending[request_id] = (prompt_tokens, now_s)

    def got_token(self, request_id: int, now_s: float) -> None:
        last_s = self._last_token_s.get(request_id)
        if last_s is not None:
            self._token_s.append(now_s)
            self._gap_s.append(now_s - last_s)
        else:
            prompt_tokens, arrival_s = self._pending.pop(request_id)
            self._first_token_s.append(now_s)
            self._ttft_s.append(now_s - arrival_s)
            self._first_prompt_tokens.append(prompt_tokens)
        self._last_token_s[request_id] = now_s

    def ended(self, request_id: int) -> None:
        self._pending.pop(request_id, None)
        self._last_token_s.pop(request_id, None)

    @property
    def num_first_tokens(self) -> int:
        """Requests that have got a token."""
        return len(self._first_token_s)

    def launched(self, num_requests: int, has_prefill: bool, now_s: float) -> None:
        self._launched_s.append(now_s)
        self._sizes.append(num_requests)
        self._has_prefill.append(has_prefill)

    def returned(self, now_s: float) -> None:
        """Results come in the order of launches."""
        self._returned_s.append(now_s)

    def figures(self, start: Moment, end: Moment) -> Figures:
        """What happened after `start` and up to `end`."""
        start_s, end_s = start.time_s, end.time_s
        window_s = max(end_s - start_s, 1e-12)
        firsts = [i for i, at_s in enumerate(self._first_token_s) if start_s < at_s <= end_s]
        gaps = [gap_s for at_s, gap_s in zip(self._token_s, self._gap_s, strict=True) if start_s < at_s <= end_s]
        output_tokens = len(firsts) + len(gaps)
        prompt_tokens = sum(self._first_prompt_tokens[i] for i in firsts)
        launches = [i for i, at_s in enumerate(self._launched_s) if start_s <= at_s < end_s]
        in_flight_s = sum(
            max(min(returned_s, end_s) - max(launched_s, start_s), 0.0)
            for launched_s, returned_s in zip(self._launched_s, self._returned_s, strict=True)
        )
        return Figures(
            start_s=start_s,
            end_s=end_s,
            output_tokens_per_s=output_tokens / window_s,
            total_tokens_per_s=(output_tokens + prompt_tokens) / window_s,
            ttft=latency([self._ttft_s[i] for i in firsts] or self._ttft_s),
            itl=latency(gaps),
            stage_busy=[(after - before) / window_s for before, after in zip(start.busy_s, end.busy_s, strict=True)],
            micro_batches_in_flight_mean=in_flight_s / window_s,
            sizes=dict(sorted(Counter(self._sizes[i] for i in launches).items())),
            prefill_share=sum(self._has_prefill[i] for i in launches) / max(len(launches), 1),
        )


class Window:
    """Finds the steady part of a run; see the module's docstring."""

    def __init__(self, concurrency: int | None, num_jobs: int) -> None:
        self.concurrency = concurrency
        self.num_jobs = num_jobs
        self.full: Moment | None = None  # every client has got a first token
        self.steady: Moment | None = None  # … and one request is complete
        self.close: Moment | None = None

    def needs_moment(self, num_first_tokens: int, num_ended: int) -> bool:
        """Whether `mark` would note something now: looking at all stages' occupancy takes a little time."""
        if self.steady is not None:
            return False
        if self.concurrency is None:
            return num_ended * 10 >= self.num_jobs
        return num_first_tokens >= self.concurrency and (self.full is None or num_ended > 0)

    def mark(self, moment: Moment, num_ended: int) -> None:
        if self.full is None:
            self.full = moment
        if num_ended > 0:
            self.steady = moment

    def bounds(self, start: Moment, end: Moment) -> tuple[Moment, Moment]:
        """Opening and closing moment; those of the whole run if it has no steady part."""
        close = self.close or end
        for opened in (self.steady, self.full):
            if opened is not None and opened.time_s < close.time_s:
                return opened, close
        return start, end

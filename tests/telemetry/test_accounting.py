"""Accounting against the simulator, where the cause of every wait is known by construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.plan.simulate import simulate
from fullbore.plan.workload import Job, Workload, closed_loop
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.accounting import BUSY, CAUSES, Recording, account, pieces

STAGE_S = 0.01
PLENTY = 100_000


@dataclass(frozen=True)
class Costs:
    """Seconds on each stage: `decode(b)` for b requests times the stage's factor; a prefill counts as one request."""

    factors: Sequence[float]
    decode: Callable[[int], float] = lambda requests: STAGE_S

    def seconds(self, load: Load) -> Sequence[float]:
        requests = max(load.decodes, 1)
        return [factor * self.decode(requests) for factor in self.factors]


def record(
    workload: Workload,
    config: SchedulerConfig,
    costs: Costs | None = None,
    *,
    driver_s: float = 0.0,
    hops: Sequence[Hop] = (),
    window: tuple[float, float] = (0.3, 0.7),
) -> Recording:
    costs = costs or Costs([1.0] * config.pp_size)
    pipeline = Pipeline(num_stages=config.pp_size, costs=costs, hops=hops, driver_s=driver_s)
    result = simulate(pipeline, config, workload, is_probed=False, learns=False, record_until_s=1e9)
    end_s = result.whole.end_s
    return Recording(
        config.pp_size,
        config.in_flight_limit,
        round(window[0] * end_s * 1e9),
        round(window[1] * end_s * 1e9),
        result.spans,
        result.driver_records,
    )


def idle_by_cause(recording: Recording) -> dict[str, float]:
    """Shares of the idle time of all stages together."""
    stages = account(recording)
    window_ns = recording.end_ns - recording.start_ns
    for seconds in stages:
        assert set(seconds) == set(CAUSES)
        assert all(isinstance(ns, int) and ns >= 0 for ns in seconds.values())
        assert sum(seconds.values()) == window_ns
    totals = {cause: sum(seconds[cause] for seconds in stages) for cause in CAUSES if cause not in BUSY}
    idle_ns = sum(totals.values())
    assert idle_ns > 0.02 * window_ns * recording.pp_size, "the example is meant to leave stages idle"
    return {cause: ns / idle_ns for cause, ns in totals.items()}


def config(pp_size: int, **settings: object) -> SchedulerConfig:
    return SchedulerConfig(**{"pp_size": pp_size, "num_kv_blocks": PLENTY, **settings})  # type: ignore[arg-type]


def linear(requests: int) -> float:
    return STAGE_S * requests


LONG = 200  # output tokens: decoding outweighs the prefills of the next generation

ONE_THING_WRONG: dict[str, tuple[str, Callable[[], Recording]]] = {
    "three requests on eight stages": (
        "few-requests",
        lambda: record(closed_loop(3, 12, 16, LONG), config(8)),
    ),
    "one request on four stages": (
        "few-requests",
        lambda: record(closed_loop(1, 4, 16, LONG), config(4)),
    ),
    "eight requests in one micro-batch": (
        "packed",
        lambda: record(closed_loop(8, 32, 16, LONG), config(8, num_micro_batches=1)),
    ),
    "sixteen requests in three micro-batches on eight stages": (
        "packed",
        lambda: record(closed_loop(16, 64, 16, LONG), config(8, num_micro_batches=3)),
    ),
    "no depth for a slow driver": (
        "depth",
        lambda: record(
            closed_loop(16, 64, 16, LONG), config(4, pp_async_batch_depth=0), Costs([1.0] * 4, linear), driver_s=0.02
        ),
    ),
    "no depth for a slow driver, capped micro-batches": (
        "depth",
        lambda: record(
            closed_loop(16, 64, 16, LONG),
            config(4, pp_async_batch_depth=0, pp_max_micro_batch_size=2),
            driver_s=0.02,
        ),
    ),
    "first stage twice as slow": (
        "imbalance",
        lambda: record(closed_loop(16, 64, 16, LONG), config(4), Costs([2, 1, 1, 1], linear)),
    ),
    "third stage twice as slow": (
        "imbalance",
        lambda: record(closed_loop(16, 64, 16, LONG), config(4), Costs([1, 1, 2, 1], linear)),
    ),
    "last stage twice as slow": (
        "imbalance",
        lambda: record(closed_loop(16, 64, 16, LONG), config(4), Costs([1, 1, 1, 2], linear)),
    ),
    "a link slower than the stages": (
        "transfer",
        lambda: record(
            closed_loop(16, 64, 16, LONG),
            config(4),
            Costs([1.0] * 4, linear),
            hops=[Hop(), Hop(token_s=2 * STAGE_S), Hop()],
        ),
    ),
    "links with latency": (
        "transfer",
        lambda: record(
            closed_loop(4, 16, 16, LONG), config(4, pp_async_batch_depth=0), hops=[Hop(latency_s=STAGE_S / 2)] * 3
        ),
    ),
    "KV for two requests on four stages": (
        "memory",
        lambda: record(closed_loop(16, 64, 16, 30), config(4, num_kv_blocks=8, page_size=16)),
    ),
    "a driver slower than all stages, a request for each": (
        "control",
        lambda: record(closed_loop(4, 16, 16, LONG), config(4), driver_s=5 * STAGE_S),
    ),
    "one burst of one-token requests": (
        "fill-drain",
        lambda: record(closed_loop(8, 8, 16, 1), config(8), window=(0, 1)),
    ),
    "one prompt in ten chunks": (
        "fill-drain",
        lambda: record(closed_loop(1, 1, 1000, 1), config(4, chunked_prefill_size=100), window=(0, 1)),
    ),
    "nobody there for half of the time": (
        "no-requests",
        lambda: record(
            Workload([Job(16, 40, arrival_s=a) for a in (0.0, 0.0, 0.0, 0.0, 40.0)]), config(4), window=(0.1, 0.9)
        ),
    ),
}


@pytest.mark.parametrize("example", ONE_THING_WRONG)
def test_one_thing_wrong_gets_the_blame(example: str) -> None:
    cause, make = ONE_THING_WRONG[example]
    shares = idle_by_cause(make())
    assert shares[cause] >= 0.95, {name: round(share, 3) for name, share in shares.items() if share}


def test_uneven_micro_batches() -> None:
    # Four requests in a ring of four; the one that started with the long prompt stays dear (a long context).
    class LongContext(Costs):
        def seconds(self, load: Load) -> Sequence[float]:
            return [STAGE_S * (3.0 if load.context_tokens > 1000 else 1.0) for _ in self.factors]

    jobs = [Job(2000 if i % 4 == 0 else 16, 300) for i in range(4)]
    recording = record(
        Workload(jobs, 4), config(4, pp_async_batch_depth=0, chunked_prefill_size=4000), LongContext([1.0] * 4)
    )
    assert idle_by_cause(recording)["uneven"] >= 0.95


def test_a_full_pipeline_has_next_to_no_idle_time() -> None:
    recording = record(closed_loop(16, 64, 16, LONG), config(4))
    stages = account(recording)
    window_ns = recording.end_ns - recording.start_ns
    assert all(seconds["compute"] >= 0.98 * window_ns for seconds in stages)


def test_spinning_and_blocking_receives_give_the_same_account() -> None:
    """A receive that is posted early and spins covers the whole wait; one that is posted late covers its end only."""
    blocking = record(closed_loop(3, 12, 16, 60), config(4), hops=[Hop(latency_s=STAGE_S / 5)] * 3)
    spinning = Recording(
        blocking.pp_size,
        blocking.in_flight_limit,
        blocking.start_ns,
        blocking.end_ns,
        [r if r.stage == 0 else _posted_at(r, r.plan_received_ns) for r in blocking.stage_records],
        blocking.driver_records,
    )
    late = Recording(
        blocking.pp_size,
        blocking.in_flight_limit,
        blocking.start_ns,
        blocking.end_ns,
        [r if r.stage == 0 else _posted_at(r, r.receive_end_ns) for r in blocking.stage_records],
        blocking.driver_records,
    )
    assert account(spinning) == account(late) == account(blocking)


def _posted_at(record: object, posted_ns: int) -> object:
    from msgspec.structs import replace as replace_struct

    return replace_struct(record, receive_posted_ns=posted_ns)


@pytest.mark.parametrize("example", ["one prompt in ten chunks", "nobody there for half of the time"])
def test_pieces_follow_each_other_and_add_up_to_the_account(example: str) -> None:
    recording = ONE_THING_WRONG[example][1]()
    for stage_pieces, total in zip(pieces(recording), account(recording), strict=True):
        bounds = [(piece.begin_ns, piece.end_ns) for piece in stage_pieces]
        assert bounds[0][0] == recording.start_ns
        assert bounds[-1][1] == recording.end_ns
        assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
        assert all(sum(p.causes.values()) == p.end_ns - p.begin_ns > 0 for p in stage_pieces)
        for cause in CAUSES:
            assert sum(piece.causes.get(cause, 0) for piece in stage_pieces) == total[cause]
        assert {p.main_cause for p in stage_pieces if not p.is_wait} <= set(BUSY)


def test_nothing_recorded_is_no_requests() -> None:
    recording = Recording(2, 4, 0, 1000, [], [])
    assert [seconds["no-requests"] for seconds in account(recording)] == [1000, 1000]


# ------------------------------------------------------------------------------------------------------- mixtures


@dataclass(frozen=True)
class Setting:
    """A run that can have several things wrong; each fault has a value that removes it."""

    num_requests: int = 16
    num_micro_batches: int | str = "auto"
    depth: int | str = "auto"
    factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    driver_s: float = 0.0
    hop_s: float = 0.0

    def record(self) -> Recording:
        return record(
            closed_loop(self.num_requests, 4 * self.num_requests, 16, LONG),
            config(4, num_micro_batches=self.num_micro_batches, pp_async_batch_depth=self.depth),
            Costs(self.factors),
            driver_s=self.driver_s,
            hops=[Hop(latency_s=self.hop_s)] * 3,
        )


REMOVE = {
    "few-requests": {"num_requests": 16},
    "packed": {"num_micro_batches": "auto"},
    "control": {"driver_s": 0.0},
    "transfer": {"hop_s": 0.0},
}

MIXTURES: dict[tuple[str, str], Setting] = {
    ("few-requests", "control"): Setting(num_requests=2, driver_s=STAGE_S),
    ("few-requests", "transfer"): Setting(num_requests=2, hop_s=STAGE_S / 2),
    ("few-requests", "imbalance"): Setting(num_requests=2, factors=(1, 1, 2, 1)),
    ("packed", "control"): Setting(num_micro_batches=2, driver_s=2 * STAGE_S),
    ("packed", "transfer"): Setting(num_micro_batches=2, hop_s=STAGE_S / 2),
    ("packed", "imbalance"): Setting(num_micro_batches=1, factors=(1, 1, 1, 2)),
    ("transfer", "control"): Setting(num_requests=4, driver_s=STAGE_S, hop_s=STAGE_S),
    ("imbalance", "transfer"): Setting(num_requests=4, factors=(1, 2, 1, 1), hop_s=2 * STAGE_S),
}


def idle_fraction(recording: Recording) -> float:
    window_ns = recording.end_ns - recording.start_ns
    return sum(window_ns - s["compute"] - s["host"] for s in account(recording)) / (window_ns * recording.pp_size)


@pytest.mark.parametrize("causes", MIXTURES, ids="+".join)
def test_two_things_wrong_share_the_blame(causes: tuple[str, str]) -> None:
    """Truth: what removing a cause saves, averaged over removing it first and removing it last."""
    first, second = causes
    setting = MIXTURES[causes]
    both = idle_fraction(setting.record())
    mean_factor = sum(setting.factors) / 4  # balancing moves layers, it does not remove them
    remove = {**REMOVE, "imbalance": {"factors": (mean_factor,) * 4}}
    without = {c: idle_fraction(replace(setting, **remove[c]).record()) for c in causes}
    neither = idle_fraction(replace(setting, **remove[first], **remove[second]).record())
    saved = {
        first: ((both - without[first]) + (without[second] - neither)) / 2,
        second: ((both - without[second]) + (without[first] - neither)) / 2,
    }
    truth = {c: saved[c] / sum(saved.values()) for c in causes}
    shares = idle_by_cause(setting.record())
    found = {c: shares[c] / (shares[first] + shares[second]) for c in causes}
    assert shares[first] + shares[second] >= 0.9, shares
    assert found[first] == pytest.approx(truth[first], abs=0.15), (found, truth)
    if abs(truth[first] - truth[second]) > 0.05:
        assert (found[first] > found[second]) == (truth[first] > truth[second])

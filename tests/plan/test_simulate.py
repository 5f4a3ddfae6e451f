"""The simulator itself: times that can be worked out, records, figures, workloads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from plan_helpers import MS, endless, pipeline, run

from fullbore.errors import RequestError
from fullbore.plan.measure import quantile
from fullbore.plan.pipeline import Hop, Pipeline, probe
from fullbore.plan.simulate import PROGRESS_EVERY_EVENTS, Simulation, kv_blocks_for
from fullbore.plan.workload import Job, Workload, closed_loop, poisson
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig


def mixed() -> tuple[Pipeline, Workload]:
    """Unequal stages, links with bandwidth, prompts and outputs of many lengths."""
    pipe = pipeline(
        [1.0, 1.3, 0.8],
        curve="affine",
        stage_s=10 * MS,
        reference=4,
        prefill_token_s=0.05 * MS,
        driver_s=3 * MS,
        hop=Hop(1 * MS, 0.01 * MS),
    )
    return pipe, closed_loop(12, 60, [10, 300, 64, 900], [5, 40, 17])


def test_a_lone_request_takes_what_its_way_takes() -> None:
    pipe = pipeline(
        [1.0, 2.0, 3.0], stage_s=10 * MS, prefill_token_s=1 * MS, driver_s=7 * MS, hop=Hop(2 * MS, 0.5 * MS)
    )
    figures = run(pipe, closed_loop(1, 1, 20, 5)).whole
    assert figures.ttft.mean_s == pytest.approx((1 + 2 + 3) * (10 + 20) * MS + 2 * (2 + 20 * 0.5) * MS + 7 * MS)
    assert figures.itl.mean_s == pytest.approx((10 + 20 + 30 + 2 * 2.5 + 7) * MS)
    assert figures.itl.p99_s == pytest.approx(figures.itl.p50_s)


def test_records_are_those_of_fifo_stages() -> None:
    pipe, work = mixed()
    result = run(pipe, work, record_until_s=1e9)
    for record in result.spans:
        times = (
            record.plan_received_ns,
            record.receive_posted_ns,
            record.receive_end_ns,
            record.compute_start_ns,
            record.compute_end_ns,
            record.sample_end_ns,
            record.send_start_ns,
            record.send_end_ns,
        )
        assert list(times) == sorted(times)
    by_stage = [[record for record in result.spans if record.stage == stage] for stage in range(3)]
    for records in by_stage:
        assert [record.micro_batch_id for record in records] == list(range(len(records)))
        assert all(after.compute_start_ns >= before.sample_end_ns for before, after in pairwise(records))
    for upstream, downstream in pairwise(by_stage):
        for sent, got in zip(upstream, downstream, strict=True):
            assert got.receive_end_ns - sent.send_end_ns >= 1_010_000 - 2  # latency and one token, rounded


def test_a_stage_reads_a_plan_between_micro_batches() -> None:
    """The second plan of two that are sent at 13 ms is received when the first micro-batch ends."""
    pipe = pipeline([1.0], stage_s=10 * MS, driver_s=3 * MS)
    result = run(pipe, endless(2, 3), record_until_s=1e9, num_micro_batches=2, pp_async_batch_depth=1)
    launches = [r.at_ns for r in result.driver_records if r.event == "launch"]
    assert launches[1:3] == [13_000_000, 13_000_000]
    assert result.spans[1].plan_received_ns == 13_000_000
    assert result.spans[2].plan_received_ns == 23_000_000
    assert result.spans[2].compute_start_ns == 23_000_000


def test_driver_records_tell_every_event() -> None:
    pipe, work = mixed()
    result = run(pipe, work, record_until_s=1e9)
    events = [record.event for record in result.driver_records]
    assert events.count("arrival") == 60
    assert events.count("launch") == events.count("result") == len(result.spans) / 3
    launched: set[int] = set()
    for record in result.driver_records:
        if record.event == "launch":
            launched.add(record.micro_batch_id)
        elif record.event == "result":
            launched.remove(record.micro_batch_id)
        assert record.in_flight == len(launched)
    assert not launched
    assert [r.at_ns for r in result.driver_records] == sorted(r.at_ns for r in result.driver_records)


def test_figures_agree_with_the_records() -> None:
    pipe, work = mixed()
    result = run(pipe, work, record_until_s=1e9)
    for figures in (result.steady, result.whole):
        start_ns, end_ns = figures.start_s * 1e9, figures.end_s * 1e9
        for stage, busy in enumerate(figures.stage_busy):
            overlaps = (
                max(min(r.sample_end_ns, end_ns) - max(r.compute_start_ns, start_ns), 0)
                for r in result.spans
                if r.stage == stage
            )
            assert busy == pytest.approx(sum(overlaps) / (end_ns - start_ns), rel=1e-6)
        changes = [(r.at_ns, r.in_flight) for r in result.driver_records]
        in_flight = sum(
            number * max(min(until, end_ns) - max(since, start_ns), 0)
            for (since, number), (until, _) in pairwise([*changes, (end_ns, 0)])
        )
        assert figures.micro_batches_in_flight_mean == pytest.approx(in_flight / (end_ns - start_ns), rel=1e-6)
    tokens = sum(job.output_tokens for job in work.jobs)
    assert result.whole.output_tokens_per_s * result.whole.end_s == pytest.approx(tokens)
    prompts = sum(job.prompt_tokens for job in work.jobs)
    assert result.whole.total_tokens_per_s * result.whole.end_s == pytest.approx(tokens + prompts)
    assert sum(size * number for size, number in result.whole.sizes.items()) >= tokens


def test_recording_changes_nothing_and_can_be_off_or_partial() -> None:
    pipe, work = mixed()
    with_records = run(pipe, work, record_until_s=1e9)
    without = run(pipe, work)
    assert without.steady == with_records.steady
    assert without.whole == with_records.whole
    assert without.spans == without.driver_records == []
    half = run(pipe, work, record_until_s=with_records.whole.end_s / 2)
    assert half.spans == with_records.spans[: len(half.spans)]
    assert 0.3 < len(half.spans) / len(with_records.spans) < 0.7


def test_steady_window_of_a_closed_loop() -> None:
    pipe = pipeline([1.0, 1.0], curve="linear", stage_s=10 * MS)
    steady = run(pipe, closed_loop(4, 12, 1, 10)).steady
    assert steady.output_tokens_per_s == pytest.approx(100, rel=0.05), "10 ms for each token on each stage"
    assert min(steady.stage_busy) >= 0.95
    lone_generation = run(pipe, closed_loop(4, 4, 1, 10))
    assert 0 < lone_generation.steady.start_s < lone_generation.steady.end_s < lone_generation.whole.end_s
    too_few = run(pipe, closed_loop(4, 2, 1, 10))
    assert too_few.steady == too_few.whole


def test_arrivals_at_a_low_rate_find_an_empty_pipeline() -> None:
    pipe = pipeline([1.0, 1.0], stage_s=10 * MS, prefill_token_s=0.1 * MS)
    lone = run(pipe, closed_loop(1, 1, 50, 4)).whole
    few = run(pipe, poisson(0.5, 40, 50, 4)).whole
    assert few.ttft.p50_s == pytest.approx(lone.ttft.mean_s)
    assert few.itl.p50_s == pytest.approx(lone.itl.mean_s)
    assert few.end_s == pytest.approx(40 / 0.5, rel=0.5)


def test_arrivals_keep_their_times() -> None:
    jobs = [Job(1, 1, arrival_s=at_s) for at_s in (0.5, 3.0, 3.0, 9.0)]
    result = run(pipeline([1.0], stage_s=10 * MS), Workload(jobs), record_until_s=1e9)
    assert [r.at_ns for r in result.driver_records if r.event == "arrival"] == [500_000_000] + [3 * 10**9] * 2 + [
        9 * 10**9
    ]


def test_shared_prefixes_are_computed_once() -> None:
    pipe = pipeline([1.0], stage_s=1 * MS, prefill_token_s=1 * MS)
    apart = run(pipe, closed_loop(1, 4, 160, 2)).whole
    shared = run(pipe, closed_loop(1, 4, 160, 2, shared_prefix_tokens=128)).whole
    assert apart.ttft.p50_s == pytest.approx(161 * MS)
    assert shared.ttft.p50_s == pytest.approx(33 * MS)


def test_too_little_memory_preempts_and_still_finishes() -> None:
    work = closed_loop(8, 16, 16, 150)
    scheduler = Scheduler(SchedulerConfig(pp_size=3, num_kv_blocks=40, max_running_requests=8))
    result = Simulation(mixed()[0], scheduler, work).run()
    assert result.whole.output_tokens_per_s * result.whole.end_s == pytest.approx(16 * 150)
    assert scheduler.state().preemptions > 0
    assert scheduler.state().used_blocks == 0


def test_aborts_and_timeouts_end_requests() -> None:
    jobs = [Job(10, 1000), Job(10, 1000, abort_after_s=0.5), Job(10, 1000, timeout_s=0.25)]
    result = run(pipeline([1.0, 1.0], stage_s=5 * MS), Workload(jobs, 3), record_until_s=1e9)
    ends = [r.at_ns for r in result.driver_records if r.event == "end"]
    assert ends == [250_000_000, 500_000_000]
    assert result.whole.end_s > 1


def test_progress_is_told() -> None:
    pipe, work = mixed()
    calls: list[tuple[int, int]] = []
    scheduler = Scheduler(SchedulerConfig(pp_size=3, num_kv_blocks=kv_blocks_for(work), max_running_requests=12))
    Simulation(pipe, scheduler, work).run(lambda done, total: calls.append((done, total)))
    assert calls[0] == (0, 60)
    assert len(calls) >= 1 + scheduler.state().micro_batches // PROGRESS_EVERY_EVENTS


def test_requests_that_cannot_fit_are_refused() -> None:
    with pytest.raises(RequestError):
        run(pipeline([1.0]), closed_loop(1, 1, 100, 100), num_kv_blocks=4)


def test_as_many_hops_as_links() -> None:
    with pytest.raises(ValueError, match="3 stages need 2 hops"):
        run(replace(pipeline([1.0, 1.0, 1.0]), hops=[Hop()]), endless(1))


def test_what_is_learned_comes_near_the_truth() -> None:
    pipe, work = mixed()
    scheduler = Scheduler(SchedulerConfig(pp_size=3, num_kv_blocks=kv_blocks_for(work), max_running_requests=12))
    Simulation(pipe, scheduler, work).run()
    costs = scheduler.costs
    for stage, factor in enumerate([1.0, 1.3, 0.8]):
        assert costs.decode[stage].at(4) == pytest.approx(factor * 10 * MS, rel=0.02)
        assert costs.prefill[stage].per_token_s == pytest.approx(factor * 0.05 * MS, rel=0.1)
    assert costs.return_s == pytest.approx(3 * MS, rel=0.01)
    for stage in (1, 2):
        assert 1 * MS <= costs.hops_s[stage] <= 4 * MS  # one token takes 1.01 ms, a chunk of a prompt up to 6


def test_a_probe_measures_stages_and_delays() -> None:
    scheduler = Scheduler(SchedulerConfig(pp_size=3, num_kv_blocks=10))
    probe(scheduler.costs, mixed()[0], 12)
    assert scheduler.costs.decode[1].at(4) == pytest.approx(13 * MS)
    assert scheduler.costs.overhead_s == pytest.approx((2 * 1.01 + 3) * MS)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 1.0) == 3.0
    assert quantile([7.0], 0.99) == 7.0

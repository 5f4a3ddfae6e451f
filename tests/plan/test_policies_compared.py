"""The models of SGLang's and vLLM's batches, driven by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.plan.engines import ENGINES
from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Pipeline
from fullbore.plan.policies import make_scheduler
from fullbore.plan.policy_settings import Scheduling
from fullbore.plan.simulate import Simulation
from fullbore.plan.workload import Job, Workload
from fullbore.scheduler.scheduler import Scheduler


@dataclass
class Flat:
    """A second per stage, whatever is in the micro-batch."""

    stages: int

    def seconds(self, load: Load) -> Sequence[float]:
        return [1.0] * self.stages


BASE = Scheduling(
    pp=4,
    depth=0,
    micro_batches="auto",
    max_micro_batch="auto",
    max_running=64,
    chunk_tokens=64,
    num_blocks=4096,
)


def run(policy: str, jobs: list[Job], concurrency: int, **changed: Any) -> tuple[Scheduler, Any]:
    scheduling = replace(BASE, **changed)
    scheduler = make_scheduler(ENGINES[policy], scheduling)
    pipeline = Pipeline(num_stages=scheduling.pp, costs=Flat(scheduling.pp))
    simulation = Simulation(pipeline, scheduler, Workload(jobs, concurrency), record_until_s=1e9)
    return scheduler, simulation.run()


def launches(result: Any) -> list[Any]:
    return [record for record in result.driver_records if record.event == "launch"]


def test_a_burst_stays_in_one_slot() -> None:
    _, result = run("sglang", [Job(8, 20)] * 8, 8)
    assert {record.num_requests for record in launches(result)} == {8}
    assert max(record.in_flight for record in launches(result)) == 1


def test_the_cap_spreads_it() -> None:
    _, result = run("sglang", [Job(8, 20)] * 8, 8, max_micro_batch=2)
    assert {record.num_requests for record in launches(result)} == {2}
    assert max(record.in_flight for record in launches(result)) == 4


@pytest.mark.parametrize(("depth", "outstanding"), [(0, 4), (1, 4), (2, 5), (3, 6)])
def test_outstanding_at_launch(depth: int, outstanding: int) -> None:
    _, result = run("sglang", [Job(8, 40)] * 16, 16, depth=depth, max_micro_batch=1, max_running=64)
    assert max(record.in_flight for record in launches(result)) == outstanding


def test_exchanging_first_keeps_one_fewer_in_flight() -> None:
    _, result = run("sglang", [Job(8, 40)] * 8, 8, max_micro_batch=1, exchanges_first=True)
    assert max(record.in_flight for record in launches(result)) == 3
    assert result.steady.stage_busy == pytest.approx([0.75] * 4, abs=0.02)


def test_chunks_of_one_prompt_follow_each_other_in_sglang_but_not_in_vllm() -> None:
    for policy, in_flight, seconds in (("sglang", 4, 8 + 3), ("vllm", 1, 8 * 4)):
        _, result = run(policy, [Job(512, 1)], 1)
        assert [record.prefill_tokens for record in launches(result)] == [64] * 8
        assert max(record.in_flight for record in launches(result)) == in_flight
        assert result.whole.end_s == pytest.approx(seconds)


def test_dynamic_chunks_get_smaller_as_the_prompt_grows() -> None:
    scheduler = make_scheduler(ENGINES["sglang"], replace(BASE, dynamic_chunks=True))
    for fit in scheduler.costs.prefill:
        fit.per_token_s, fit.per_token_pair_s, fit.samples = 1e-3, 1e-5, 99
    sizes = [scheduler._chunk_tokens(context) for context in (0, 64, 512, 1 << 20)]  # type: ignore[attr-defined]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 64
    assert sizes[-1] >= 16, "a quarter at least"


def test_all_that_is_ready_travels_together_in_vllm() -> None:
    _, result = run("vllm", [Job(8, 20)] * 8, 8)
    assert {record.num_requests for record in launches(result)} == {8}
    _, result = run("vllm", [Job(32, 20)] * 8, 8)  # two prompts fill a batch: they stay apart
    assert {record.num_requests for record in launches(result)} == {2}
    assert max(record.in_flight for record in launches(result)) == 4


@settings(deadline=None, max_examples=40)
@given(
    policy=st.sampled_from(["fullbore", "sglang", "vllm"]),
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), min_size=1, max_size=10),
    concurrency=st.integers(1, 10),
    pp=st.integers(1, 5),
    depth=st.integers(0, 3),
    blocks=st.integers(16, 64),
    cap=st.sampled_from(["auto", 1, 3]),
)
def test_every_request_ends_with_its_tokens_and_nothing_is_left(
    policy: str, lengths: list[tuple[int, int]], concurrency: int, pp: int, depth: int, blocks: int, cap: Any
) -> None:
    """Also when the cache is short, so that requests are preempted."""
    jobs = [Job(*each) for each in lengths]
    scheduler, result = run(
        policy, jobs, concurrency, pp=pp, depth=depth, num_blocks=blocks, max_micro_batch=cap, max_running=32
    )
    state = scheduler.state()
    assert (state.running, state.waiting, state.in_flight, state.used_blocks) == (0, 0, 0, 0)
    assert (scheduler._num_decoding, scheduler._decoding_tokens, scheduler._waiting_tokens) == (0, 0, 0)
    assert state.generated_tokens == sum(output for _, output in lengths)
    assert result.whole.end_s > 0

"""Nothing lost, nothing doubled, nothing stuck, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_traffic import Traffic

from fullbore.scheduler.scheduler import SchedulerConfig

configs = st.builds(
    SchedulerConfig,
    num_kv_blocks=st.sampled_from([8, 20, 60, 400]),
    pp_size=st.sampled_from([1, 2, 3, 4, 8]),
    pp_async_batch_depth=st.sampled_from(["auto", 0, 1, 2, 3, 4]),
    pp_max_micro_batch_size=st.sampled_from(["auto", 1, 2, 5]),
    num_micro_batches=st.sampled_from(["auto", "auto", "auto", 1, 3, 100]),
    chunked_prefill_size=st.sampled_from([1, 7, 32, 512]),
    max_running_requests=st.sampled_from([1, 3, 10, 100]),
    page_size=st.sampled_from([1, 2, 4, 16]),
    context_length=st.sampled_from([60, 1 << 30]),
    enable_prefix_cache=st.booleans(),
)
seeds = st.integers(0, 2**32 - 1)

STEPS_AT_A_TIME = 300


def drive(num_examples: int) -> Counter[str]:
    """Random traffic on so many random configurations; what happened in all."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking takes long and gains little: what fails is repeatable as it is
    )
    @given(config=configs, seed=seeds, has_records=st.booleans())
    def run(config: SchedulerConfig, seed: int, has_records: bool) -> None:
        traffic = Traffic(config, seed, has_records)
        traffic.run(STEPS_AT_A_TIME)
        state = traffic.scheduler.state()
        seen["steps"] += traffic.steps
        seen["preemptions"] += state.preemptions
        seen["cached tokens"] += state.cached_tokens
        seen["micro-batches"] += state.micro_batches

    run()
    return seen


def test_random_traffic() -> None:
    seen = drive(30)
    assert min(seen["preemptions"], seen["cached tokens"], seen["micro-batches"]) > 0


@pytest.mark.slow
def test_random_traffic_for_a_hundred_thousand_steps() -> None:
    seen = drive(300)
    assert seen["steps"] >= 100_000
    assert min(seen["preemptions"], seen["cached tokens"]) > 100, "the hard cases did come up"

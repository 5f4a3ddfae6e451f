"""What the engine measures before its first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil

import msgspec
import pytest
from engine_helpers import MODEL, add_request, collect, config, expected, prompt_of, tokens_of
from tiny_models import make_tiny_model

from fullbore.engine.client import EngineClient
from fullbore.engine.loopback import LoopbackEngine
from fullbore.engine.messages import LoadProgress
from fullbore.engine.probe import Passage, Probe
from fullbore.engine.sleep_model import expected_tokens, parse
from fullbore.engine.sleep_runner import SleepRunner
from fullbore.errors import EngineDeadError
from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.policy import best_micro_batches
from fullbore.scheduler.request import Request
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.spans import StageRecord

MS = 1_000_000


class Stages:
    """Stages with a cost per stage; counts what goes through them."""

    def __init__(self, num_stages: int, cost_ms: Callable[[int, MicroBatch], float], pause_s: float = 0.0) -> None:
        self.num_stages = num_stages
        self.cost_ms = cost_ms
        self.pause_s = pause_s
        self.micro_batches: list[MicroBatch] = []

    def run_alone(self, micro_batch: MicroBatch) -> Passage:
        self.micro_batches.append(micro_batch)
        time.sleep(self.pause_s)
        records = []
        now_ns = 1000 * MS
        for stage in range(self.num_stages):
            start_ns = now_ns + 2 * MS  # the plan's way, or a hop
            now_ns = start_ns + round(self.cost_ms(stage, micro_batch) * MS)
            records.append(StageRecord(stage, micro_batch.id, *[start_ns] * 4, *[now_ns] * 4))
        return Passage(1000 * MS, records, now_ns + 3 * MS)

    def sizes(self) -> list[int]:
        return [len(micro_batch.runs) for micro_batch in self.micro_batches]


def affine(stage: int, micro_batch: MicroBatch) -> float:
    return (stage + 1) * (10 + micro_batch.num_tokens)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_the_costs_are_those_of_the_stages(num_stages: int) -> None:
    stages = Stages(num_stages, affine)
    costs = CostModel(num_stages)
    probe = Probe(costs, stages.run_alone, num_blocks=4, page_size=16)
    probe.measure_decode(32)
    assert costs.knows_decode
    for stage in range(num_stages):
        for size in (1, 2, 5, 20, 32):
            assert costs.decode[stage].at(size) == pytest.approx((stage + 1) * (10 + size) * 1e-3)
    assert costs.plan_s == pytest.approx(2e-3)
    assert costs.hops_s == [0.0, *[pytest.approx(2e-3)] * (num_stages - 1)]
    assert costs.return_s == pytest.approx(3e-3)


def test_sampling_is_part_of_a_step_but_not_of_what_divides_the_layers() -> None:
    def run_alone(micro_batch: MicroBatch) -> Passage:
        passage = Stages(1, affine).run_alone(micro_batch)
        [record] = passage.records
        return passage._replace(records=[msgspec.structs.replace(record, sample_end_ns=record.sample_end_ns + 5 * MS)])

    costs = CostModel(1)
    probe = Probe(costs, run_alone, num_blocks=4, page_size=16)
    probe.measure_decode(4)
    assert costs.decode[0].at(4) == pytest.approx(19e-3)
    assert probe.compute_s[0][4] == pytest.approx(14e-3)


def test_the_number_of_micro_batches_rests_on_what_was_measured() -> None:
    """A flat curve with one slow stage: one micro-batch is best, which nobody could know without measuring."""
    stages = Stages(8, lambda stage, micro_batch: 20.0 if stage == 7 else 10.0)
    costs = CostModel(8)
    assert best_micro_batches(costs, 16, 8, 16, 256) == 8
    Probe(costs, stages.run_alone, num_blocks=4, page_size=16).measure_decode(32)
    assert best_micro_batches(costs, 16, 8, 16, 256) < 8


def test_disturbed_measurements_do_not_count() -> None:
    """The first two passes of each size but the largest take longer, by different factors."""
    seen: list[int] = []

    def disturbed(stage: int, micro_batch: MicroBatch) -> float:
        seen.append(micro_batch.num_tokens)
        repetition = seen.count(micro_batch.num_tokens)
        is_disturbed = repetition <= 2 and micro_batch.num_tokens != 16
        return affine(stage, micro_batch) * ((3 + repetition) if is_disturbed else 1)

    costs = CostModel(1)
    stages = Stages(1, disturbed)
    Probe(costs, stages.run_alone, 4, 16).measure_decode(16)
    for size in (1, 2, 3, 4, 6, 8, 12, 16):
        assert costs.decode[0].at(size) == pytest.approx((10 + size) * 1e-3)
    assert stages.sizes().count(16) == 2, "nothing is repeated without need"
    assert stages.sizes().count(8) == 4


def test_what_stands_out_is_measured_again() -> None:
    """All passes of one size are disturbed alike, so that they agree; and a smaller one must not be blamed."""
    seen: list[int] = []

    def disturbed(stage: int, micro_batch: MicroBatch) -> float:
        seen.append(micro_batch.num_tokens)
        is_disturbed = micro_batch.num_tokens == 8 and seen.count(8) <= 2
        return affine(stage, micro_batch) * (1.5 if is_disturbed else 1)

    costs = CostModel(1)
    stages = Stages(1, disturbed)
    Probe(costs, stages.run_alone, 4, 16).measure_decode(32)
    assert costs.decode[0].at(8) == pytest.approx(18e-3)
    assert {size: stages.sizes().count(size) for size in (4, 8, 16, 32)} == {4: 2, 8: 4, 16: 2, 32: 2}
    assert best_micro_batches(costs, 16, 1, 3, 256) == 1


def test_the_budget_ends_it_but_two_sizes_are_measured() -> None:
    stages = Stages(2, affine, pause_s=0.01)
    probe = Probe(CostModel(2), stages.run_alone, 4, 16)
    probe.measure_decode(256, budget_s=0.0)
    assert set(stages.sizes()) == {1, 2}
    probe.measure_decode(1, budget_s=1.0)
    assert set(stages.sizes()) == {1, 2}
    stages.micro_batches.clear()
    probe.measure_decode(256, budget_s=0.08)
    assert 256 not in stages.sizes()


def test_prompt_chunks() -> None:
    stages = Stages(2, affine)
    costs = CostModel(2)
    probe = Probe(costs, stages.run_alone, num_blocks=3, page_size=16)
    probe.measure_prefill(512)
    assert {micro_batch.num_tokens for micro_batch in stages.micro_batches} == {64, 128, 256, 512}
    costs.prefill[1].refit()
    assert costs.prefill[1].base_s + costs.prefill[1].chunk_s(200) == pytest.approx(2 * 210e-3, rel=1e-3)
    stages.micro_batches.clear()
    Probe(costs, Stages(2, affine, pause_s=0.01).run_alone, 3, 16).measure_prefill(512, budget_s=0.0)
    probe.measure_prefill(1)
    assert stages.micro_batches == []


def test_contexts() -> None:
    def reading(stage: int, micro_batch: MicroBatch) -> float:
        return (stage + 1) * (10 + micro_batch.num_tokens + 0.01 * sum(run.start for run in micro_batch.runs))

    stages = Stages(2, reading)
    costs = CostModel(2)
    probe = Probe(costs, stages.run_alone, num_blocks=1000, page_size=16)
    probe.measure_decode(8)
    stages.micro_batches.clear()
    probe.measure_context(8, context_length=1000)
    assert costs.decode[1].at(2, 500) == pytest.approx(2 * (10 + 2 + 5) * 1e-3)
    blocks = [block for run in stages.micro_batches[0].runs for block in run.block_ids]
    assert len(blocks) == len(set(blocks)) == 4 * ceil(1000 / 16), "each reads memory of its own"

    probe.measure_context(8, context_length=1)  # nothing can be read: nothing is measured
    small = Probe(CostModel(2), stages.run_alone, num_blocks=2, page_size=16)
    small.measure_decode(1)
    small.measure_context(1, context_length=1000)
    assert stages.micro_batches[-1].runs[0].start == 31
    assert max(stages.micro_batches[-1].runs[0].block_ids) == 1


def test_ids_are_negative_and_used_once() -> None:
    stages = Stages(1, affine)
    probe = Probe(CostModel(1), stages.run_alone, num_blocks=1, page_size=16)
    probe.measure_decode(8)
    probe.measure_context(8, 4096)
    probe.measure_prefill(64)
    ids = [micro_batch.id for micro_batch in stages.micro_batches]
    assert len(set(ids)) == len(ids)
    assert max(ids) < -1  # -1 is the transport's ping
    blocks = {block for micro_batch in stages.micro_batches for run in micro_batch.runs for block in run.block_ids}
    assert blocks == {0}


@pytest.mark.parametrize("partition", [(4,), (1, 3), (1, 1, 2)])
def test_the_first_request_finds_nothing_of_it(partition: tuple[int, ...]) -> None:
    model = parse("sleep://layers=4,layer_ms=0")
    runners = [SleepRunner(model, stage, partition, 16) for stage in range(len(partition))]
    for runner in runners:
        runner.allocate_kv(3)
    engine = LoopbackEngine(runners, SchedulerConfig(num_kv_blocks=3, pp_size=len(partition)))

    def run_alone(micro_batch: MicroBatch) -> Passage:
        for stage in engine.stages:
            stage.take(micro_batch)
            stage.execute()
        records = [StageRecord(stage, micro_batch.id, *[0] * 8) for stage in range(len(partition))]
        return Passage(0, records, 0)

    probe = Probe(engine.scheduler.costs, run_alone, num_blocks=3, page_size=16)
    probe.measure_decode(8)
    probe.measure_prefill(40)
    prompt = prompt_of(1, 20)
    assert engine.generate([Request(0, prompt, 10)]) == {0: expected_tokens(model, prompt, 10)}


# ---------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("pp_size", [1, 3])
def test_engine_with_a_single_kv_block(pp_size: int) -> None:
    progress: list[LoadProgress] = []
    with EngineClient.start(config(pp_size, max_total_tokens=16), progress.append) as client:
        client.add(add_request(0, [1, 2, 3], 5))
        assert tokens_of(collect(client, 1)[0]) == expected(MODEL, [1, 2, 3], 5)
    assert [step.what for step in progress if step.stage < 0] == ["measuring the stages"]


def test_engine_of_a_real_model_with_more_stages_than_cores(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny") / "model")
    settings = config(4, str(folder), max_total_tokens=16, dtype="float32", device="cpu")
    with EngineClient.start(settings) as client:
        client.add(add_request(0, [1, 2, 3], 5, ignore_eos=True))
        assert len(tokens_of(collect(client, 1)[0])) == 5


def test_stage_that_fails_while_it_is_measured_is_named() -> None:
    with pytest.raises(EngineDeadError, match="has been computing one micro-batch"):
        EngineClient.start(config(2, "sleep://layers=2,layer_ms=3000", step_timeout_s=0.6))

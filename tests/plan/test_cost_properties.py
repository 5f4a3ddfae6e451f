"""What must hold for any model, device, layout and load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.plan.cost_model import HOST
from fullbore.plan.devices import DEVICES
from fullbore.plan.engines import ENGINES
from fullbore.plan.hardware import Hardware
from fullbore.plan.layout import Layout
from fullbore.plan.loads import Load
from fullbore.plan.model_table import MODELS, find_model
from fullbore.plan.models import DecoderModel
from fullbore.plan.parameters import SPREADS, CostParameters, scaled
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy

NAMES = ["kimi-k2.6", "qwen3-30b-a3b", "llama-3.1-8b", "gpt-oss-120b", "mixtral-8x7b", "smollm2-135m"]
CARDS = ["rtx-pro-6000", "3090", "h100", "b200", "mi300x", "cpu"]


def deployment(
    name: str, card: str, pp: int = 1, tp: int = 1, graphs: bool = True, bandwidth: float = 1.0, **layout: object
) -> Deployment:
    model = find_model(name)
    assert model is not None
    device = replace(DEVICES[card], bandwidth_bytes_s=DEVICES[card].bandwidth_bytes_s * bandwidth)
    number = pp * tp
    hardware = Hardware(devices=(device,) * number, hosts=(0,) * number)
    demand = Demand(concurrency=(8,))
    scenario = Scenario(model=model, hardware=hardware, engine=ENGINES["sglang"], demand=demand)
    return deploy(scenario, Layout(pp=pp, tp=tp, graphs=graphs, **layout), 8)  # type: ignore[arg-type]


def loads() -> st.SearchStrategy[Load]:
    def build(decodes: int, prefill: int, earlier: int, context: int) -> Load:
        pairs = (earlier + prefill) ** 2 - earlier**2 if prefill else 0
        return Load(decodes, prefill, pairs, decodes + (prefill > 0), decodes * context + (earlier if prefill else 0))

    counts = st.integers(0, 4096)
    return st.builds(build, st.integers(0, 512), counts, st.integers(0, 1 << 17), st.integers(0, 1 << 17)).filter(
        lambda load: load.tokens > 0
    )


def set_ups() -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {
            "name": st.sampled_from(NAMES),
            "card": st.sampled_from(CARDS),
            "pp": st.sampled_from([1, 2, 5]),
            "tp": st.sampled_from([1]),
            "graphs": st.booleans(),
        }
    )


@settings(deadline=None, max_examples=60)
@given(set_up=set_ups(), load=loads(), factor=st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(set_up: dict[str, object], load: Load, factor: float) -> None:
    slow, fast = deployment(**set_up), deployment(**set_up, bandwidth=factor)  # type: ignore[arg-type]
    layout = replace(slow.layout, partition=slow.partition)  # the same division
    fast = deploy(fast.scenario, layout, 8)
    for before, after in zip(slow.costs.seconds(load), fast.costs.seconds(load), strict=True):
        assert 0 < after <= before * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(set_up=set_ups(), load=loads())
def test_what_takes_the_time_adds_up(set_up: dict[str, object], load: Load) -> None:
    for cost in deployment(**set_up).costs.stages:  # type: ignore[arg-type]
        parts = cost.breakdown(load)
        assert min(parts.values()) >= 0
        seconds = sum(parts.values())
        if cost.is_alone:  # scheduling is hidden behind the device
            seconds = max(seconds - parts[HOST], parts[HOST])
        assert seconds == pytest.approx(cost.seconds(load))


@settings(deadline=None, max_examples=40)
@given(set_up=set_ups(), load=loads(), name=st.sampled_from(sorted(SPREADS)))
def test_better_parameters_are_never_slower(set_up: dict[str, object], load: Load, name: str) -> None:
    given_costs = deployment(**set_up)  # type: ignore[arg-type]
    better = 0.8 if name in ("kernel_factor", "eager_kernel_s", "overlap_loss", "host_factor") else 1.25
    other = given_costs.with_parameters(scaled(CostParameters(), name, better))
    assert other.costs.traverse_s(load) <= given_costs.costs.traverse_s(load) * (1 + 1e-12)


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(NAMES), card=st.sampled_from(CARDS), load=loads(), keep=st.floats(0.05, 0.95))
def test_more_layers_are_never_faster(name: str, card: str, load: Load, keep: float) -> None:
    whole = deployment(name, card)
    model: DecoderModel = whole.scenario.model
    fewer = replace(model, layers=model.layers[: max(round(keep * model.num_layers), 1)])
    cut = deploy(replace(whole.scenario, model=fewer), Layout(), 8)
    assert cut.costs.seconds(load)[0] <= whole.costs.seconds(load)[0] * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(MODELS)),
    card=st.sampled_from(CARDS),
    pp=st.integers(1, 16),
    tp=st.sampled_from([1, 2, 4]),
    chunk=st.integers(1, 1 << 16),
)
def test_memory_is_never_negative_and_layers_are_never_lost(name: str, card: str, pp: int, tp: int, chunk: int) -> None:
    model = find_model(name)
    assert model is not None
    if any(layer.attention.num_heads % tp for layer in model.layers):
        return
    found = deployment(name, card, pp, tp, chunk_tokens=chunk)
    assert sum(found.partition) == model.num_layers
    assert min(found.partition) >= 1
    for stage, stranded in zip(found.memory.stages, found.memory.stranded_bytes, strict=True):
        assert min(stage.weight_bytes, stage.buffer_bytes, stage.cache_bytes, stage.missing_bytes) >= 0
        assert stage.cache_bytes == 0 or stage.missing_bytes == 0
        assert stranded >= -1e-3
    weights = sum(stage.weight_bytes for stage in found.memory.stages) * tp
    assert weights >= model.weight_bytes * (1 - 1e-9), "nothing is forgotten"
    assert (found.problem is None) == (
        all(not stage.missing_bytes for stage in found.memory.stages)
        and found.memory.cache_tokens >= found.scenario.demand.length_tokens
    )


def test_experts_are_read_as_often_as_tokens_touch_them() -> None:
    cost = deployment("kimi-k2.6", "rtx-pro-6000").costs.stages[0]
    one, eight = (cost.breakdown(Load(tokens, sampled=tokens))["experts"] for tokens in (1, 8))
    assert eight / one == pytest.approx(59.52 / 8, rel=0.01)


def test_the_head_is_on_the_last_stage_and_graphs_save_launches() -> None:
    eager, graphs = (deployment("llama-3.1-8b", "h100", 4, graphs=flag, partition=(8,) * 4) for flag in (False, True))
    load = Load(4, sampled=4, context_tokens=4096)
    seconds = graphs.costs.seconds(load)
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[3] > 1.15 * seconds[2]
    assert min(eager.costs.seconds(load)) > 1.3 * seconds[0]


def test_measured_layer_times_of_llama_8b_on_rtx_pro_6000() -> None:
    """LLMServingSim 2.0: one layer 331.3 us at one token, head 714 us (kv 1,024), eager, one card, no gaps."""
    found = deployment("llama-3.1-8b", "rtx-pro-6000", 32, partition=(1,) * 32)
    one = found.costs.stages[0].breakdown(Load(1, sampled=1, context_tokens=1024))
    layer_s = sum(seconds for name, seconds in one.items() if name not in ("host", "launches"))
    assert layer_s == pytest.approx(331.3e-6, rel=0.05)
    head_s = found.costs.stages[-1].breakdown(Load(1, sampled=1, context_tokens=1024))["head"]
    assert head_s == pytest.approx(738.7e-6, rel=0.05)  # with the sampler
    prefill = found.costs.stages[0].breakdown(Load(0, 2048, 2048**2, 0))
    prefill_s = sum(seconds for name, seconds in prefill.items() if name not in ("host", "launches"))
    assert prefill_s == pytest.approx(2568e-6, rel=0.12)

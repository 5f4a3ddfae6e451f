"""Search over layouts, the pick, commands, pages, splitting."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.errors import ConfigError
from fullbore.plan.chart import Series, chart
from fullbore.plan.commands import commands
from fullbore.plan.engines import find_engine
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout, check_layout, even_partition
from fullbore.plan.model_table import find_model
from fullbore.plan.page import page
from fullbore.plan.predict import predict
from fullbore.plan.report import search_text
from fullbore.plan.scenario import Demand, Scenario, deploy
from fullbore.plan.search import SearchResult, Slo, candidates, pareto, search
from fullbore.plan.splitting import best_partition


def scenario(name: str, hardware: str, concurrency: tuple[int, ...] = (1, 32), output_tokens: int = 64) -> Scenario:
    model = find_model(name)
    assert model is not None
    demand = Demand(input_tokens=256, output_tokens=output_tokens, concurrency=concurrency)
    return Scenario(model=model, hardware=parse_hardware(hardware), engine=find_engine("fullbore"), demand=demand)


@pytest.fixture(scope="module")
def found() -> tuple[Scenario, SearchResult]:
    given_scenario = scenario("llama-3.1-70b", "4x rtx-pro-6000")
    return given_scenario, search(given_scenario, Layout(), Slo(itl_s=0.06))


def test_every_way_to_use_eight_devices_is_a_candidate() -> None:
    layouts = list(candidates(scenario("llama-3.1-70b", "8x h100"), Layout()))
    shapes = {(each.pp, each.tp, each.replicas) for each in layouts if each.num_devices == 8}
    powers = (1, 2, 4, 8)
    assert shapes == {each for each in product(powers, powers, powers) if each[0] * each[1] * each[2] == 8}
    assert any(each.num_devices == 7 for each in layouts), "a pipeline of seven, too"


def test_unequal_cards_have_no_replicas() -> None:
    layouts = list(candidates(scenario("llama-3.1-8b", "1x 4090 + 1x 3090"), Layout()))
    assert {each.name for each in layouts} == {"PP2", "TP2", "PP1"}


def test_a_rate_is_searched_once_for_each_layout() -> None:
    given_scenario = scenario("llama-3.1-8b", "2x h100")
    given_scenario = replace(given_scenario, demand=replace(given_scenario.demand, rate_per_s=2.0))
    result = search(given_scenario, Layout(), Slo(ttft_s=1.0))
    names = [each.deployment.layout.name for each in result.predictions]
    assert len(names) == len(set(names))
    assert result.is_slo_met


def test_mixtures_of_experts_have_data_parallel_attention_as_well() -> None:
    layouts = list(candidates(scenario("kimi-k2.6", "8x h200"), Layout()))
    assert any(each.dp_attention for each in layouts)
    assert not any(each.dp_attention for each in candidates(scenario("qwen3-32b", "8x h200"), Layout()))


def test_what_does_not_fit_is_listed_with_what_it_lacks(found: tuple[Scenario, SearchResult]) -> None:
    _, result = found
    assert "4x PP1" in {each.layout.name for each in result.unfit}
    assert all(each.problem for each in result.unfit)
    assert not any(each.deployment.problem for each in result.predictions)


def test_nothing_on_the_front_is_beaten(found: tuple[Scenario, SearchResult]) -> None:
    _, result = found
    front = pareto(result.predictions)
    assert front
    for each in result.predictions:
        assert any(
            other.tok_s_per_user >= each.tok_s_per_user and other.tok_s_per_device >= each.tok_s_per_device
            for other in front
        )


def test_the_pick_meets_the_slo_with_the_most_tokens(found: tuple[Scenario, SearchResult]) -> None:
    _, result = found
    assert result.is_slo_met
    assert result.pick is not None
    assert result.pick.itl_s <= 0.06
    rivals = [each.output_tok_s for each in result.predictions if each.itl_s <= 0.06]
    assert result.pick.output_tok_s >= max(rivals)


def test_an_slo_that_cannot_be_met_gets_the_nearest() -> None:
    result = search(scenario("llama-3.1-8b", "1x h100", (1,)), Layout(), Slo(itl_s=1e-6))
    assert not result.is_slo_met
    assert result.pick is not None


def test_a_model_that_fits_nowhere_says_what_the_nearest_lacks() -> None:
    with pytest.raises(ConfigError, match="fits 2x 3090 in no layout; the nearest is TP2"):
        search(scenario("llama-3.1-405b", "2x 3090"), Layout(), Slo())


def test_the_text_and_the_page_tell_the_same(found: tuple[Scenario, SearchResult]) -> None:
    given_scenario, result = found
    text = search_text(given_scenario, result, Slo(itl_s=0.06))
    html = page(given_scenario, result.predictions, result.pick, ["a <remark>"])
    assert result.pick is not None
    for command in commands(result.pick).values():
        assert command.partition("  # ")[0] in text.splitlines(), "ready to be copied"
    assert "a &lt;remark&gt;" in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
    for each in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + each.split("</svg>")[0] + "</svg>")


def test_commands_say_the_whole_layout() -> None:
    given_scenario = scenario("kimi-k2.6", "8x rtx-pro-6000", (8,))
    layout = Layout(pp=4, tp=2, chunk_tokens=4096, depth=2, graphs=False, partition=(16, 15, 15, 15))
    lines = commands(predict(deploy(given_scenario, layout, 8), 8))
    assert lines["fullbore"].startswith(
        "fullbore serve moonshotai/Kimi-K2.6 --pp-size 4 --pp-layer-partition 16,15,15,15"
    )
    assert "TP2 needs SGLang or vLLM" in lines["fullbore"]
    for word in (
        "SGLANG_PP_LAYER_PARTITION=16,15,15,15",
        "--pp-size 4 --tp-size 2 --pp-max-micro-batch-size 2 --pp-async-batch-depth 2 --chunked-prefill-size 4096",
        "--disable-cuda-graph",
    ):
        assert word in lines["sglang"]
    for word in ("VLLM_PP_LAYER_PARTITION=16,15,15,15", "--tensor-parallel-size 2", "--enforce-eager"):
        assert word in lines["vllm"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=0), "--pp must be at least 1"),
        (Layout(pp=33), "more than the model's 32 layers"),
        (Layout(pp=5), "needs 5 devices, but --hardware has 4"),
        (Layout(tp=3), "32 attention heads cannot be divided by 3"),
        (Layout(pp=2, partition=(16, 15)), "adds up to 31 layers"),
        (Layout(pp=2, partition=(32, 0)), "at least one layer"),
        (Layout(pp=2, partition=(32,)), "names 1 stages"),
        (Layout(tp=2, dp_attention=True), "has none; use --replicas"),
        (Layout(replicas=5), "needs 5 devices"),
    ],
)
def test_layouts_that_cannot_be_get_one_helpful_line(layout: Layout, message: str) -> None:
    given_scenario = scenario("llama-3.1-8b", "4x h100")
    with pytest.raises(ConfigError, match=message):
        check_layout(given_scenario.model, given_scenario.hardware, layout)


@settings(deadline=None, max_examples=100)
@given(
    costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    extra=st.lists(st.floats(0, 10), min_size=4, max_size=4),
    speeds=st.lists(st.floats(0.5, 2), min_size=4, max_size=4),
)
def test_splitting_finds_the_fastest_division(
    costs: list[float], stages: int, extra: list[float], speeds: list[float]
) -> None:
    if stages > len(costs):
        return

    def cost(stage: int, start: int, end: int) -> float:
        return sum(costs[start:end]) * speeds[stage] + extra[stage]

    def slowest(partition: tuple[int, ...]) -> float:
        cuts = [sum(partition[:index]) for index in range(stages + 1)]
        return max(cost(stage, cuts[stage], cuts[stage + 1]) for stage in range(stages))

    found_partition = best_partition(len(costs), stages, cost)
    assert found_partition is not None
    every = [each for each in product(range(1, len(costs) + 1), repeat=stages) if sum(each) == len(costs)]
    assert slowest(found_partition) <= min(map(slowest, every)) * (1 + 1e-6)


def test_splitting_gives_up_where_nothing_fits() -> None:
    assert best_partition(4, 2, lambda stage, start, end: float("inf")) is None


def test_even_partitions_put_the_remainder_last() -> None:
    assert even_partition(61, 8) == (7, 7, 7, 8, 8, 8, 8, 8)


def test_charts_survive_odd_values() -> None:
    for is_log in (True, False):
        svg = chart("t", "x", "y", [Series("a", [(1, 0.0), (1, 5)]), Series("b", [])], log_x=is_log, log_y=is_log)
        ElementTree.fromstring(svg)


def test_slo_bounds_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="--slo-itl must be a positive"):
        replace(Slo(), itl_s=-1.0).validate()

"""The closed forms, against values worked out by hand or published."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fullbore.explain import physics
from fullbore.explain.models import find_model
from fullbore.explain.pcie import link_bytes_s
from fullbore.plan.devices import device_named


def test_cycle_is_the_longer_of_both_terms() -> None:
    stages = [3.153, *[3.15] * 6, 3.901]
    assert physics.cycle_s(stages, 8) == pytest.approx(31.208)
    assert physics.cycle_s(stages, 1) == pytest.approx(25.954)
    assert physics.cycle_s(stages, 1, overhead_s=2.0) == pytest.approx(27.954)


def test_ring_of_four() -> None:
    assert physics.ring_period([291, 290, 289, 291]) == pytest.approx(387.0)
    assert physics.ring_cap(4) == 0.75
    assert physics.ring_cap(2) == 0.5


def test_fill() -> None:
    assert physics.fill_efficiency(4, 4) == pytest.approx(4 / 7)
    assert physics.fill_efficiency(1, 8) == 0.125


def test_distinct_experts() -> None:
    assert physics.distinct_experts(8, 384, 8) == pytest.approx(59.52, rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(61, 8, [8, 8, 8, 8, 8, 7, 7, 7]), (94, 8, [12, 12, 12, 12, 12, 12, 11, 11]), (64, 8, [8] * 8), (3, 3, [1, 1, 1])],
)
def test_equal_layers_are_spread_evenly(layers: int, stages: int, expected: list[int]) -> None:
    assert physics.balanced_partition([1.0] * layers, stages) == expected


def test_partition_spares_the_stage_with_the_head() -> None:
    layers = physics.balanced_partition([1.0] * 30, 2, [0.0, 4.0])
    assert layers == [17, 13]


def test_partition_is_never_worse_than_another() -> None:
    costs = [1.0, 5.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0]
    layers = physics.balanced_partition(costs, 3)
    assert sum(layers) == 9
    assert min(layers) >= 1

    def largest(split: list[int]) -> float:
        edges = [0, split[0], split[0] + split[1], 9]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    others = [[a, b, 9 - a - b] for a in range(1, 8) for b in range(1, 9 - a)]
    assert largest(layers) == min(largest(other) for other in others)


def test_default_partitions() -> None:
    assert physics.default_partition("sglang", 61, 8) == [7, 7, 7, 8, 8, 8, 8, 8]
    assert physics.default_partition("vllm", 61, 8)[-1] == 7
    assert sum(physics.default_partition("vllm", 61, 8)) == 61


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [936.0, 1792.0], [1.0, 2.0, 3.0], [1000.0, 1.0]])
def test_weighted_partition_adds_up(speeds: list[float]) -> None:
    layers = physics.weighted_partition(48, speeds)
    assert sum(layers) == 48
    assert min(layers) >= 1
    assert layers.index(max(layers)) == speeds.index(max(speeds))


def test_bytes_on_the_wire() -> None:
    assert physics.hop_bytes_per_token(7168) == 28672
    assert physics.all_reduce_bytes_per_token(88, 12288, 2) == pytest.approx(2 * 88 * 12288 * 2)


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H20", 4000),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA GeForce RTX 3090 Ti", 1008),
        ("NVIDIA GeForce RTX 5070 Ti", 896),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1792),
        ("NVIDIA GB10", 273),
        ("NVIDIA L4", 300),
        ("NVIDIA L40S", 864),
        ("Tesla P40", 347),
    ],
)
def test_cards(name: str, gb_s: float) -> None:
    card = device_named(name)
    assert card is not None
    assert card.bandwidth_gb_s == gb_s


def test_unknown_card() -> None:
    assert device_named("Abacus 9000") is None
    assert device_named(None) is None


def test_links() -> None:
    assert link_bytes_s(1, 4) == 1e9
    assert link_bytes_s(5, 16) == pytest.approx(63e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "total", "active", "per_parameter"),
    [
        ("Kimi-K2.6", 1026, 32, 0.579),
        ("DeepSeek-R1-AWQ", 671, 37, 0.56),
        ("DeepSeek-R1-Distill-Llama-8B", 8, 8, None),
        ("Qwen3.5-397B-A17B-FP8", 397, 17, 1.03),
        ("SomeMoE-100B-A7B", 100, 7, None),
        ("Llama-3.3-70B-Instruct-FP8", 70.6, 70.6, 1.03),
        ("Mistral Medium 3.5 128B, Q4_K", 128, 128, 0.6),
        ("GLM-4.5-Air", None, None, None),
        ("Qwen2.5-72B-Instruct-AWQ", 72.7, 72.7, 0.56),
        ("Mystery-34B-Q4_K_M", 34, 34, 0.6),
        ("no-size-in-it", None, None, None),
    ],
)
def test_models(name: str, total: float | None, active: float | None, per_parameter: float | None) -> None:
    size = find_model(name)
    found = (size.parameters_b, size.active_b, size.bytes_per_parameter)
    assert found == tuple(each and pytest.approx(each, rel=0.02) for each in (total, active, per_parameter))

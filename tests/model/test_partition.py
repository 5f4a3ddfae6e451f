"""The layer partition: complete, disjoint, and as good as exhaustive search finds."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.errors import ConfigError
from fullbore.model.partition import (
    check_partition,
    head_cost,
    layer_costs,
    layer_ranges,
    partition_layers,
    partition_model,
)
from fullbore.model.spec import ModelSpec

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
}


def stage_costs(partition: tuple[int, ...], costs: list[int], first_extra: int, last_extra: int) -> list[int]:
    totals = [sum(costs[start:end]) for start, end in layer_ranges(partition)]
    totals[0] += first_extra
    totals[-1] += last_extra
    return totals


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    first_extra=st.integers(0, 30),
    last_extra=st.integers(0, 30),
    data=st.data(),
)
def test_no_partition_has_a_cheaper_largest_stage(
    costs: list[int], first_extra: int, last_extra: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition_layers(costs, num_stages, first_extra=first_extra, last_extra=last_extra)
    all_partitions = [
        tuple(end - start for start, end in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    ]

    def rank(partition: tuple[int, ...]) -> tuple[int, int]:
        largest = max(stage_costs(partition, costs, first_extra, last_extra))
        return largest, sum(layers**2 for layers in partition)

    assert found in all_partitions
    assert rank(found) == min(map(rank, all_partitions))


@settings(max_examples=50)
@given(costs=st.lists(st.floats(0.001, 1e12), min_size=1, max_size=40), last_extra=st.floats(0, 1e12), data=st.data())
def test_complete_and_disjoint_with_a_layer_on_every_stage(
    costs: list[float], last_extra: float, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    partition = partition_layers(costs, num_stages, last_extra=last_extra)
    check_partition(partition, len(costs), num_stages)
    covered = [layer for start, end in layer_ranges(partition) for layer in range(start, end)]
    assert covered == list(range(len(costs)))


def test_every_number_of_stages_up_to_every_number_of_layers() -> None:
    for num_layers in range(1, 33):
        for num_stages in range(1, num_layers + 1):
            partition = partition_layers([1.0] * num_layers, num_stages, last_extra=2.5)
            check_partition(partition, num_layers, num_stages)


def test_94_layers_on_8_stages_leave_no_remainder_on_the_last() -> None:
    assert partition_layers([1] * 94, 8) == (12, 12, 12, 12, 12, 12, 11, 11)
    assert partition_layers([1] * 94, 8, last_extra=2) == (12, 12, 12, 12, 12, 12, 12, 10)


def test_a_tail_of_five_layers_makes_thirty_17_and_13() -> None:
    assert partition_layers([1] * 30, 2, last_extra=5) == (17, 13)


@pytest.mark.parametrize("bytes_per_param", [2, 4])
def test_smollm2_splits_18_12(bytes_per_param: int) -> None:
    spec = ModelSpec.from_config(SMOLLM2_135M)
    assert partition_model(spec, 2) == (18, 12)
    costs = layer_costs(spec, bytes_per_param=bytes_per_param)
    assert partition_layers(costs, 2, last_extra=head_cost(spec, bytes_per_param=bytes_per_param)) == (18, 12)


def test_kimi_k2s_dense_first_layer_and_head_are_counted() -> None:
    spec = ModelSpec.from_config(KIMI_K2)
    costs = layer_costs(spec)
    assert costs[0] < costs[1] == costs[60]
    partition = partition_model(spec, 8)
    assert partition[0] == 8  # 61 / 8 rounded up: it has the cheap layer
    assert partition[-1] == 7
    assert max(stage_costs(partition, costs, 0, head_cost(spec))) < 8 * costs[1]


@pytest.mark.parametrize("num_stages", [0, -1, 4])
def test_impossible_numbers_of_stages(num_stages: int) -> None:
    with pytest.raises(ConfigError, match="--pp-size"):
        partition_layers([1, 1, 1], num_stages)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((17, 12), "adds up to 29 layers but the model has 30"),
        ((17, 14), "adds up to 31"),
        ((30,), "names 1 stages but --pp-size is 2"),
        ((10, 10, 10), "names 3 stages"),
        ((30, 0), "at least one layer"),
        ((31, -1), "at least one layer"),
    ],
)
def test_senseless_partitions_are_refused(partition: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_partition(partition, 30, 2)


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the model's 2 layers"):
        check_partition((1, 1, 1), 2, 3)
    check_partition((17, 13), 30, 2)


def test_layer_ranges() -> None:
    assert layer_ranges((17, 13)) == [(0, 17), (17, 30)]
    assert layer_ranges((3,)) == [(0, 3)]

# ruff: noqa: N803 (argument names are those of the data file)
"""closed_form.json: what the planner computes about models, memory and traffic, against formulas worked out by hand.

Those about scheduling are in test_closed_form.py; each case is in one of the two files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any

import pytest

from fullbore.plan.device_table import Device
from fullbore.plan.devices import find_device
from fullbore.plan.engines import ENGINES
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout, even_partition, stages_of
from fullbore.plan.links import Link
from fullbore.plan.memory import MemoryPlan, StageMemory, cache_bytes_per_token
from fullbore.plan.model_table import find_model
from fullbore.plan.models import DecoderModel, Matrix, from_config
from fullbore.plan.policy_settings import Scheduling
from fullbore.plan.sglang_policy import SglangScheduler
from fullbore.plan.transfers import all_reduce_s, send_s
from fullbore.plan.vllm_policy import VllmScheduler

DATA = Path(__file__).parents[1] / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "oracles" / "closed_form.json").read_text())["cases"]}
ELSEWHERE = {case["id"] for case in json.loads((DATA / "closed_form_scheduling.json").read_text())["cases"]}
# Arithmetic on measured numbers, with nothing of the planner in it; the expected value is checked as it stands.
PLAIN = {
    "cap-per-ubatch", "head-resplit", "kv-34076-wrong", "kv-32105-stage", "kv-32105-est", "moe-linear-in-experts",
    "moe-powerlaw-vs-balanced", "spark-roofline", "spec-fixed-cost", "spec-break-even", "bubble-bound",
    "proportional-split-bw", "util-one-stream", "series-exo",
}  # fmt: skip
BUILTINS: dict[str, Any] = {"sum": sum, "max": max, "min": min, "len": len, "floor": floor}


def model(name: str, weights: str | None = None) -> DecoderModel:
    found = find_model(name, weights)
    assert found is not None
    return found


def kimi() -> DecoderModel:
    return model("kimi-k2.6")


def cache_bytes(name: str, element_bytes: float) -> float:
    return model(name).cache_elements_per_token() * element_bytes


def settings(pp: int, depth: int = 0, max_running: int = 64) -> Scheduling:
    return Scheduling(
        pp=pp,
        depth=depth,
        micro_batches="auto",
        max_micro_batch="auto",
        max_running=max_running,
        chunk_tokens=512,
        num_blocks=64,
    )


def link(bandwidth_bytes_s: float, latency_s: float = 0.0) -> Link:
    return Link(
        name="test",
        bandwidth_bytes_s=bandwidth_bytes_s,
        latency_s=latency_s,
        all_reduce_latency_s=latency_s,
        ring_step_latency_s=0.0,
        source="test",
    )


def dense(hidden: int, layers: int) -> DecoderModel:
    return from_config(
        {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 96, "vocab_size": 1000}
    )


def capacity(cache_gb: list[float], per_token: list[float]) -> int:
    return MemoryPlan(
        tuple(
            StageMemory(usable_bytes=gb, weight_bytes=0, buffer_bytes=0, cache_bytes_per_token=bytes_per_token)
            for gb, bytes_per_token in zip(cache_gb, per_token, strict=True)
        )
    ).cache_tokens


def kv_34076_right(avail: float, per_tok: float, n: int, L: int) -> int:
    return capacity([avail, 1e15], [per_tok * n / L, per_tok * (L - n) / L])


def kv_stage_need(per_tok: float, max_len: int, n: list[int], L: int) -> list[float]:
    """A model of 48 layers with that cache, on two stages."""
    elements = round(per_tok / L / 2)  # two bytes each
    config = {
        "num_hidden_layers": L,
        "hidden_size": elements,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": elements // 2,
        "vocab_size": 1000,
        "intermediate_size": 8,
    }
    stages = stages_of(parse_hardware("2x h100"), Layout(pp=2), n)
    return [cache_bytes_per_token(from_config(config), stage, max_len, 2.0) * max_len / 2**30 for stage in stages]


def kimi_tp8_s(bandwidth_bytes_s: float, all_reduce_latency_s: float = 0.0) -> float:
    """One token on eight ranks, at full bandwidth: bytes of each rank, and the all-reduces."""
    stage = stages_of(parse_hardware("8x rtx-pro-6000"), Layout(tp=8), [61])[0]

    def rank_bytes(matrix: Matrix) -> float:
        return matrix.bytes_read(1) / stage.weight_ranks(matrix)

    # The formula divides the router; every rank has it in full, which is 1 % of the time.
    total = sum(rank_bytes(matrix) for layer in kimi().layers for matrix in layer.matrices if matrix.role != "router")
    total += sum(m.bytes_read(1) / 8 for layer in kimi().layers for m in layer.matrices if m.role == "router")
    total += kimi().head.total_bytes / 8
    reduces = 2 * kimi().num_layers * all_reduce_s(link(1e15, all_reduce_latency_s), 8, 1)
    return total / bandwidth_bytes_s + reduces


def routed(matrix_of: DecoderModel) -> Matrix:
    return next(matrix for matrix in matrix_of.layers[-1].matrices if matrix.num_experts)


def pro() -> Device:
    return find_device("rtx-pro-6000")


COMPUTED: dict[str, Callable[..., Any]] = {
    "sglang-loop-size": lambda pp_size, pp_async_batch_depth: (
        SglangScheduler(settings(pp_size, pp_async_batch_depth)).num_slots
    ),
    "sglang-mb-default": lambda max_running_requests, pp_size: (
        SglangScheduler(settings(pp_size, max_running=max_running_requests)).slot_cap
    ),
    "vllm-inflight": lambda pp_size: VllmScheduler(settings(pp_size, depth=1)).in_flight_limit,
    "kv-34076-per-token": lambda need, max_len: sum(kv_stage_need(98304, max_len, [16, 32], 48)) * 2**30 / max_len,
    "kv-34076-right": kv_34076_right,
    "kv-34076-stage-need": kv_stage_need,
    "kv-min-two-stage": lambda avail, per_tok_layer, n: capacity(avail, [per_tok_layer * each for each in n]),
    "kv-bytes-kimi-mla-bf16": lambda **_: cache_bytes("kimi-k2.6", 2),
    "kv-bytes-kimi-mla-fp8": lambda **_: cache_bytes("kimi-k2.6", 1),
    "kv-bytes-llama70b": lambda **_: cache_bytes("llama-3.1-70b", 2),
    "kv-bytes-llama8b": lambda **_: cache_bytes("llama-3.1-8b", 2),
    "kv-bytes-qwen32b": lambda **_: cache_bytes("qwen3-32b", 2),
    "kv-bytes-qwen235b": lambda **_: cache_bytes("qwen3-235b-a22b", 2),
    "kv-kimi-capacity-check": lambda tokens, b: tokens * cache_bytes("kimi-k2.6", 1) / 1e9,
    "hop-bytes-12288": lambda h, b: dense(h, 96).hidden_size * b,
    "tp-bytes-12288": lambda h, L, b: 2 * dense(h, L).num_layers * h * b,
    "tp-prefill-2048": lambda h, L, b, n, gbps: (
        # Every rank receives as much as the message holds: one-shot over two ranks.
        2 * dense(h, L).num_layers * all_reduce_s(link(gbps * 1e9 / 8), 2, h * b * n) * 1e3
    ),
    "hop-kimi": lambda h, b: [kimi().hidden_size * b * tensors for tensors in (1, 2)],
    "hop-llama70b-16KB": lambda h, b: model("llama-3.1-70b").hidden_size * b,
    "hop-kimi-8k-pcie5": lambda h, b, n, bw: send_s(link(bw), h * b * n) * 1e3,
    "allreduce-kimi-step": lambda L, t: 2 * kimi().num_layers * all_reduce_s(link(1e15, t), 8, 1) * 1e3,
    "U-upper": lambda E, k, b: min(E, round(routed(kimi()).num_active * b)),
    "kimi-expert-bytes": lambda **_: routed(kimi()).params * routed(kimi()).format.bytes_per_param / 1e6,
    "kimi-weights": lambda **_: kimi().weight_bytes / 1e9,
    "kimi-bytes-token": lambda **_: kimi().bytes_read(1) / 1e9,
    "kimi-pp8-roofline": lambda bw, **_: bw / kimi().bytes_read(1),
    "kimi-tp8-roofline": lambda bw, **_: 1 / kimi_tp8_s(bw),
    "kimi-tp8-with-ar": lambda bw, ar, **_: 1 / kimi_tp8_s(bw, ar),
    "kimi-fits-8x96": lambda w, n: kimi().weight_bytes / 1e9 / n,
    "partition-sglang-61-8": lambda L, P: list(even_partition(L, P)),
    "partition-sglang-94-8": lambda L, P: list(even_partition(L, P)),
    "partition-sglang-61-4": lambda L, P: list(even_partition(L, P)),
    "partition-sglang-64-8": lambda L, P: list(even_partition(L, P)),
}


def tolerance(case: dict[str, Any]) -> dict[str, float]:
    return {"rel": case["tol"], "abs": 1e-12} if case["tol_kind"] == "rel" else {"rel": 0, "abs": case["tol"]}


def as_list(value: Any) -> list[float]:
    return [float(each) for each in (value if isinstance(value, list | tuple) else [value])]


def test_every_case_is_covered() -> None:
    assert set(CASES) == ELSEWHERE | PLAIN | set(COMPUTED), set(CASES) ^ (ELSEWHERE | PLAIN | set(COMPUTED))


@pytest.mark.parametrize("case_id", sorted(COMPUTED))
def test_planner_computes_it(case_id: str) -> None:
    case = CASES[case_id]
    value = COMPUTED[case_id](**case["inputs"])
    assert as_list(value) == pytest.approx(as_list(case["expected"]), **tolerance(case))


@pytest.mark.parametrize("case_id", sorted(PLAIN - ELSEWHERE))
def test_expected_value_is_the_formulas(case_id: str) -> None:
    case = CASES[case_id]
    from math import ceil, log2

    names = {**BUILTINS, "ceil": ceil, "log2": log2, **case["inputs"]}
    value = eval(case["formula"], {"__builtins__": {}, **names})
    assert as_list(value) == pytest.approx(as_list(case["expected"]), **tolerance(case))


def test_defaults_of_the_engines_are_those_of_the_facts() -> None:
    assert ENGINES["sglang"].hides_host_alone, "overlap scheduling is off only with pipeline stages"

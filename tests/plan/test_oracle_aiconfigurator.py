"""aiconfigurator's estimates of single steps, as geometric means of ratios: they scatter too much for single cells."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import exp, log

import pytest
from measured_oracle import Row, read

from fullbore.plan.cost_model import ModelCosts
from fullbore.plan.engines import Engine
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout
from fullbore.plan.loads import Load
from fullbore.plan.model_table import find_model
from fullbore.plan.scenario import Demand, Scenario, deploy

SYSTEMS = {"b200_sxm": "b200", "h100_sxm": "h100", "rtx_pro_6000_server": "rtx-pro-6000"}
# Kernels only: the grid knows no host.
KERNELS = Engine(name="none", policy="sglang", driver_s=0, step_s=0, request_s=0, hides_host_alone=True)


@cache
def costs_of(model: str, system: str, pp: int, tp: int) -> ModelCosts:
    found = find_model(model)
    assert found is not None
    hardware = parse_hardware(f"8x {SYSTEMS[system]}")
    scenario = Scenario(model=found, hardware=hardware, engine=KERNELS, demand=Demand(concurrency=(1,)))
    return deploy(scenario, Layout(pp=pp, tp=tp), 1).costs


def predicted_ms(row: Row) -> float:
    batch, isl, osl = int(row["batch"]), int(row["isl"]), int(row["osl"])
    if row["phase"] == "decode":
        load = Load(batch, sampled=batch, context_tokens=batch * (isl + osl // 2))
    else:
        load = Load(0, batch * isl, batch * isl * isl, batch)
    return 1e3 * costs_of(row["model"], row["system"], int(row["pp"]), int(row["tp"])).traverse_s(load)


def geometric_means(rows: list[Row], *keys: str) -> dict[tuple[str, ...], float]:
    logs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        logs[tuple(row[key] for key in keys)].append(log(predicted_ms(row) / float(row["ms"])))
    return {key: exp(sum(values) / len(values)) for key, values in logs.items()}


def test_geometric_mean_of_ratios_is_within_15_percent_per_backend() -> None:
    means = geometric_means(read("aiconfigurator_grid.csv"), "backend")
    assert set(means) == {("sglang",), ("vllm",), ("trtllm",)}
    for backend, mean in means.items():
        assert mean == pytest.approx(1, abs=0.15), backend


def test_no_phase_of_any_device_is_far_off() -> None:
    for key, mean in geometric_means(read("aiconfigurator_grid.csv"), "system", "phase").items():
        assert 1 / 1.2 < mean < 1.2, (key, mean)

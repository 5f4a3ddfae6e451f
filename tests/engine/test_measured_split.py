"""What one start measured divides the layers of the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from fullbore.config import EngineConfig
from fullbore.engine.measured_split import MOST_STARTS, known_head_factor, remember_head_factor
from fullbore.engine.messages import EngineInfo, StageInfo
from fullbore.engine.placement import place_model
from fullbore.model.partition import head_cost, head_factor, layer_costs, partition_model
from fullbore.model.spec import ModelSpec

SIZES = (1, 2, 4, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=8)


def decode_s(spec: ModelSpec, partition: tuple[int, ...], factor: float, unit_s: float) -> list[dict[int, float]]:
    """Of a machine on which the head costs so many times what is estimated."""
    layer = layer_costs(spec)[0]
    costs = [count * layer for count in partition]
    costs[-1] += factor * head_cost(spec)
    return [{size: cost * unit_s * (1 + size / 10) for size in SIZES} for cost in costs]


def info_of(folder: Path, partition: tuple[int, ...]) -> EngineInfo:
    config = EngineConfig(
        model=str(folder), pp_size=len(partition), pp_layer_partition=partition, devices=("cpu",) * len(partition)
    )
    stages = [StageInfo(stage, (0, 1), "cpu", 0, 0) for stage in range(len(partition))]
    return EngineInfo(
        config, str(folder), "tiny", "Llama", "float32", "cpu", 100, 100, 10, 160, len(partition), (), stages
    )


@pytest.mark.parametrize("partition", [(4, 4), (1, 7), (2, 3, 3)])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_factor_is_that_of_the_machine(folder: Path, partition: tuple[int, ...], factor: float) -> None:
    spec = ModelSpec.from_folder(folder)
    assert head_factor(spec, partition, decode_s(spec, partition, factor, 1e-9)) == pytest.approx(factor)


def test_one_stage_cannot_tell(folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    assert head_factor(spec, (8,), decode_s(spec, (8,), 2.0, 1e-9)) is None


def test_the_next_start_divides_by_it(folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    config = EngineConfig(model=str(folder), pp_size=2, device="cpu")
    first = place_model(config).partition
    assert first == partition_model(spec, 2)
    factor = layer_costs(spec)[0] * 4 / head_cost(spec)  # the head as dear as four layers
    for _ in range(MOST_STARTS):
        remember_head_factor(info_of(folder, first), decode_s(spec, first, min(factor, 4.0), 1e-6))
    found = known_head_factor(config, folder, "float32", "cpu")
    assert 1 < found < min(factor, 4.0), "the estimate still counts as one start"
    assert place_model(config).partition == partition_model(spec, 2, found)
    other = EngineConfig(model=str(folder), pp_size=2, device="cpu", threads_per_stage=2)
    assert known_head_factor(other, folder, "float32", "cpu") == 1.0


def test_short_steps_and_broken_files_count_for_nothing(folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    config = EngineConfig(model=str(folder), pp_size=2)
    remember_head_factor(info_of(folder, (4, 4)), decode_s(spec, (4, 4), 3.0, 1e-12))
    assert not list(tmp_path.rglob("splits/*"))
    remember_head_factor(info_of(folder, (4, 4)), decode_s(spec, (4, 4), 1e9, 1e-6))
    [file] = (tmp_path / "cache/fullbore/splits").iterdir()
    assert json.loads(file.read_text()) == [4.0], "what cannot be is cut"
    for text in ("", "[1, null]", '{"a": 1}', "[0]", "[NaN]", "[1e300]"):
        file.write_text(text)
        assert known_head_factor(config, folder, "float32", "cpu") == 1.0

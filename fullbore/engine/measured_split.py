"""Remembers, for each model and machine, how dear the head was against the layers when a pipeline started there.

Before its first request an engine measures its stages anyhow (probe.py), but then the layers are divided already. So
what it finds serves the next start. Measurements of one start may be disturbed: what divides the layers is the mean of
several, and of the estimate that the first start had to do with. Sampling is left out: what it takes depends on what
requests ask for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import exp, isfinite, log
from pathlib import Path

from fullbore.config import EngineConfig
from fullbore.engine.messages import EngineInfo
from fullbore.errors import ModelError
from fullbore.model.cache import splits_folder
from fullbore.model.partition import head_factor
from fullbore.model.processor import processor_name
from fullbore.model.spec import ModelSpec

MOST_STARTS = 8  # that count, the last ones
MOST_FACTOR = 4.0  # either way; beyond, something went wrong
LEAST_STEP_S = 1e-3  # shorter steps are mostly noise, and dividing them better gains nothing


def known_head_factor(config: EngineConfig, folder: Path, dtype: str, device: str) -> float:
    """1 where nothing is known."""
    logarithms = [log(factor) for factor in _read(_file(config, folder, dtype, device))]
    return exp(sum(logarithms) / (len(logarithms) + 1))


def remember_head_factor(info: EngineInfo, compute_s: Sequence[Mapping[int, float]]) -> None:
    """Takes in what the stages of this engine take; see `head_factor`. Without a place to write, does nothing."""
    if min(min(times.values(), default=0.0) for times in compute_s) < LEAST_STEP_S:
        return
    folder, partition = Path(info.model_path), info.config.pp_layer_partition
    assert partition is not None
    factor = head_factor(ModelSpec.from_folder(folder), partition, compute_s)
    if factor is None:
        return
    file = _file(info.config, folder, info.dtype, info.config.devices[0])
    factors = [*_read(file), min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)][-MOST_STARTS:]
    with suppress(OSError, ModelError):
        splits_folder().mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.{os.getpid()}")
        new.write_text(json.dumps([round(each, 4) for each in factors]), encoding="utf-8")
        new.replace(file)


def _file(config: EngineConfig, folder: Path, dtype: str, device: str) -> Path:
    """One per model, machine, and whatever else changes what layers and head take."""
    parts = [
        (folder / "config.json").read_text(encoding="utf-8"),
        processor_name(),
        device,
        dtype,
        str(config.threads_per_stage),
        config.backend,
        "without sampling",
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return splits_folder() / f"{digest[:16]}.json"


def _read(file: Path) -> list[float]:
    with suppress(OSError, ValueError):
        factors = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(factors, list) and all(_is_plausible(each) for each in factors):
            return factors
    return []


def _is_plausible(factor: object) -> bool:
    return isinstance(factor, float | int) and isfinite(factor) and 1 / MOST_FACTOR <= factor <= MOST_FACTOR

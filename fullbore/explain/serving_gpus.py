"""Which of the GPUs in the samples hold the model, in the order of the stages."""

from __future__ import annotations

import re

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.settings import Settings

_HOLDS_MODEL = 0.1  # of the fullest GPU's memory; less is a desktop, not a share of the model
_AT_WORK_PERCENT = 1.0
_LIST = re.compile(r"(?:device=)?(\d+(?:,\d+)*)")


def gpus_with_model(evidence: Evidence, settings: Settings) -> list[Gpu]:
    """As the engine sees them where the evidence says so, otherwise by machine and index; those in use by memory."""
    gpus = sorted(evidence.gpus, key=lambda gpu: (gpu.machine, gpu.index))
    gpus = _visible(gpus, settings)
    fullest = max((gpu.memory_used_mib or 0.0 for gpu in gpus), default=0.0)
    return [gpu for gpu in gpus if gpu.memory_used_mib is None or gpu.memory_used_mib >= _HOLDS_MODEL * fullest]


def gpus_at_work(gpus: list[Gpu], count: int, replicas: int) -> list[Gpu]:
    """Of more GPUs than a pipeline has ranks: its first copy's, or those that do anything, if they are as many."""
    if not count or len(gpus) <= count:
        return gpus
    if replicas > 1 and len(gpus) == replicas * count:
        return gpus[:count]
    active = [gpu for gpu in gpus if gpu.has_load and gpu.load.utilisation_percent.mean > _AT_WORK_PERCENT]
    return active if len(active) == count else gpus


def _visible(gpus: list[Gpu], settings: Settings) -> list[Gpu]:
    """In the order of CUDA_VISIBLE_DEVICES and the like; untouched where that does not fit the samples."""
    indices = listed_gpus(settings)
    if indices is None:
        return _from_first(gpus, settings)
    chosen = []
    for machine in dict.fromkeys(gpu.machine for gpu in gpus):
        by_index = {gpu.index: gpu for gpu in gpus if gpu.machine == machine}
        if not all(index in by_index for index in indices):
            return gpus
        chosen += [by_index[index] for index in indices]
    return chosen


def listed_gpus(settings: Settings) -> list[int] | None:
    """`2,3`, or docker's `device=2,3`; one number alone only from a variable, elsewhere it is a count."""
    reading = settings.reading("visible_gpus")
    match = _LIST.fullmatch(str(reading.value).strip("'\" ")) if reading is not None else None
    if reading is None or match is None:
        return None
    is_list = "," in match[1] or match[0].startswith("device=") or reading.name.endswith("VISIBLE_DEVICES")
    return [int(number) for number in match[1].split(",")] if is_list else None


def _from_first(gpus: list[Gpu], settings: Settings) -> list[Gpu]:
    """SGLang's --base-gpu-id leaves out the GPUs before it."""
    first = settings.number("first_gpu")
    later = [gpu for gpu in gpus if first is not None and gpu.index >= first.number]
    return later or gpus

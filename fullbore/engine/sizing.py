"""How many KV blocks: the same number on every stage, so that one allocator serves all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

from fullbore.config import EngineConfig
from fullbore.engine.messages import Loaded
from fullbore.errors import OutOfMemoryError

_DEFAULT_FRACTION = {"cuda": 0.85, "cpu": 0.3}  # a CPU's memory belongs to others as well
_SMALLEST_USEFUL_TOKENS = 256


def num_kv_blocks(config: EngineConfig, loaded: Sequence[Loaded], devices: Sequence[str], context_length: int) -> int:
    """Blocks that fit on every stage, and no more than all running requests can use.

    Stages on one device (all CPU stages of a host) share its free memory; each reports what is free after its own
    weights are loaded, and the least of the reports counts.

    Raises:
        OutOfMemoryError: not even the smallest useful cache fits, or not what --max-total-tokens or --context-length
            asks for; says how much is missing, and on which stage.
    """
    page_size = config.page_size
    most = config.max_running_requests * ceil(context_length / page_size)
    required_tokens = min(context_length, _SMALLEST_USEFUL_TOKENS)
    if config.context_length is not None:
        required_tokens = context_length
    if config.max_total_tokens is not None:
        most = max(config.max_total_tokens // page_size, 1)
        required_tokens = config.max_total_tokens

    fitting = most
    for device, stages in _stages_of_devices(devices).items():
        budget_bytes = _budget_bytes(config, device, min(loaded[stage].free_bytes for stage in stages))
        block_bytes = sum(loaded[stage].kv_block_bytes for stage in stages)
        required_bytes = min(ceil(required_tokens / page_size), most) * block_bytes
        if required_bytes > budget_bytes:
            raise OutOfMemoryError(_explain(stages, device, required_tokens, required_bytes, budget_bytes))
        fitting = min(fitting, budget_bytes // block_bytes)
    return fitting


def check_weights_fit(weight_bytes: Sequence[int], free_bytes: Sequence[int], devices: Sequence[str]) -> None:
    """Before loading: raises OutOfMemoryError, naming the stage, if the weights alone are more than what is free."""
    for device, stages in _stages_of_devices(devices).items():
        needed = sum(weight_bytes[stage] for stage in stages)
        free = min(free_bytes[stage] for stage in stages)
        if needed > free:
            from fullbore.model.device import format_bytes  # late: imports torch

            raise OutOfMemoryError(
                f"The weights of {_name(stages)} need {format_bytes(needed)} on {device} but {format_bytes(free)} are "
                f"free: {format_bytes(needed - free)} are missing. Use a smaller model or dtype, or more devices."
            )


def _budget_bytes(config: EngineConfig, device: str, free_bytes: int) -> int:
    if config.max_total_tokens is not None and config.mem_fraction_static is None:
        return free_bytes  # the user knows what to take
    fraction = config.mem_fraction_static or _DEFAULT_FRACTION[device.partition(":")[0]]
    return int(free_bytes * fraction)


def _stages_of_devices(devices: Sequence[str]) -> dict[str, list[int]]:
    stages: defaultdict[str, list[int]] = defaultdict(list)
    for stage, device in enumerate(devices):
        stages[device].append(stage)
    return dict(stages)


def _explain(stages: Sequence[int], device: str, tokens: int, required_bytes: int, budget_bytes: int) -> str:
    from fullbore.model.device import format_bytes  # late: imports torch

    return (
        f"The KV cache for {tokens} tokens needs {format_bytes(required_bytes)} on {device} ({_name(stages)}) but may "
        f"use {format_bytes(budget_bytes)}: {format_bytes(required_bytes - budget_bytes)} are missing. Lower "
        "--max-total-tokens or --context-length, raise --mem-fraction-static, or free memory."
    )


def _name(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return "stages " + ", ".join(map(str, stages))

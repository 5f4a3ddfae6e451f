"""Where a stage runs, in which number type, and how much memory is free there."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from fullbore.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`.

    Raises:
        ConfigError: the name is not one of float32, bfloat16, float16.
    """
    if name not in _DTYPES:
        raise ConfigError(f"--dtype must be one of auto, {', '.join(_DTYPES)}, got {name}.")
    return _DTYPES[name]


def resolve_devices(device: str, pp_size: int, devices: Sequence[str] = ()) -> tuple[str, ...]:
    """The device of each stage: `cuda:0`, `cuda:1`, … or `cpu`. "auto" takes GPUs if there is one per stage.

    Args:
        devices: one per stage, if the user names them; several stages may share a GPU.

    Raises:
        ConfigError: GPUs were asked for and there are fewer than stages, or a name is unknown.
    """
    if devices:
        _check_devices(devices)
        return tuple(devices)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be one of auto, cpu, cuda, got {device}.")
    num_gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus < pp_size:
        raise ConfigError(
            f"--device cuda needs one GPU per stage: --pp-size is {pp_size} but {num_gpus} can be used; "
            "lower --pp-size, give --device cpu, or name the device of each stage with --devices."
        )
    if num_gpus >= pp_size:
        return tuple(f"cuda:{stage}" for stage in range(pp_size))
    return ("cpu",) * pp_size


def _check_devices(devices: Sequence[str]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if all(device == "cpu" for device in devices):
        return
    for device in devices:
        match = re.fullmatch(r"cuda:(\d+)", device)
        if match is None:
            raise ConfigError(f"--devices must be all cpu, or all cuda:0, cuda:1, …; got {','.join(devices)}.")
        if int(match[1]) >= num_gpus:
            raise ConfigError(f"--devices names {device} but {num_gpus} GPUs can be used; see `nvidia-smi`.")


def resolve_dtype(dtype: str, device: str, checkpoint_dtype: str) -> str:
    """The number type to compute in. "auto": the checkpoint's on GPU, what the processor is fast at on CPU.

    Raises:
        ConfigError: `dtype` is neither "auto" nor a known type.
    """
    if dtype != "auto":
        torch_dtype(dtype)
        return dtype
    if device == "cpu":
        return "bfloat16" if has_native_bfloat16() else "float32"
    if checkpoint_dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return checkpoint_dtype


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; where it only converts, float32 is much faster."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # on Arm oneDNN answers for the instructions themselves
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def free_memory_bytes(device: str) -> int:
    """Memory that can still be allocated on `device`; on CPU the container's limit counts too."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_free_bytes()
    return available if limit is None else min(available, limit)


def _cgroup_free_bytes() -> int | None:
    """What the control group (a container) may still use; None without a limit. Idle file cache counts as free."""
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / "memory.max").read_text())  # "max" means no limit
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    return None


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory instead of giving it back to the system after every large tensor.

    Activations are allocated and freed in every layer; without this most of their cost is page faults. Call it after
    loading, whose temporary buffers should be given back. Does nothing where there is no `mallopt`.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_trim_threshold, 1 << 30)
        mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 1 << 25)  # some versions refuse more


def format_bytes(num_bytes: float) -> str:
    """For messages: 1.5 GiB, 300.0 MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"

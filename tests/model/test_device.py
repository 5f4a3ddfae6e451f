"""Which device and number type a stage gets."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest
import torch

from fullbore.errors import ConfigError
from fullbore.model import device as device_module
from fullbore.model.device import (
    format_bytes,
    free_memory_bytes,
    has_native_bfloat16,
    resolve_devices,
    resolve_dtype,
    torch_dtype,
)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_gpus_if_there_is_one_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert resolve_devices("auto", 2) == ("cuda:0", "cuda:1")
    assert resolve_devices("cuda", 1) == ("cuda:0",)
    assert resolve_devices("auto", 3) == ("cpu",) * 3
    assert resolve_devices("cpu", 2) == ("cpu", "cpu")


def test_too_few_gpus_is_an_error_only_when_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    assert resolve_devices("auto", 1) == ("cpu",)
    with pytest.raises(ConfigError, match="--pp-size is 2 but 0 can be used"):
        resolve_devices("cuda", 2)
    with pytest.raises(ConfigError, match="got tpu"):
        resolve_devices("tpu", 1)


def test_the_user_names_the_device_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert resolve_devices("auto", 2, ("cuda:1", "cuda:0")) == ("cuda:1", "cuda:0")
    assert resolve_devices("auto", 2, ("cuda:0", "cuda:0")) == ("cuda:0", "cuda:0")
    assert resolve_devices("auto", 2, ("cpu", "cpu")) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="names cuda:2 but 2 GPUs"):
        resolve_devices("auto", 2, ("cuda:0", "cuda:2"))
    for names in (("cuda:0", "cpu"), ("cuda", "cuda"), ("tpu:0", "tpu:0")):
        with pytest.raises(ConfigError, match=f"got {','.join(names)}"):
            resolve_devices("auto", 2, names)


def test_dtype_auto_on_cpu_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(device_module, "has_native_bfloat16", lambda native=native: native)
        assert resolve_dtype("auto", "cpu", "bfloat16") == expected
        assert resolve_dtype("float16", "cpu", "bfloat16") == "float16"


def test_dtype_auto_on_gpu_follows_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert resolve_dtype("auto", "cuda:0", "bfloat16") == expected
        assert resolve_dtype("auto", "cuda:0", "float32") == "float32"


def test_unknown_dtype() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match="got int8"):
        resolve_dtype("int8", "cpu", "float32")


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads x86 flags")
def test_native_bfloat16_agrees_with_the_processors_flags() -> None:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 2)[1].split("\n")[0].split()
    assert has_native_bfloat16() == ("avx512_bf16" in flags or "amx_bf16" in flags)


def test_free_memory_respects_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory_bytes("cpu") <= psutil.virtual_memory().total
    monkeypatch.setattr(device_module, "_cgroup_free_bytes", lambda: 12345)
    assert free_memory_bytes("cpu") == 12345


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (512, 3 * 2**20, 2.5 * 2**30)] == ["0.5 KiB", "3.0 MiB", "2.5 GiB"]

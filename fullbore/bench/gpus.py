"""GPU utilisation and power while something runs, where NVML (the package nvidia-ml-py) is there."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

from fullbore.bench.measure import GpuUse

_PERIOD_S = 0.5


class GpuSampler:
    """Samples all GPUs from a thread of its own between `__enter__` and `__exit__`; without NVML it does nothing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._samples: dict[int, list[tuple[float, float]]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuSampler:
        with suppress(Exception):  # no package, no driver, no permission: no figures
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._samples = {i: [] for i in range(self._nvml.nvmlDeviceGetCount())}
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            for gpu, samples in self._samples.items():
                with suppress(Exception):
                    handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
                    percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                    samples.append((percent / 100, self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000))

    def uses(self) -> list[GpuUse]:
        """Means per GPU; empty without NVML."""
        return [self._mean(gpu, samples) for gpu, samples in self._samples.items() if samples]

    def _mean(self, gpu: int, samples: list[tuple[float, float]]) -> GpuUse:
        name = self._nvml.nvmlDeviceGetName(self._nvml.nvmlDeviceGetHandleByIndex(gpu))
        utilisation, power_w = (sum(column) / len(samples) for column in zip(*samples, strict=True))
        return GpuUse(gpu, name if isinstance(name, str) else name.decode(), utilisation, power_w)

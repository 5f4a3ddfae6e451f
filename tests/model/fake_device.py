"""A stage on a device that exists in name only: `fake_device.py MODEL_FOLDER`, as a process of its own.

Tensors have shapes, types and a device but no values. An operation that mixes tensors of the device with the host's, or
needs a value (and so would make the host wait), fails. That is most of what can go wrong on a GPU and not on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fullbore.model import runner as runner_module
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.native import graphs as graphs_module
from fullbore.model.runner import StageRunner
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

DEVICE = "gadget:0"
GREEDY = Sampling(0.0, 1.0, 0, 0, 0, 0)
PREFILL = [Run(0, 0, 0, [1] * 20, [0, 1, 2, 3], None), Run(1, 0, 5, [4], [7, 8], None)]
CHUNK = [Run(0, 0, 20, [1] * 3, [0, 1, 2, 3], None), Run(1, 0, 6, [4], [7, 8], None)]
DECODE = [Run(0, 0, 23, [1], [0, 1, 2, 3], GREEDY), Run(1, 0, 7, [4], [7, 8], GREEDY)]
TOO_MANY = [Run(k, 0, k, [1], [k], GREEDY) for k in range(5)]


def tensor(data: Any, dtype: torch.dtype | None = None, device: Any = "cpu", pin_memory: bool = False) -> torch.Tensor:
    """In the place of torch.tensor, which takes values."""
    values = np.asarray(data)
    return torch.empty(values.shape, dtype=dtype or torch.from_numpy(values).dtype, device=device)


def run(stages: list[StageRunner], runs: list[Run]) -> None:
    hidden = None
    for stage in stages:
        hidden = stage.forward(MicroBatch(0, runs, "slot-freed", 0.0), hidden)
        assert hidden.device == torch.device(DEVICE)


def main() -> None:
    _setup_privateuseone_for_python_backend("gadget")
    torch.tensor = tensor  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    runner_module.free_memory_bytes = lambda device: 1 << 40  # type: ignore[attr-defined]
    graphs_module.CudaGraphs = lambda device: graphs_module.run_anew  # type: ignore[assignment, misc]
    Checkpoint.load_into = lambda *_: None  # type: ignore[assignment, method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True):
        stages = []
        for stage in range(2):
            runner = StageRunner.load(
                Path(sys.argv[1]), stage, (2, 2), DEVICE, "float16", 8, backend="native", graph_requests=4
            )
            runner.allocate_kv(40)
            stages.append(runner)
        for runs in (PREFILL, CHUNK):
            run(stages[:1], runs)
        for runs in (DECODE, TOO_MANY):
            run(stages, runs)
            print("graph" if stages[1].used_graph else "eager")
        try:
            stages[0]._graphs._hidden.add_(torch.zeros(1, 64))  # type: ignore[union-attr]
        except Exception as error:
            print(type(error).__name__)


if __name__ == "__main__":
    main()

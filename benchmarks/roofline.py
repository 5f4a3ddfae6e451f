"""How near a step comes to what the machine allows: python benchmarks/roofline.py [MODEL]

Measures the memory bandwidth and the arithmetic of 1 … all cores with plain loops, then decode steps of the model. The
memory limit of a step: all weights and the KV cache of its requests, each read once. Beside it stands the limit of
arithmetic: 2 operations per weight and request. The least times count: neighbours on the machine only make them longer.

With --engine also whole engines (stages × threads), prompts of 64 tokens, 64 tokens out, prefill included.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from fullbore import LLM
from fullbore.config import DEFAULT_MODEL
from fullbore.llm import SamplingParams
from fullbore.model.native.build import load_library
from fullbore.model.native.cpu_kernels import CpuKernels, huge_pages
from fullbore.model.resolve import resolve_model
from fullbore.model.runner import StageRunner
from fullbore.model.spec import ModelSpec
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

PAGE_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXT = 96  # 64 tokens in and half of 64 out
TOKENS_IN = TOKENS_OUT = 64
GREEDY = Sampling(0.0, 1.0, 0, 0, 0, 0)


class Machine(NamedTuple):
    """What so many threads can do at most."""

    threads: int
    bytes_per_s: float
    flops_per_s: float


def least_s(action: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return min(times)


def measure_machine(threads: int) -> Machine:
    library = load_library()
    if library is None:
        raise SystemExit("There is no C++ compiler: nothing to measure with.")
    kernels = CpuKernels(library, torch.float32, threads)
    memory = huge_pages(2**29)
    memory.fill_(0)
    read_s = least_s(lambda: library.fb_read(memory.data_ptr(), 2**27), 7)
    rows, outputs, inputs = 96, 512, 256  # everything stays in the second-level caches
    kernels.reserve(kernels.packed_bytes(outputs, inputs, torch.float32))
    linear = kernels.pack(torch.ones(outputs, inputs), None)
    x = torch.ones(rows, inputs)
    multiply_s = least_s(lambda: [kernels.linear(linear, x) for _ in range(200)], 7) / 200
    return Machine(threads, 2**29 / read_s, 2 * rows * outputs * inputs / multiply_s)


def measure_steps(folder: Path, machine: Machine, dtype: str) -> None:
    torch.set_num_threads(machine.threads)
    spec = ModelSpec.from_folder(folder)
    runner = StageRunner.load(folder, 0, (spec.num_layers,), "cpu", dtype, PAGE_SIZE)
    blocks = CONTEXT // PAGE_SIZE + 1
    runner.allocate_kv(max(BATCHES) * blocks)
    kv_bytes = spec.num_layers * spec.kv_elements_per_token * runner.dtype.itemsize * CONTEXT
    params = sum(layer.num_params for layer in spec.layers) + spec.embedding_params
    print(
        f"\n{machine.threads} thread(s): {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GFLOP/s;"
        f" weights {runner.weight_bytes / 1e6:.0f} MB, KV {kv_bytes / 1e6:.1f} MB per request of {CONTEXT} tokens"
    )
    print("batch   ms/step   tokens/s   memory limit ms   reached   arithmetic ms   reached")
    for batch in BATCHES:
        runs = [
            Run(k, 0, CONTEXT - 1, [k + 5], list(range(k * blocks, (k + 1) * blocks)), GREEDY) for k in range(batch)
        ]
        micro_batch = MicroBatch(0, runs, "slot-freed", 0.0)

        def step(micro_batch: MicroBatch = micro_batch) -> None:
            runner.sample(micro_batch, runner.forward(micro_batch, None))

        seconds = least_s(step, 12)
        memory_s = (runner.weight_bytes + batch * kv_bytes) / machine.bytes_per_s
        arithmetic_s = 2 * params * batch / machine.flops_per_s
        print(
            f"{batch:5} {seconds * 1e3:9.1f} {batch / seconds:10.1f} {memory_s * 1e3:17.1f} {memory_s / seconds:9.0%}"
            f" {arithmetic_s * 1e3:15.1f} {arithmetic_s / seconds:9.0%}",
            flush=True,
        )


def measure_engine(model: str, stages: int, threads: int, dtype: str, machine: Machine, folder: Path) -> None:
    spec = ModelSpec.from_folder(folder)
    print(f"\nengine, {stages} stage(s) of {threads} thread(s)\nrequests   tokens/s   of the memory limit")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS_OUT, ignore_eos=True)
    with LLM(model, pp_size=stages, threads_per_stage=threads, dtype=dtype, disable_radix_cache=True) as llm:
        weight_bytes = sum(stage.weight_bytes for stage in llm.info.stages)
        for requests in (1, 8, 32):
            prompts = [[(7 * k + 11 * i) % 40_000 + 100 for i in range(TOKENS_IN)] for k in range(requests)]
            seconds = least_s(lambda prompts=prompts: llm.generate(prompts, params), 3)
            kv_bytes = spec.num_layers * spec.kv_elements_per_token * 4 * CONTEXT * requests
            limit = requests * machine.bytes_per_s / (weight_bytes + kv_bytes)
            speed = requests * TOKENS_OUT / seconds
            print(f"{requests:8} {speed:10.1f} {speed / limit:14.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--engine", action="store_true", help="measure whole engines too")
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model).path
    cores = len(os.sched_getaffinity(0))
    machines = [measure_machine(threads) for threads in sorted({1, min(2, cores), cores})]
    for machine in machines:
        measure_steps(folder, machine, arguments.dtype)
    if arguments.engine:
        both = machines[min(1, len(machines) - 1)]
        for stages, threads in ((1, both.threads), (both.threads, 1)):
            measure_engine(arguments.model, stages, threads, arguments.dtype, both, folder)


if __name__ == "__main__":
    main()

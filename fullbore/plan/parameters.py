"""The cost model's free parameters: few, each with a physical meaning, a source, and how far it may be off.

Efficiencies belong to devices (hardware.py), since they were measured per device; what is here holds for all, or scales
what the devices say. `--calibrate` moves these, starting from here and no further than a measurement asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class CostParameters:
    """See SPREADS for the uncertainty of each."""

    memory_factor: float = 1.0  # on every device's memory efficiency
    compute_factor: float = 1.0  # on every device's compute efficiency
    kernel_factor: float = 1.0  # on every device's time per kernel
    link_factor: float = 1.0  # on link bandwidths; latencies are divided by it
    host_factor: float = 1.0  # on every host time of the engine

    # Host time to launch one kernel from Python without a graph, dispatch included. Fitted to Kimi K2.6 (22 kernels a
    # layer) on 8 RTX PRO 6000, SGLang without CUDA graphs, concurrency 1: 24.7 tokens/s.
    eager_kernel_s: float = 21.5e-6

    # How much longer reading takes on one core while all others of its processor read as well. Measured: SmolLM2 on two
    # cores of an AMD EPYC, a stage on each, one request: 6.9 ms alone, 8.7 ms while the other stage is busy.
    memory_sharing: float = 0.25

    # Reading and computing overlap, and so do launching and running, but not perfectly: the shorter one adds this share
    # of itself to the longer one. Measured: gate-up projection of Llama 3.1 8B on RTX PRO 6000 at 1-2,048 tokens.
    overlap_loss: float = 0.25

    # Of experts' matrix products against one large product, and of those whose weights are expanded in the kernel
    # (aiconfigurator 0.12: Qwen3 235B in bf16, Kimi K2.5 in int4, on three devices).
    grouped_efficiency: float = 0.7
    grouped_weight_only_efficiency: float = 0.42
    cache_efficiency: float = 0.92  # of reading the KV cache against reading weights (the same, 16-256 sequences)


DEFAULT_PARAMETERS = CostParameters()

# One standard deviation, relative. From the scatter of published measurements around the defaults.
SPREADS: dict[str, float] = {
    "memory_factor": 0.07,
    "compute_factor": 0.20,
    "kernel_factor": 0.30,
    "link_factor": 0.35,
    "host_factor": 0.40,
    "eager_kernel_s": 0.30,
    "memory_sharing": 0.50,
    "overlap_loss": 0.40,
}

# How well a matrix product uses the peak of its arithmetic, against bf16: with each halving of the width the peak
# doubles, but power, quantising the inputs and the epilogue do not.
ARITHMETIC_EFFICIENCY = {"fp32": 1.0, "bf16": 1.0, "fp8": 0.9, "fp4": 0.75}


def scaled(parameters: CostParameters, name: str, factor: float) -> CostParameters:
    """The same with one parameter multiplied."""
    return replace(parameters, **{name: getattr(parameters, name) * factor})

"""Settings of the engine under one name each, from /server_info, logs, command lines and notes, resolved ones first."""

from __future__ import annotations

import re
from typing import Any

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, Reading

# Our name -> names it goes by in the evidence.
NAMES: dict[str, tuple[str, ...]] = {
    "pp_size": ("pp_size", "pipeline_parallel_size", "pp", "pipeline_model_parallel_size"),
    "tp_size": ("tp_size", "tensor_parallel_size", "tp", "tensor_model_parallel_size"),
    "max_running": (
        "max_running_requests",
        "max_num_seqs",
        "OLLAMA_NUM_PARALLEL",
        "np",
        "parallel",
        "max_batch_size",
        "slots",
    ),
    "micro_batch_cap": ("pp_max_micro_batch_size",),
    "num_micro_batches": ("num_micro_batches",),
    "kv_tokens": ("kv_capacity_tokens",),
    "depth": ("pp_async_batch_depth",),
    "chunk": ("chunked_prefill_size", "max_num_batched_tokens", "ubatch_size", "ub"),
    "eager": ("disable_cuda_graph", "enforce_eager", "disable_decode_cuda_graph"),
    "partition": ("SGLANG_PP_LAYER_PARTITION", "VLLM_PP_LAYER_PARTITION", "pp_layer_partition"),
    "speculative": ("speculative_algorithm", "speculative_config"),
    "split_mode": ("split_mode", "sm"),
    "gpu_layers": ("ngl", "gpu_layers", "n_gpu_layers"),
    "cpu_offload_gb": ("cpu_offload_gb",),
    "max_model_len": ("max_model_len", "context_length", "max_seq_len"),
    "memory_share": ("gpu_memory_utilization", "mem_fraction_static"),
    "disaggregation": ("disaggregation_mode",),
    "async_scheduling": ("async_scheduling",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "hierarchical_cache": ("enable_hierarchical_cache",),
    "dynamic_chunking": ("enable_dynamic_chunking",),
    "device": ("device",),
    "dtype": ("dtype", "torch_dtype"),
    "quantization": ("quantization",),
    "rpc": ("rpc",),
    "device_map": ("device_map",),
    "tensor_parallel_mode": ("tensor_parallel",),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd"),
    "visible_gpus": ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "gpus", "gpu_ids"),
    "first_gpu": ("base_gpu_id",),
    "replicas": ("dp_size", "data_parallel_size", "dp"),
    "dp_attention": ("enable_dp_attention",),
    "model": ("model_path", "model", "served_model_name", "m", "hf_repo"),
}
_UNSET = {"", "none", "null", "default"}


class Settings:
    """Look-up by our names."""

    def __init__(self, evidence: Evidence) -> None:
        self._groups: list[dict[str, Reading]] = [info.settings for info in evidence.server_infos]
        self._groups += [evidence.logs.sglang.settings, evidence.logs.vllm.settings, evidence.logs.llama.settings]
        self._groups += [_agreed(evidence)]
        self._groups += [evidence.notes]
        self.given = [info.given for info in evidence.server_infos]

    def reading(self, name: str) -> Reading | None:
        """As it stands in the evidence; None where it is nowhere, or nowhere set."""
        for group in self._groups:
            for alias in NAMES[name]:
                found = group.get(alias)
                if found is not None and str(found.value).lower() not in _UNSET:
                    return found
        return None

    def fact(self, name: str) -> Fact | None:
        found = self.reading(name)
        return found.fact(f"{found.name} {found.value}") if found is not None else None

    def number(self, name: str) -> Fact | None:
        """The setting as a number; None also where it is none."""
        found = self.reading(name)
        if found is None or isinstance(found.value, bool):
            return None
        numbers = numbers_in(found.value)
        if len(numbers) != 1:
            return None
        return Fact(f"{found.name} {found.value}", numbers[0], found.source)

    def count(self, name: str) -> Fact | None:
        """The setting as a whole number from 1 to a million; None for anything else."""
        found = self.number(name)
        return found if found is not None and 1 <= found.number <= 1e6 and found.number.is_integer() else None

    @property
    def replicas(self) -> int:
        """Copies of the whole pipeline behind one address; ranks that only divide attention are none."""
        count = self.count("replicas")
        return int(count.number) if count is not None and self.is_on("dp_attention") is None else 1

    def is_on(self, name: str) -> Fact | None:
        """The setting if it is switched on."""
        for group in self._groups:
            for alias in NAMES[name]:
                found = group.get(alias)
                if found is not None and _is_true(found.value):
                    return found.fact(found.name if found.value is True else f"{found.name} {found.value}")
        return None

    def numbers(self, name: str) -> Fact | None:
        """A list such as layers per stage."""
        found = self.reading(name)
        if found is None:
            return None
        value = found.value
        if isinstance(value, str):  # 16,32 are two numbers here, not one with a separator
            numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", value)]
        else:
            numbers = numbers_in(list(value) if isinstance(value, tuple) else value)
        return Fact(f"{found.name}={found.value}", numbers, found.source) if len(numbers) > 1 else None


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes", "on")


def _agreed(evidence: Evidence) -> dict[str, Reading]:
    """Flags and environment of all launches, without those in which they differ."""
    merged: dict[str, Reading] = {}
    differing: set[str] = set()
    for launch in evidence.launches:
        for name, reading in (launch.flags | launch.env).items():
            if name in merged and str(merged[name].value) != str(reading.value):
                differing.add(name)
            merged.setdefault(name, reading)
    return {name: reading for name, reading in merged.items() if name not in differing}

"""From what the user wrote to what every stage needs to know: where the model is, and which part goes where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from fullbore.config import EngineConfig
from fullbore.engine import sleep_model
from fullbore.engine.measured_split import known_head_factor
from fullbore.engine.sizing import check_weights_fit
from fullbore.errors import ConfigError
from fullbore.model.partition import check_num_stages, check_partition, layer_ranges, partition_layers, partition_model
from fullbore.model.spec import ModelSpec

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


class Placement(Struct, frozen=True, kw_only=True):
    """All that is decided before the stages start."""

    path: str  # a Hugging Face folder on this machine
    name: str  # what the API calls the model
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    devices: tuple[str, ...]  # one per stage
    partition: tuple[int, ...]  # layers per stage

    @property
    def layer_ranges(self) -> list[tuple[int, int]]:
        """First layer and end (exclusive) of each stage."""
        return layer_ranges(self.partition)


def place_model(config: EngineConfig, on_progress: Progress | None = None) -> Placement:
    """Finds (downloads, converts) the model and settles device, dtype, context and partition.

    Raises:
        ConfigError: more stages than layers, a partition that does not add up, a context longer than the model's.
        ModelError: the model cannot be found or is not supported.
        OutOfMemoryError: the weights cannot fit.
    """
    if sleep_model.is_sleep_model(config.model):
        return _place_sleep_model(config)
    from fullbore.model.device import free_memory_bytes, resolve_devices, resolve_dtype
    from fullbore.model.native.backend import runs_on_own_kernels
    from fullbore.model.resolve import resolve_model

    model = resolve_model(config.model, on_progress)
    spec = ModelSpec.from_folder(model.path)
    check_num_stages(spec.num_layers, config.pp_size)
    devices = resolve_devices(config.device, config.pp_size, config.devices)
    dtype = resolve_dtype(config.dtype, devices[0], spec.dtype)
    param_bytes = _DTYPE_BYTES[dtype]
    if config.backend != "transformers" and devices[0] == "cpu" and runs_on_own_kernels(model.path, spec):
        # They compute in float32 whatever the weights are, and leave those of 16 bits as they are.
        dtype = "float32" if config.dtype == "auto" else dtype
        param_bytes = min(param_bytes, _DTYPE_BYTES[spec.dtype])
    partition = _partition(config, spec.num_layers)
    if partition is None:
        factor = known_head_factor(config, model.path, dtype, devices[0])
        partition = partition_model(spec, config.pp_size, factor)
    if devices[0] == "cpu":  # asking a GPU would take some of its memory here, for good; there the stages find out
        check_weights_fit(
            stage_weight_bytes(spec, partition, param_bytes),
            [free_memory_bytes(device) for device in devices],
            devices,
        )
    return Placement(
        path=str(model.path),
        name=model.name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        context_length=_context_length(config, spec.context_length),
        eos_token_ids=spec.eos_token_ids,
        dtype=dtype,
        devices=devices,
        partition=partition,
    )


def choose_transport(devices: Sequence[str]) -> Literal["gloo", "nccl"]:
    """How hidden states travel: NCCL needs a GPU for each stage alone; gloo goes through the host's memory."""
    return "nccl" if "cpu" not in devices and len(set(devices)) == len(devices) else "gloo"


def stage_weight_bytes(spec: ModelSpec, partition: Sequence[int], param_bytes: int) -> list[int]:
    """Bytes of weights on each stage; the first has the embedding, the last the head (shared with it if tied)."""
    params = [sum(layer.num_params for layer in spec.layers[start:end]) for start, end in layer_ranges(partition)]
    params[0] += spec.embedding_params
    if len(partition) > 1 or not spec.tied_embeddings:
        params[-1] += spec.embedding_params
    return [count * param_bytes for count in params]


def _place_sleep_model(config: EngineConfig) -> Placement:
    model = sleep_model.parse(config.model)
    check_num_stages(model.layers, config.pp_size)
    return Placement(
        path=config.model,
        name="sleep",
        architecture="sleep",
        vocab_size=model.vocab,
        context_length=_context_length(config, model.context),
        eos_token_ids=(model.eos,) if model.eos >= 0 else (),
        dtype="float32",
        devices=("cpu",) * config.pp_size,
        partition=_partition(config, model.layers) or partition_layers([1.0] * model.layers, config.pp_size),
    )


def _partition(config: EngineConfig, num_layers: int) -> tuple[int, ...] | None:
    if config.pp_layer_partition is not None:
        check_partition(config.pp_layer_partition, num_layers, config.pp_size)
    return config.pp_layer_partition


def _context_length(config: EngineConfig, longest: int) -> int:
    if config.context_length is None:
        return longest
    if config.context_length > longest:
        raise ConfigError(
            f"--context-length {config.context_length} is more than the {longest} tokens that the model is made for."
        )
    return config.context_length

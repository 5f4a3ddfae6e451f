"""A layout: which layers and which ranks on which devices, and how they are driven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from fullbore.errors import ConfigError
from fullbore.plan.device_table import Device
from fullbore.plan.hardware import Hardware
from fullbore.plan.links import Link
from fullbore.plan.models import ACTIVATION_BYTES, Attention, DecoderModel, Layer, Matrix


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a user can choose. `replicas` independent copies share the requests."""

    pp: int = 1
    tp: int = 1
    replicas: int = 1
    partition: tuple[int, ...] | None = None  # layers per stage; None: by cost
    micro_batches: int | Literal["auto"] = "auto"
    max_micro_batch: int | Literal["auto"] = "auto"
    depth: int | Literal["auto"] = "auto"
    chunk_tokens: int | None = None  # prompt tokens in a micro-batch; None: the engine's default
    graphs: bool = True
    dp_attention: bool = False  # ranks share experts only; each attends for its own requests

    @property
    def num_devices(self) -> int:
        return self.pp * self.tp * self.replicas

    @property
    def name(self) -> str:
        """For tables: `PP8`, `PP4 TP2`, `2x PP4`; `DEP8`: data-parallel attention, experts divided."""
        parts = [f"PP{self.pp}"] if self.pp > 1 or self.tp == 1 else []
        parts += [f"{'DEP' if self.dp_attention else 'TP'}{self.tp}"] if self.tp > 1 else []
        return (f"{self.replicas}x " if self.replicas > 1 else "") + " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's share of the model and the devices it is on."""

    index: int
    first_layer: int
    end_layer: int
    devices: tuple[Device, ...]  # one per tensor-parallel rank
    rank_link: Link | None = field(default=None)  # between the ranks; None with one
    next_link: Link | None = field(default=None)  # to the next stage; None on the last
    has_embedding: bool = False
    has_head: bool = False
    dp_attention: bool = False

    @property
    def tp(self) -> int:
        return len(self.devices)

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    def weight_ranks(self, matrix: Matrix) -> int:
        """Among how many ranks the matrix is divided."""
        is_divided = bool(matrix.num_experts) if self.dp_attention else matrix.is_sharded
        return self.tp if is_divided else 1

    def token_ranks(self, matrix: Matrix) -> int:
        """Among how many ranks the work on a micro-batch's tokens is divided."""
        return self.tp if self.dp_attention or matrix.is_sharded else 1

    def weight_bytes(self, layer: Layer) -> float:
        """Of one layer, on each rank."""
        other_bytes = layer.other_params * ACTIVATION_BYTES
        return other_bytes + sum(each.total_bytes / self.weight_ranks(each) for each in layer.matrices)

    def cache_elements_per_token(self, attention: Attention) -> float:
        """Elements that one token of a request adds to a rank's cache, on average over the ranks."""
        if self.dp_attention:
            return attention.cache_elements_per_token() / self.tp
        return attention.cache_elements_per_token(self.tp)


def check_layout(model: DecoderModel, hardware: Hardware, layout: Layout) -> None:
    """Raises ConfigError, naming the flag, for a layout that cannot exist."""
    for flag, value in (("--pp", layout.pp), ("--tp", layout.tp), ("--replicas", layout.replicas)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    if layout.pp > model.num_layers:
        raise ConfigError(
            f"--pp {layout.pp} is more than the model's {model.num_layers} layers; every stage needs one."
        )
    if layout.num_devices > len(hardware):
        replicas = f" × {layout.replicas} replicas" if layout.replicas > 1 else ""
        raise ConfigError(
            f"--pp {layout.pp} × --tp {layout.tp}{replicas} needs {layout.num_devices} devices, "
            f"but --hardware has {len(hardware)}."
        )
    if not replicas_are_equal(hardware, layout):
        raise ConfigError(
            f"--replicas {layout.replicas}: the copies would be on different cards; plan them one by one."
        )
    if layout.dp_attention and not model.has_experts:
        raise ConfigError(f"--dp-attention divides experts among ranks, and {model.name} has none; use --replicas.")
    problem = None if layout.dp_attention else tp_problem(model, layout.tp)
    if problem:
        raise ConfigError(f"--tp {layout.tp}: {problem}")
    if layout.partition is not None:
        _check_partition(layout.partition, layout.pp, model.num_layers)


def replicas_are_equal(hardware: Hardware, layout: Layout) -> bool:
    """Whether every copy gets the same devices in the same order, so that one stands for all."""
    size = layout.pp * layout.tp
    first = hardware.devices[:size]
    return all(hardware.devices[copy * size : (copy + 1) * size] == first for copy in range(layout.replicas))


def tp_problem(model: DecoderModel, tp: int) -> str | None:
    """Why the model cannot be split over so many ranks; None if it can."""
    heads = {layer.attention.num_heads for layer in model.layers}
    uneven = next((number for number in heads if number % tp), None)
    if uneven is not None:
        return f"{uneven} attention heads cannot be divided by {tp}; choose a divisor."
    return None


def _check_partition(partition: Sequence[int], pp: int, num_layers: int) -> None:
    text = ",".join(map(str, partition))
    if len(partition) != pp:
        raise ConfigError(f"--partition {text} names {len(partition)} stages, but --pp is {pp}.")
    if min(partition) < 1:
        raise ConfigError(f"--partition {text}: every stage needs at least one layer.")
    if sum(partition) != num_layers:
        raise ConfigError(f"--partition {text} adds up to {sum(partition)} layers, but the model has {num_layers}.")


def stages_of(hardware: Hardware, layout: Layout, partition: Sequence[int]) -> list[Stage]:
    """The stages of one replica on the first devices of the list."""
    cuts = [0, *accumulate(partition)]
    groups = [range(stage * layout.tp, (stage + 1) * layout.tp) for stage in range(layout.pp)]
    stages = []
    for index, ((first, end), group) in enumerate(zip(pairwise(cuts), groups, strict=True)):
        is_last = index == layout.pp - 1
        stages.append(
            Stage(
                index=index,
                first_layer=first,
                end_layer=end,
                devices=tuple(hardware.devices[i] for i in group),
                rank_link=_slowest(hardware, [(group[0], i) for i in group[1:]]),
                next_link=None if is_last else _slowest(hardware, list(zip(group, groups[index + 1], strict=True))),
                has_embedding=index == 0,
                has_head=is_last,
                dp_attention=layout.dp_attention,
            )
        )
    return stages


def _slowest(hardware: Hardware, pairs: Sequence[tuple[int, int]]) -> Link | None:
    links = [hardware.link_between(one, other) for one, other in pairs]
    return min(links, key=lambda link: link.bandwidth_bytes_s) if links else None


def even_partition(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers, the remainder on the last stages, as SGLang 0.5.23 divides them."""
    base, more = divmod(num_layers, num_stages)
    return tuple(base + (stage >= num_stages - more) for stage in range(num_stages))

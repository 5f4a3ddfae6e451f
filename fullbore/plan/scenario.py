"""A scenario (model, hardware, engine, demand) and a layout in it: layers divided, memory planned, costs known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from fullbore.errors import ConfigError
from fullbore.plan.cost_model import ModelCosts, StageCost
from fullbore.plan.engines import Engine
from fullbore.plan.hardware import Hardware
from fullbore.plan.layout import Layout, Stage, check_layout, even_partition, stages_of
from fullbore.plan.loads import Load
from fullbore.plan.memory import MemoryPlan, plan_memory
from fullbore.plan.models import DecoderModel
from fullbore.plan.parameters import DEFAULT_PARAMETERS, CostParameters
from fullbore.plan.splitting import additive_cost, best_partition

MAX_TOKENS = 1 << 24
MAX_CONCURRENCY = 65536
LARGE_CARD_BYTES, SMALL_CARD_CHUNK_TOKENS = 60e9, 2048  # as SGLang and vLLM choose their defaults


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Who asks for what: `concurrency` clients that each wait for an answer, or `rate_per_s` at random times."""

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    rate_per_s: float | None = None
    prefix_hit_rate: float = 0.0  # share of each prompt that all have in common

    def validate(self) -> None:
        """Raises ConfigError, naming the flag, for what cannot be asked."""
        for flag, value, most in (
            ("--input-tokens", self.input_tokens, MAX_TOKENS),
            ("--output-tokens", self.output_tokens, MAX_TOKENS),
            *(("--concurrency", each, MAX_CONCURRENCY) for each in self.concurrency),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} must be between 1 and {most}, got {value}.")
        if not self.concurrency and self.rate_per_s is None:
            raise ConfigError("--concurrency is empty; give for example --concurrency 1,8,32.")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < 1e6:
            raise ConfigError(f"--rate must be a positive number of requests per second, got {self.rate_per_s}.")
        if not 0 <= self.prefix_hit_rate < 1:
            raise ConfigError(f"--prefix-hit-rate must be at least 0 and less than 1, got {self.prefix_hit_rate}.")

    @property
    def length_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def computed_input_tokens(self) -> int:
        """Prompt tokens that the prefix cache does not have."""
        return max(round(self.input_tokens * (1 - self.prefix_hit_rate)), 1)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is given; a layout is what is chosen."""

    model: DecoderModel
    hardware: Hardware
    engine: Engine
    demand: Demand
    parameters: CostParameters = DEFAULT_PARAMETERS
    cache_bytes_per_element: float = 2.0
    max_running: int | None = None  # requests at once in all replicas; None: whatever the demand asks for


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A layout in a scenario, resolved."""

    scenario: Scenario
    layout: Layout
    partition: tuple[int, ...]
    stages: tuple[Stage, ...]
    memory: MemoryPlan
    costs: ModelCosts
    problem: str | None  # why it cannot serve; None if it can

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens(self.scenario, self.layout)

    @property
    def depth(self) -> int:
        return 0 if self.layout.depth == "auto" else self.layout.depth

    @property
    def driver_s(self) -> float:
        """From a token's end on the last stage until the next micro-batch can start on the first."""
        return self.scenario.engine.driver_s * self.scenario.parameters.host_factor

    def with_parameters(self, parameters: CostParameters) -> Deployment:
        """The same deployment if devices, links and hosts were like this."""
        scenario = replace(self.scenario, parameters=parameters)
        return replace(self, scenario=scenario, costs=_costs(scenario, self.layout, self.stages))


def chunk_tokens(scenario: Scenario, layout: Layout) -> int:
    """Most prompt tokens in a micro-batch: the layout's, or the engine's default, which is smaller on small cards."""
    if layout.chunk_tokens is not None:
        return layout.chunk_tokens
    smallest = min(device.memory_bytes for device in scenario.hardware.devices)
    default = scenario.engine.chunk_tokens
    return default if smallest >= LARGE_CARD_BYTES else min(default, SMALL_CARD_CHUNK_TOKENS)


def deploy(scenario: Scenario, layout: Layout, concurrency: int) -> Deployment:
    """Divides the layers for micro-batches as `concurrency` requests make them, unless the layout says how.

    Raises:
        ConfigError: the layout cannot exist on this hardware; one that merely does not fit has a `problem`.
    """
    check_layout(scenario.model, scenario.hardware, layout)
    partition = layout.partition
    if partition is None:
        partition = _by_cost(scenario, layout, concurrency)
    stages = tuple(stages_of(scenario.hardware, layout, partition))
    memory = _memory(scenario, layout, stages, concurrency)
    return Deployment(
        scenario=scenario,
        layout=layout,
        partition=partition,
        stages=stages,
        memory=memory,
        costs=_costs(scenario, layout, stages),
        problem=memory.problem(scenario.demand.length_tokens),
    )


def typical_load(demand: Demand, concurrency: int, layout: Layout) -> Load:
    """A decode micro-batch of the steady state with its share of prompt tokens, for comparing layers and stages."""
    number = layout.pp if layout.micro_batches == "auto" else layout.micro_batches
    size = max(ceil(concurrency / layout.replicas / max(number, 1)), 1)
    prefill = round(size * demand.computed_input_tokens / demand.output_tokens)
    context = size * (demand.input_tokens + demand.output_tokens // 2)
    pairs = prefill * (prefill + 2 * (demand.input_tokens // 2))
    return Load(size, prefill if prefill > 1 else 0, pairs if prefill > 1 else 0, size, context)


def _by_cost(scenario: Scenario, layout: Layout, concurrency: int) -> tuple[int, ...]:
    """The fastest division that fits; the even one if none fits, so that its problem can be told."""
    model = scenario.model
    even = even_partition(model.num_layers, layout.pp)
    if layout.pp == 1 or scenario.engine.policy != "fullbore":
        return even  # other engines divide evenly unless told otherwise
    load = typical_load(scenario.demand, concurrency, layout)
    stages = stages_of(scenario.hardware, layout, even)
    memory = _memory(scenario, layout, stages, concurrency)
    seconds: list[list[float]] = []
    sizes: list[list[float]] = []
    extra_s, extra_bytes, usable_bytes = [], [], []
    for stage, planned in zip(stages, memory.stages, strict=True):
        seconds.append([])
        sizes.append([])
        known: dict[int, tuple[float, float]] = {}
        bare = replace(stage, first_layer=0, end_layer=0, has_embedding=False, has_head=False)
        for index, layer in enumerate(model.layers):
            if id(layer) not in known:
                one = replace(bare, first_layer=index, end_layer=index + 1)
                cache_bytes = stage.cache_elements_per_token(layer.attention) * scenario.cache_bytes_per_element
                known[id(layer)] = (
                    _stage_cost(scenario, layout, one).seconds(load)
                    - _stage_cost(scenario, layout, bare).seconds(load),
                    stage.weight_bytes(layer) + cache_bytes * scenario.demand.length_tokens,
                )
            layer_s, layer_bytes = known[id(layer)]
            seconds[-1].append(layer_s)
            sizes[-1].append(layer_bytes)
        ends = replace(bare, has_embedding=stage.has_embedding, has_head=stage.has_head)
        extra_s.append(_stage_cost(scenario, layout, ends).seconds(load))
        in_layers = sum(stage.weight_bytes(layer) for layer in model.layers[stage.first_layer : stage.end_layer])
        extra_bytes.append(planned.weight_bytes - in_layers + planned.buffer_bytes)
        usable_bytes.append(planned.usable_bytes)
    cost = additive_cost(seconds, sizes, extra_s, extra_bytes, usable_bytes)
    return best_partition(model.num_layers, layout.pp, cost) or even


def _memory(
    scenario: Scenario, layout: Layout, stages: list[Stage] | tuple[Stage, ...], concurrency: int
) -> MemoryPlan:
    depth = layout.pp if layout.depth == "auto" else layout.depth
    per_replica = ceil(concurrency / layout.replicas)
    number = layout.pp if layout.micro_batches == "auto" else layout.micro_batches
    return plan_memory(
        scenario.model,
        stages,
        scenario.engine,
        chunk_tokens=chunk_tokens(scenario, layout),
        micro_batches_in_flight=layout.pp + depth,
        max_sampled=max(ceil(per_replica / max(number, 1)), 1),
        typical_tokens=scenario.demand.length_tokens,
        cache_bytes_per_element=scenario.cache_bytes_per_element,
    )


def _costs(scenario: Scenario, layout: Layout, stages: tuple[Stage, ...]) -> ModelCosts:
    alone = ModelCosts([_stage_cost(scenario, layout, stage) for stage in stages])
    if len(stages) == 1 or not all(device.shares_memory for stage in stages for device in stage.devices):
        return alone
    parameters = scenario.parameters
    slower = replace(parameters, memory_factor=parameters.memory_factor / (1 + parameters.memory_sharing))
    crowded = replace(scenario, parameters=slower)
    return replace(alone, crowded=ModelCosts([_stage_cost(crowded, layout, stage) for stage in stages]))


def _stage_cost(scenario: Scenario, layout: Layout, stage: Stage) -> StageCost:
    return StageCost(
        scenario.model,
        stage,
        scenario.engine,
        scenario.parameters,
        layout.graphs,
        scenario.cache_bytes_per_element,
        layout.pp == 1,
    )

"""Seconds that a stage takes for a micro-batch: a roofline per operator group, plus what launching and talking cost.

    group      = longer(bytes / bandwidth, operations / peak)         both at measured efficiencies
    device     = Σ groups + kernels · time per kernel + all-reduces
    stage      = longer(device, host launching without graphs) + scheduling on the stage's host, if it waits for that

where longer(a, b) = max(a, b) + loss · min(a, b): the two overlap, but not perfectly. Mixture-of-experts layers read
the U(b) = E·(1-(1-k/E)^b) distinct experts that b tokens touch. Head and sampling are on the last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from fullbore.plan.device_table import Device
from fullbore.plan.engines import Engine
from fullbore.plan.layout import Stage
from fullbore.plan.loads import Load
from fullbore.plan.models import ACTIVATION_BYTES, Attention, DecoderModel, Layer, Matrix, distinct_experts
from fullbore.plan.parameters import ARITHMETIC_EFFICIENCY, CostParameters
from fullbore.plan.pipeline import Hop
from fullbore.plan.transfers import all_gather_s, all_reduce_s, scaled_link

SAMPLER_KERNELS = 6  # norm, head, softmax, cumulated sums, draw, copy to the host
LOGIT_BYTES = 4  # logits are sampled in fp32
WEIGHTS, EXPERTS, CACHE, COMPUTE = "weights", "experts", "cache", "compute"
KERNELS, ALL_REDUCE, LAUNCHES, HOST, HEAD = "kernels", "all-reduce", "launches", "host", "head"


@dataclass(frozen=True)
class Rates:
    """What one rank of a stage can do per second, efficiencies included."""

    weight_bytes_s: float
    cache_bytes_s: float
    device: Device
    parameters: CostParameters

    def flops(self, matrix: Matrix) -> float:
        """Operations per second of a matrix's products."""
        fmt = matrix.format
        efficiency = self.device.compute_efficiency * self.parameters.compute_factor * fmt.compute_efficiency
        arithmetic = fmt.arithmetic
        if not self.device.runs_natively(arithmetic) and arithmetic in ("fp8", "fp4"):
            arithmetic = "bf16"  # the weights are expanded inside the kernel
        efficiency *= ARITHMETIC_EFFICIENCY[arithmetic]
        if matrix.num_experts and fmt.is_weight_only:
            efficiency *= self.parameters.grouped_weight_only_efficiency
        elif matrix.num_experts:
            efficiency *= self.parameters.grouped_efficiency
        return self.device.flops(arithmetic) * efficiency

    def attention_flops(self) -> float:
        efficiency = self.device.compute_efficiency * self.parameters.compute_factor
        return self.device.flops("bf16") * efficiency * self.device.attention_efficiency


def rates_of(device: Device, parameters: CostParameters) -> Rates:
    weight_bytes_s = device.bandwidth_bytes_s * min(device.memory_efficiency * parameters.memory_factor, 1.0)
    return Rates(weight_bytes_s, weight_bytes_s * parameters.cache_efficiency, device, parameters)


@dataclass
class _Product:
    """One matrix (or group of experts) of the stage, as often as it occurs."""

    count: int
    read_s: float  # it, or one of its experts
    token_s: float  # to compute one token
    num_experts: int
    num_active: int

    def memory_s(self, tokens: int) -> float:
        if self.num_experts:
            return self.read_s * distinct_experts(tokens, self.num_experts, self.num_active)
        return self.read_s


@dataclass
class _AttentionGroup:
    """The layers of a stage that have the same attention."""

    count: int
    window_tokens: int | None
    cache_token_s: float  # to read one cached token
    decode_pair_s: float  # to compute one query against one cached token
    prefill_pair_s: float
    expand_token_s: float


@dataclass
class StageCost:
    """Seconds of one stage, for any load; see the module's docstring."""

    model: DecoderModel
    stage: Stage
    engine: Engine
    parameters: CostParameters
    graphs: bool
    cache_bytes_per_element: float = 2.0
    is_alone: bool = False  # the only stage
    _memo: dict[int, float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        layers = Counter(self.model.layers[self.stage.first_layer : self.stage.end_layer])
        device = _slowest_rank(self.stage.devices)
        self._rates = rates_of(device, self.parameters)
        self._products = [self._product(matrix, count) for layer, count in layers.items() for matrix in layer.matrices]
        self._attention = [self._attention_group(layer.attention, count) for layer, count in layers.items()]
        self._elementwise_token_s = sum(
            count * self._elementwise_bytes(layer) / self._rates.weight_bytes_s for layer, count in layers.items()
        )
        self._head = self._product(self.model.head, 1)
        self._num_kernels = sum(count * layer.num_kernels for layer, count in layers.items())
        self._kernel_s = device.kernel_s * self.parameters.kernel_factor
        # A device without a host of its own launches as fast as it runs.
        self._eager_kernel_s = self.parameters.eager_kernel_s if device.has_graphs else 0.0
        # After attention and after the MLP; or gathering the tokens for the experts and scattering their results, which
        # move as many bytes as one all-reduce.
        self._num_all_reduces = 2 * self.stage.num_layers + self.stage.has_embedding
        if self.stage.dp_attention:
            self._num_all_reduces = sum(
                count for layer, count in layers.items() if any(matrix.num_experts for matrix in layer.matrices)
            )
        link = self.stage.rank_link
        self._link = None if link is None else scaled_link(link, self.parameters.link_factor)

    def seconds(self, load: Load) -> float:
        """Seconds for one micro-batch."""
        loss = self.parameters.overlap_loss
        device_s = self._layers_s(load.tokens) + self._cache_s(load)
        if self.stage.has_head and load.sampled:
            device_s += self._head_s(load.sampled)
        host_s = self._launch_s(load)
        total_s = max(device_s, host_s) + loss * min(device_s, host_s) if host_s else device_s
        scheduling_s = self._scheduling_s(load)
        if self.is_alone and self.engine.hides_host_alone:
            return max(total_s, scheduling_s)
        if self.engine.overlaps_host:
            return _longer(total_s, scheduling_s, loss)
        return total_s + scheduling_s

    def breakdown(self, load: Load) -> dict[str, float]:
        """The same, by what takes the time; adds up to `seconds` unless scheduling is hidden or overlaps."""
        loss, tokens = self.parameters.overlap_loss, load.tokens
        parts: dict[str, float] = dict.fromkeys((WEIGHTS, EXPERTS, CACHE, COMPUTE), 0.0)
        for product in self._products:
            memory_s, compute_s = product.memory_s(tokens), product.token_s * tokens
            kind = COMPUTE if compute_s > memory_s else EXPERTS if product.num_experts else WEIGHTS
            parts[kind] += product.count * _longer(memory_s, compute_s, loss)
        parts[COMPUTE] += self._elementwise_token_s * tokens
        parts[CACHE] = self._cache_s(load)
        parts[KERNELS] = self._num_kernels * self._kernel_s
        parts[ALL_REDUCE] = self._all_reduces_s(tokens)
        parts[HEAD] = self._head_s(load.sampled) if self.stage.has_head and load.sampled else 0.0
        device_s, host_s = sum(parts.values()), self._launch_s(load)
        if host_s > device_s:
            parts = {name: loss * part_s for name, part_s in parts.items()}
        parts[LAUNCHES] = host_s if host_s > device_s else loss * host_s
        parts[HOST] = self._scheduling_s(load)
        return parts

    # ---------------------------------------------------------------------------------------------- what takes time

    def _layers_s(self, tokens: int) -> float:
        """Everything in the layers that depends on nothing but the number of tokens."""
        found = self._memo.get(tokens)
        if found is None:
            loss = self.parameters.overlap_loss
            found = self._num_kernels * self._kernel_s + self._elementwise_token_s * tokens
            for product in self._products:
                found += product.count * _longer(product.memory_s(tokens), product.token_s * tokens, loss)
            found += self._all_reduces_s(tokens)
            self._memo[tokens] = found
        return found

    def _all_reduces_s(self, tokens: int) -> float:
        if self._link is None:
            return 0.0
        message_bytes = tokens * self.model.hidden_size * ACTIVATION_BYTES
        return self._num_all_reduces * all_reduce_s(self._link, self.stage.tp, message_bytes)

    def _cache_s(self, load: Load) -> float:
        """Attention. A chunk of x tokens after L earlier ones: q = (L+x)² - L² gives x·L + x²/2 pairs."""
        if not load.tokens:
            return 0.0
        chunk, pairs = load.prefill_tokens, load.prefill_token_pairs
        earlier = min((pairs - chunk * chunk) / (2 * chunk), load.context_tokens) if chunk else 0.0
        earlier = max(earlier, 0.0)  # several chunks in one micro-batch count as one long one: a little too many
        decode_context = max(load.context_tokens - earlier, 0.0)
        total_s = 0.0
        for group in self._attention:
            window = group.window_tokens
            cached, chunk_pairs = decode_context, pairs / 2
            if window is not None:
                cached = min(cached, load.decodes * window)
                chunk_pairs = min(chunk_pairs, chunk * window)
                earlier = min(earlier, window)
            read_s = (cached + earlier) * group.cache_token_s
            compute_s = cached * group.decode_pair_s + chunk_pairs * group.prefill_pair_s
            compute_s += earlier * group.expand_token_s
            total_s += group.count * _longer(read_s, compute_s, self.parameters.overlap_loss)
        return total_s

    def _head_s(self, sampled: int) -> float:
        memory_s, compute_s = self._head.memory_s(sampled), self._head.token_s * sampled
        logits_bytes = sampled * self.model.vocab_size * LOGIT_BYTES / (self.stage.tp if self.stage.dp_attention else 1)
        total_s = _longer(memory_s, compute_s, self.parameters.overlap_loss)
        total_s += SAMPLER_KERNELS * self._kernel_s + logits_bytes / self._rates.weight_bytes_s
        if self._link is not None and not self.stage.dp_attention:
            part_bytes = sampled * self.model.vocab_size * ACTIVATION_BYTES / self.stage.tp
            total_s += all_gather_s(self._link, self.stage.tp, part_bytes)
        return total_s

    def _launch_s(self, load: Load) -> float:
        """Host time to launch every kernel; decoding with graphs launches one graph. Prompts run without graphs."""
        if self.graphs and not load.prefill_tokens:
            return 0.0
        has_head = self.stage.has_head and load.sampled > 0
        return (self._num_kernels + SAMPLER_KERNELS * has_head) * self._eager_kernel_s

    def _scheduling_s(self, load: Load) -> float:
        requests = load.decodes + (load.prefill_tokens > 0)
        if self.stage.dp_attention:
            requests = ceil(requests / self.stage.tp)  # each rank has its own requests
        return self.parameters.host_factor * (self.engine.step_s + requests * self.engine.request_s)

    # --------------------------------------------------------------------------------------------- what is measured

    def _product(self, matrix: Matrix, count: int) -> _Product:
        active = matrix.num_active if matrix.num_experts else 1
        param_bytes = matrix.params * matrix.format.bytes_per_param
        return _Product(
            count=count,
            read_s=param_bytes / self.stage.weight_ranks(matrix) / self._rates.weight_bytes_s,
            token_s=2 * matrix.params * active / self.stage.token_ranks(matrix) / self._rates.flops(matrix),
            num_experts=matrix.num_experts,
            num_active=matrix.num_active,
        )

    def _attention_group(self, attention: Attention, count: int) -> _AttentionGroup:
        ranks, flops = self.stage.tp, self._rates.attention_flops()
        cache_bytes = self.stage.cache_elements_per_token(attention) * self.cache_bytes_per_element
        return _AttentionGroup(
            count=count,
            window_tokens=attention.window_tokens,
            cache_token_s=cache_bytes / self._rates.cache_bytes_s,
            decode_pair_s=attention.decode_flops_per_pair / ranks / flops,
            prefill_pair_s=attention.prefill_flops_per_pair / ranks / flops,
            expand_token_s=attention.expand_flops_per_token / ranks / flops,
        )

    def _elementwise_bytes(self, layer: Layer) -> float:
        norm_ranks = self.stage.tp if self.stage.dp_attention else 1
        return layer.norm_bytes_per_token / norm_ranks + layer.inner_bytes_per_token / self.stage.tp


def _longer(one_s: float, other_s: float, loss: float) -> float:
    return one_s + loss * other_s if one_s > other_s else other_s + loss * one_s


def _slowest_rank(devices: Sequence[Device]) -> Device:
    """Ranks wait for each other at every all-reduce, so the slowest one's figures hold for all."""
    return min(devices, key=lambda device: device.bandwidth_bytes_s * device.memory_efficiency)


@dataclass
class ModelCosts:
    """All stages of a pipeline: what the simulator asks (`StageCosts`)."""

    stages: Sequence[StageCost]
    crowded: ModelCosts | None = None  # while all stages are busy; None: the same

    def seconds(self, load: Load) -> Sequence[float]:
        return [stage.seconds(load) for stage in self.stages]

    def hops(self) -> list[Hop]:
        """The links from each stage to the next."""
        hops = []
        for cost in self.stages:
            link = cost.stage.next_link
            if link is not None:
                tensors = 2 if cost.engine.residual_travels_apart else 1
                token_bytes = tensors * cost.model.hidden_size * ACTIVATION_BYTES
                factor = cost.parameters.link_factor
                hops.append(Hop(link.latency_s / factor, token_bytes / (link.bandwidth_bytes_s * factor)))
        return hops

    def traverse_s(self, load: Load) -> float:
        """Seconds of one micro-batch alone through all stages and links."""
        hops_s = sum(hop.latency_s + load.tokens * hop.token_s for hop in self.hops())
        return sum(self.seconds(load)) + hops_s

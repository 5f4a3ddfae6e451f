"""What a decoder model asks of a device: its matrices, its attention and its small operations, layer by layer.

Read from any Hugging Face config: dense or mixture of experts (shared experts, first dense layers), grouped-query or
multi-head latent attention (MLA), sliding windows, tied heads, quantised weights. Sizes are counted, not looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fullbore.errors import ModelError
from fullbore.plan.formats import WeightFormat, role_formats

ACTIVATION_BYTES = 2  # hidden states travel and are computed in 16 bits


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Weights that are multiplied together: one matrix, or one expert's of a group of experts."""

    role: str
    params: int
    format: WeightFormat
    is_sharded: bool = True  # tensor parallelism splits it; otherwise every rank has all of it
    num_experts: int = 0  # 0: dense
    num_active: int = 0  # experts per token

    @property
    def total_params(self) -> int:
        return self.params * (self.num_experts or 1)

    @property
    def total_bytes(self) -> float:
        return self.total_params * self.format.bytes_per_param

    def bytes_read(self, tokens: int) -> float:
        """By one step over `tokens` tokens, with uniform routing."""
        number = distinct_experts(tokens, self.num_experts, self.num_active) if self.num_experts else 1
        return self.params * self.format.bytes_per_param * number


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer's attention over the cache, without its projections. Elements, not bytes."""

    num_heads: int
    num_kv_heads: int  # 1 for a latent cache
    cache_elements: int  # per token and KV head
    decode_flops_per_pair: int  # for one query token and one cached token, all heads
    prefill_flops_per_pair: int
    expand_flops_per_token: int = 0  # prefill turns each earlier token's latent into keys and values again
    window_tokens: int | None = None  # sliding window: older tokens are neither read nor kept
    is_latent: bool = False  # MLA: one cache for all heads, which every tensor-parallel rank holds in full

    def cache_elements_per_token(self, tp: int = 1) -> int:
        """Elements that one token adds to one rank's cache."""
        heads = self.num_kv_heads if self.is_latent else -(-self.num_kv_heads // tp)
        return heads * self.cache_elements


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer."""

    matrices: tuple[Matrix, ...]
    attention: Attention
    norm_bytes_per_token: int  # read and written by the norms, on every rank
    inner_bytes_per_token: int  # … by rotary embedding, activation, dispatch to experts; divided among ranks
    num_kernels: int  # launches of a fused GPU implementation
    other_params: int  # norms and biases

    @cached_property
    def weight_bytes(self) -> float:
        return sum(each.total_bytes for each in self.matrices) + self.other_params * ACTIVATION_BYTES


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A model, as far as memory and time go. `layers` repeats the same object for equal layers."""

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    head: Matrix
    embedding: Matrix
    is_tied: bool
    context_length: int
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        return any(matrix.num_experts for layer in self.layers for matrix in layer.matrices)

    @property
    def is_quantised(self) -> bool:
        return any(m.total_bytes < 1.9 * m.total_params for layer in self.layers for m in layer.matrices)

    @cached_property
    def num_params(self) -> int:
        layers = sum(sum(m.total_params for m in layer.matrices) + layer.other_params for layer in self.layers)
        return layers + self.embedding.params + (0 if self.is_tied else self.head.params)

    @property
    def num_active_params(self) -> int:
        """Those that one token is multiplied with."""
        matrices = (m for layer in self.layers for m in layer.matrices)
        others = sum(layer.other_params for layer in self.layers) + self.head.params
        return sum(m.params * (m.num_active or 1) for m in matrices) + others

    @cached_property
    def weight_bytes(self) -> float:
        """Of the whole model on one device."""
        ends = self.embedding.total_bytes + (0 if self.is_tied else self.head.total_bytes)
        return sum(layer.weight_bytes for layer in self.layers) + ends

    def bytes_read(self, tokens: int) -> float:
        """Bytes of weights that one step over `tokens` tokens reads, whole model, uniform routing."""
        total = float(self.head.total_bytes)
        for layer in self.layers:
            total += layer.other_params * ACTIVATION_BYTES
            for matrix in layer.matrices:
                total += matrix.bytes_read(tokens)
        return total

    def cache_elements_per_token(self) -> int:
        """Elements of KV cache that one token adds, whole model, nothing forgotten."""
        return sum(layer.attention.cache_elements_per_token() for layer in self.layers)


def distinct_experts(tokens: float, num_experts: int, num_active: int) -> float:
    """U(b) = E·(1 - (1 - k/E)^b): how many experts `tokens` tokens touch when each picks k of E at random."""
    return float(num_experts * (1 - (1 - num_active / num_experts) ** tokens))


# ------------------------------------------------------------------------------------------------ reading a config

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads")
_MLP = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_CONTEXT = ("max_position_embeddings", "seq_length", "n_positions", "max_sequence_length")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "experts_per_token", "top_k_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size")
_MAX_SIZE = 10**9  # no size in any real config comes near it


def from_config(config: dict[str, Any], name: str = "", weights: str | None = None, source: str = "") -> DecoderModel:
    """Reads a parsed config.json.

    Args:
        weights: a format for the decoder's matrices in place of the checkpoint's own, e.g. "nvfp4".

    Raises:
        ModelError: a size is missing or senseless.
        ConfigError: `weights` is unknown.
    """
    outer = config
    for key in _NESTED:
        if isinstance(config.get(key), dict) and _first(config, _LAYERS) is None:
            config = {**{k: v for k, v in outer.items() if k != key}, **config[key]}
    sizes = _Sizes(config)
    formats = role_formats(config, weights)
    hidden, vocab = sizes.need(_HIDDEN, "hidden_size"), sizes.need(("vocab_size",), "vocab_size")
    num_layers = sizes.need(_LAYERS, "num_hidden_layers")
    layers: dict[tuple[bool, int | None], Layer] = {}
    order = []
    for index in range(num_layers):
        kind = (_is_moe_layer(config, sizes, index), _window(config, index, num_layers))
        if kind not in layers:
            layers[kind] = _layer(sizes, formats, *kind)
        order.append(layers[kind])
    embedding = Matrix(role="embedding", params=hidden * vocab, format=formats["embedding"])
    return DecoderModel(
        name=name or str(config.get("model_type") or "model"),
        hidden_size=hidden,
        vocab_size=vocab,
        layers=tuple(order),
        head=Matrix(role="head", params=hidden * vocab, format=formats["head"]),
        embedding=embedding,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        context_length=sizes.get(_CONTEXT) or 1 << 20,
        source=source,
    )


def _first(config: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


class _Sizes:
    """Positive integers of a config, under any of their names."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def get(self, keys: Sequence[str]) -> int | None:
        value = _first(self.config, keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            key = next(key for key in keys if self.config.get(key) is not None)
            raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}.")
        return value

    def need(self, keys: Sequence[str], what: str) -> int:
        value = self.get(keys)
        if value is None:
            raise ModelError(f"config.json has no {what}; give the config of a decoder-only language model.")
        return value


def _is_moe_layer(config: dict[str, Any], sizes: _Sizes, index: int) -> bool:
    if (sizes.get(_EXPERTS) or 0) < 2 or sizes.get(_ACTIVE) is None:
        return False
    first_dense = config.get("first_k_dense_replace")
    if isinstance(first_dense, int) and index < first_dense:
        return False
    if index in (config.get("mlp_only_layers") or []):
        return False
    listed = config.get("moe_layers")
    if isinstance(listed, list) and listed:
        return index in listed
    step = _first(config, ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"))
    if isinstance(step, list):
        return index < len(step) and bool(step[index])
    if isinstance(step, int) and not isinstance(step, bool) and step > 1:
        return (index + 1) % step == 0
    return True


def _window(config: dict[str, Any], index: int, num_layers: int) -> int | None:
    """The sliding (or chunked) attention window of one layer."""
    window = _first(config, ("sliding_window", "attention_chunk_size"))
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        return None
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return window if types[index] in ("sliding_attention", "chunked_attention", "local") else None
    if config.get("use_sliding_window") is False:
        return None
    if "use_sliding_window" in config:
        return window if index >= (config.get("max_window_layers") or 0) else None
    pattern = _first(config, ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"))
    if isinstance(pattern, int) and pattern > 1:
        return None if (index + 1) % pattern == 0 else window
    return window


def _layer(sizes: _Sizes, formats: dict[str, WeightFormat], is_moe: bool, window: int | None) -> Layer:
    hidden = sizes.need(_HIDDEN, "hidden_size")
    if sizes.config.get("kv_lora_rank"):
        projections, attention, bytes_per_token, kernels = _latent_attention(sizes, formats["attention"], hidden)
    else:
        projections, attention, bytes_per_token, kernels = _grouped_attention(
            sizes, formats["attention"], hidden, window
        )
    mlp, mlp_bytes_per_token, mlp_kernels = (_experts if is_moe else _dense_mlp)(sizes, formats, hidden)
    return Layer(
        matrices=(*projections, *mlp),
        attention=attention,
        norm_bytes_per_token=2 * 2 * hidden * ACTIVATION_BYTES,  # two norms, each reads and writes
        inner_bytes_per_token=bytes_per_token + mlp_bytes_per_token,
        num_kernels=2 + kernels + mlp_kernels,
        other_params=2 * hidden,
    )


_Part = tuple[tuple[Matrix, ...], Attention, int, int]


def _grouped_attention(sizes: _Sizes, fmt: WeightFormat, hidden: int, window: int | None) -> _Part:
    """Multi-head, grouped-query or multi-query attention. Kernels: qkv, rotary, cache write, attention (2), output."""
    heads = sizes.need(_HEADS, "num_attention_heads")
    kv_heads = sizes.get(_KV_HEADS) or (1 if sizes.config.get("multi_query") else heads)
    head_dim = sizes.get(("head_dim", "kv_channels", "attention_head_dim")) or hidden // heads
    v_dim = sizes.get(("v_head_dim",)) or head_dim
    if head_dim < 1 or kv_heads > heads:
        raise ModelError(f"config.json: {heads} heads and {kv_heads} KV heads do not fit a hidden size of {hidden}.")
    q, kv = heads * head_dim, kv_heads * (head_dim + v_dim)
    params = hidden * (q + kv) + heads * v_dim * hidden
    has_qk_norm = str(sizes.config.get("model_type", "")).startswith("qwen3") or bool(sizes.config.get("use_qk_norm"))
    attention = Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        cache_elements=head_dim + v_dim,
        decode_flops_per_pair=2 * heads * (head_dim + v_dim),
        prefill_flops_per_pair=2 * heads * (head_dim + v_dim),
        window_tokens=window,
    )
    passes = 2 if has_qk_norm else 1  # rotary embedding and head norms read and write q and k once each
    return (
        (Matrix(role="attention", params=params, format=fmt),),
        attention,
        passes * 2 * (q + kv // 2) * ACTIVATION_BYTES,
        6 + has_qk_norm,
    )


def _latent_attention(sizes: _Sizes, fmt: WeightFormat, hidden: int) -> _Part:
    """MLA (DeepSeek-V2/V3, Kimi K2). The down-projections and the latent cache are the same on all ranks.

    Decoding uses the absorbed form (queries in latent space), prefill the expanded one. Kernels: down-projection, two
    norms, query up-projection, rotary and cache write, absorption, attention (2), value absorption, output.
    """
    heads = sizes.need(_HEADS, "num_attention_heads")
    rank = sizes.need(("kv_lora_rank",), "kv_lora_rank")
    nope = sizes.need(("qk_nope_head_dim",), "qk_nope_head_dim")
    rope = sizes.need(("qk_rope_head_dim",), "qk_rope_head_dim")
    v_dim = sizes.need(("v_head_dim",), "v_head_dim")
    q_rank = sizes.get(("q_lora_rank",))
    down = hidden * (rank + rope) + (hidden * q_rank if q_rank else 0)
    up = (q_rank or hidden) * heads * (nope + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    attention = Attention(
        num_heads=heads,
        num_kv_heads=1,
        cache_elements=rank + rope,
        decode_flops_per_pair=2 * heads * (2 * rank + rope),
        prefill_flops_per_pair=2 * heads * (nope + rope + v_dim),
        expand_flops_per_token=2 * rank * heads * (nope + v_dim),
        is_latent=True,
    )
    matrices = (
        Matrix(role="attention", params=down, format=fmt, is_sharded=False),
        Matrix(role="attention", params=up, format=fmt),
    )
    return matrices, attention, 2 * (heads * (nope + rope) + rank + rope) * ACTIVATION_BYTES, 10


_Mlp = tuple[tuple[Matrix, ...], int, int]


def _dense_mlp(sizes: _Sizes, formats: dict[str, WeightFormat], hidden: int) -> _Mlp:
    """Gated MLP. Kernels: gate and up, activation, down."""
    size = sizes.get(("intermediate_size_mlp", "dense_intermediate_size")) or sizes.get(_MLP) or 4 * hidden
    matrix = Matrix(role="mlp", params=3 * hidden * size, format=formats["mlp"])
    return (matrix,), 3 * size * ACTIVATION_BYTES, 3


def _experts(sizes: _Sizes, formats: dict[str, WeightFormat], hidden: int) -> _Mlp:
    """Router, routed experts and shared ones. Kernels: router, top-k, sorting, the experts' three, combine."""
    experts = sizes.need(_EXPERTS, "number of experts")
    active = sizes.need(_ACTIVE, "number of experts per token")
    if active > experts:
        raise ModelError(f"config.json: {active} experts per token, but there are only {experts}.")
    size = sizes.get(_EXPERT_SIZE) or sizes.need(_MLP, "moe_intermediate_size")
    matrices = [
        Matrix(role="router", params=hidden * experts, format=formats["router"], is_sharded=False),
        Matrix(
            role="experts",
            params=3 * hidden * size,
            format=formats["experts"],
            num_experts=experts,
            num_active=active,
        ),
    ]
    shared = _shared_size(sizes, size)
    if shared:
        matrices.append(Matrix(role="shared", params=3 * hidden * shared, format=formats["shared"]))
    bytes_per_token = (3 * (active * size + shared) + 4 * active * hidden) * ACTIVATION_BYTES
    return tuple(matrices), bytes_per_token, 7 + (3 if shared else 0)


def _shared_size(sizes: _Sizes, expert_size: int) -> int:
    """Width of the experts that every token passes, taken together."""
    number = _first(sizes.config, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"))
    own_size = sizes.config.get("shared_expert_intermediate_size") or sizes.config.get("shared_intermediate_size")
    if isinstance(own_size, int) and own_size > 0:
        return own_size * (number if isinstance(number, int) and number > 0 else 1)
    if isinstance(number, int) and not isinstance(number, bool) and number > 0:
        return number * expert_size
    return expert_size if str(sizes.config.get("model_type", "")).startswith("llama4") else 0

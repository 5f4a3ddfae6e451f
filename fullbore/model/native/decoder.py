"""One stage of a dense decoder: embedding, layers, final norm and head, as far as the stage has them.

A layer is a pre-norm residual block of two parts, each of which adds its result to the hidden states in place. Other
kinds of attention (multi-head latent) or MLP (mixture of experts) would be further classes with the same two methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fullbore.model.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint
from fullbore.model.kv_cache import KVCache
from fullbore.model.native.config import DecoderConfig
from fullbore.model.native.kernels import AttentionWeights, Batch, HeadShape, Kernels, Linear
from fullbore.model.native.rope import RotaryTables
from fullbore.model.native.weights import CheckpointReader, SizeCounter, WeightSource
from fullbore.scheduler.micro_batch import MicroBatch


class Buffers:
    """Activations between the operations of a layer, [tokens, size] each, kept from step to step."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def take(self, name: str, tokens: int, size: int) -> torch.Tensor:
        """A buffer with whatever was left in it."""
        if tokens != self._tokens:  # most steps are as large as the one before, and making a view costs microseconds
            self._tokens = tokens
            self._views.clear()
        view = self._views.get(name)
        if view is None:
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < tokens:
                buffer = self._buffers[name] = torch.empty(tokens, size, dtype=self._dtype, device=self._device)
            view = self._views[name] = buffer[:tokens]
        return view


class Step(NamedTuple):
    """What all layers share in one step."""

    batch: Batch
    rotary: RotaryTables
    cache: KVCache
    buffers: Buffers


class GroupedAttention:
    """Attention whose query heads share key and value heads in groups."""

    def __init__(self, config: DecoderConfig, layer: int, kernels: Kernels, source: WeightSource) -> None:
        name = f"model.layers.{layer}.self_attn"
        shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        rows = [heads * config.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self._kernels = kernels
        self._layer = layer
        self._qkv = source.linear(
            [f"{name}.{part}_proj" for part in "qkv"], rows, config.hidden_size, has_bias=config.qkv_bias
        )
        q_norm, k_norm = (
            source.vector(f"{name}.{part}_norm.weight", config.head_dim) if config.qk_norm else None for part in "qk"
        )
        self._weights = AttentionWeights(shape, q_norm, k_norm, config.epsilon)
        self._output = source.linear([f"{name}.o_proj"], [config.hidden_size], rows[0], has_bias=config.output_bias)

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor, step: Step) -> None:
        """`hidden` += attention(`normed`)."""
        tokens, shape = len(hidden), self._weights.shape
        qkv = self._kernels.linear(self._qkv, normed, step.buffers.take("qkv", tokens, shape.qkv_size))
        out = step.buffers.take("attended", tokens, shape.heads * shape.dim)
        attended = self._kernels.attend(qkv, self._weights, step.rotary, self._layer, step.batch, step.cache, out)
        self._kernels.add_linear(self._output, attended, hidden)


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, layer: int, kernels: Kernels, source: WeightSource) -> None:
        name = f"model.layers.{layer}.mlp"
        size, has_bias = config.intermediate_size, config.mlp_bias
        self._kernels = kernels
        self._gate_up = source.linear(
            [f"{name}.gate_proj", f"{name}.up_proj"], [size, size], config.hidden_size, has_bias=has_bias, is_gated=True
        )
        self._down = source.linear([f"{name}.down_proj"], [config.hidden_size], size, has_bias=has_bias)

    def add_to(self, hidden: torch.Tensor, normed: torch.Tensor, step: Step) -> None:
        """`hidden` += mlp(`normed`)."""
        out = step.buffers.take("gated", len(hidden), self._gate_up.outputs)
        self._kernels.add_linear(self._down, self._kernels.gated_linear(self._gate_up, normed, out), hidden)


class Layer:
    """Two residual parts, each behind a norm of its own."""

    def __init__(self, config: DecoderConfig, layer: int, kernels: Kernels, source: WeightSource) -> None:
        name = f"model.layers.{layer}"
        self._kernels = kernels
        self._epsilon = config.epsilon
        self._attention = GroupedAttention(config, layer, kernels, source)
        self._mlp = GatedMlp(config, layer, kernels, source)
        self._attention_norm = source.vector(f"{name}.input_layernorm.weight", config.hidden_size)
        self._mlp_norm = source.vector(f"{name}.post_attention_layernorm.weight", config.hidden_size)

    def forward(self, hidden: torch.Tensor, step: Step) -> None:
        """Changes `hidden` in place."""
        normed = step.buffers.take("normed", *hidden.shape)
        for part, norm in ((self._attention, self._attention_norm), (self._mlp, self._mlp_norm)):
            part.add_to(hidden, self._kernels.rms_norm(hidden, norm, self._epsilon, normed), step)


class NativeStage:
    """Layers `first_layer` … `end_layer-1` of a model; see `StageModule` for the interface.

    Args:
        dtype: of the KV cache and of the hidden states that stages hand on.
    """

    def __init__(
        self,
        config: DecoderConfig,
        first_layer: int,
        end_layer: int,
        dtype: torch.dtype,
        device: str,
        kernels: Kernels,
        rotary: RotaryTables,
        checkpoint: Checkpoint,
    ) -> None:
        self.first_layer = first_layer
        self.num_layers = end_layer - first_layer
        self.is_first = first_layer == 0
        self.is_last = end_layer == config.num_layers
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._rotary = rotary
        self._buffers = Buffers(kernels.compute_dtype, device)
        self._counter = SizeCounter(checkpoint, kernels, kernels.compute_dtype)
        self._build(self._counter)

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def weight_bytes(self) -> int:
        """Memory of the weights as they are laid out, padding included."""
        return self._counter.packed_bytes + self._counter.vector_bytes

    def load(self, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Reads this stage's tensors and no others; no more than one fused matrix is in memory besides the weights.

        Raises:
            ModelError: a tensor is missing, or its shape does not fit the config.
        """
        kernels = self._kernels
        total_bytes = sum(checkpoint.nbytes(name) for name in self._counter.names)
        kernels.reserve(self._counter.packed_bytes)
        self._build(
            CheckpointReader(checkpoint, kernels, kernels.compute_dtype, self._device, total_bytes, on_progress)
        )

    def _build(self, source: WeightSource) -> None:
        config, kernels = self._config, self._kernels
        is_shared = config.tied_embeddings and self.is_first and self.is_last
        embedding, head = EMBEDDING_NAME.removesuffix(".weight"), HEAD_NAME.removesuffix(".weight")

        def matrix(name: str, in_rows: bool) -> Linear:
            return source.linear([name], [config.vocab_size], config.hidden_size, in_rows=in_rows)

        self._embedding = matrix(embedding, in_rows=True) if self.is_first else None
        self._layers = [
            Layer(config, layer, kernels, source)
            for layer in range(self.first_layer, self.first_layer + self.num_layers)
        ]
        if self.is_last:
            self._norm = source.vector("model.norm.weight", config.hidden_size)
            name = embedding if config.tied_embeddings else head
            self._head = self._embedding if is_shared else matrix(name, in_rows=False)

    def prepare(self, micro_batch: MicroBatch, cache: KVCache) -> Batch:
        """What `forward` needs of the plan; may be made while other micro-batches compute."""
        return self._kernels.prepare(micro_batch, cache)

    def forward(self, batch: Batch, hidden: torch.Tensor | None, cache: KVCache) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of the stage before, None on the first -> a fresh tensor of them."""
        self._rotary.require(batch.longest_context)
        step = Step(batch, self._rotary, cache, self._buffers)
        if hidden is None:
            assert self._embedding is not None
            hidden = self._kernels.rows(self._embedding, batch.token_ids)
        else:
            hidden = hidden.to(self._kernels.compute_dtype, copy=True)
        for layer in self._layers:
            layer.forward(hidden, step)
        return hidden if self.is_last else hidden.to(self._dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden_size] after the last layer -> float32 [rows, vocab_size], a fresh tensor."""
        assert self._head is not None
        normed = self._buffers.take("normed", *hidden.shape)
        normed = self._kernels.rms_norm(hidden, self._norm, self._config.epsilon, normed)
        logits = hidden.new_empty(len(hidden), self._config.vocab_size)
        return self._kernels.linear(self._head, normed, logits).float()

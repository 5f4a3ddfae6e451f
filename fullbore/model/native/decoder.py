"""One stage of a dense decoder: embedding, layers, final norm and head, as far as the stage has them.

Other kinds of layers (multi-head latent attention, mixture of experts) would be further classes beside LayerWeights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullbore.model.checkpoint import EMBEDDING_NAME, HEAD_NAME, Checkpoint
from fullbore.model.kv_cache import KVCache
from fullbore.model.native.config import DecoderConfig
from fullbore.model.native.kernels import Batch, HeadShape, Kernels, LayerWeights, Linear
from fullbore.model.native.rope import RotaryTables
from fullbore.model.native.weights import CheckpointReader, SizeCounter, WeightSource
from fullbore.scheduler.micro_batch import MicroBatch


def read_layer(config: DecoderConfig, layer: int, source: WeightSource) -> LayerWeights:
    """The weights of one layer, in the order in which a step reads them."""
    name, hidden_size, size = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]

    def head_norm(part: str) -> torch.Tensor | None:
        return source.vector(f"{attention}.{part}_norm.weight", config.head_dim) if config.qk_norm else None

    return LayerWeights(
        attention_norm=source.vector(f"{name}.input_layernorm.weight", hidden_size),
        qkv=source.linear([f"{attention}.{part}_proj" for part in "qkv"], rows, hidden_size, has_bias=config.qkv_bias),
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        output=source.linear([f"{attention}.o_proj"], [hidden_size], rows[0], has_bias=config.output_bias),
        mlp_norm=source.vector(f"{name}.post_attention_layernorm.weight", hidden_size),
        gate_up=source.linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            [size, size],
            hidden_size,
            has_bias=config.mlp_bias,
            is_gated=True,
        ),
        down=source.linear([f"{mlp}.down_proj"], [hidden_size], size, has_bias=config.mlp_bias),
    )


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
        layers = range(self.first_layer, self.first_layer + self.num_layers)
        shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._layers = kernels.layers([read_layer(config, layer, source) for layer in layers], shape, config.epsilon)
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
        if hidden is None:
            assert self._embedding is not None
            hidden = self._kernels.rows(self._embedding, batch.token_ids)
        else:
            hidden = hidden.to(self._kernels.compute_dtype, copy=True)
        self._layers.forward(hidden, batch, self._rotary, cache)
        return hidden if self.is_last else hidden.to(self._dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden_size] after the last layer -> float32 [rows, vocab_size], a fresh tensor."""
        assert self._head is not None
        normed = self._kernels.rms_norm(hidden, self._norm, self._config.epsilon)
        return self._kernels.linear(self._head, normed).float()

"""Decode steps of a stage as CUDA graphs: captured once per bucket before the first request, then replayed.

A decode step of a small model is hundreds of short kernels, and launching them takes the processor longer than running
them takes the GPU. A graph launches them all at once. It reads and writes fixed addresses, so a micro-batch is padded
to its bucket and copied into static tensors first. What fits no bucket, prompts above all, runs as it would without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullbore.model.kv_cache import KVCache
from fullbore.model.native.buckets import Bucket, DecodeRows, choose_bucket, is_decode, make_buckets, pad
from fullbore.model.native.decoder import NativeStage
from fullbore.model.native.torch_kernels import StaticBatch, TorchKernels
from fullbore.scheduler.micro_batch import MicroBatch, Run

Step = Callable[[], None]
Capture = Callable[[Step], Step]  # a step -> what repeats it


class CudaGraphs:
    """Captures steps. They share one pool of memory: no two of them run at once."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        step()  # libraries load and allocate at their first use, which must not happen inside a capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        torch.cuda.synchronize(self._device)
        return graph.replay


def run_anew(step: Step) -> Step:
    """A `Capture` for devices without graphs: the padded step is computed each time. For tests."""
    return step


class DecodeGraphs:
    """One stage's graphs, to be captured before the first use.

    Args:
        kernels: the module's.
        cache: has one block more than requests are given, the last one: `scratch_block`.
        most_requests: in a micro-batch.
        context_tokens: longest that a request can get.
        hidden_size, dtype: of the hidden states that stages hand on.
    """

    def __init__(
        self,
        module: NativeStage,
        kernels: TorchKernels,
        cache: KVCache,
        most_requests: int,
        context_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.buckets = make_buckets(most_requests, context_tokens, cache.page_size, gathers=kernels.gathers)
        self._module = module
        self._kernels = kernels
        self._cache = cache
        self._scratch_block = cache.num_blocks - 1
        # All say the same length, so that the tables of the rotary embedding never grow, and move, after a capture.
        self._longest_context = -(-context_tokens // cache.page_size) * cache.page_size
        self._hidden = torch.zeros(most_requests, hidden_size, dtype=dtype, device=device)
        self._output = torch.zeros_like(self._hidden)
        self._batches: dict[Bucket, StaticBatch] = {}
        self._replays: dict[Bucket, Step] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures every bucket, the largest first, so that the others find room in its memory."""
        for bucket in reversed(self.buckets):
            batch = self._batches[bucket] = self._kernels.static_batch(bucket, self._cache, self._longest_context)
            batch.fill(self._nobody(bucket))
            self._replays[bucket] = capture(self._make_step(bucket, batch))

    def prepare(self, micro_batch: MicroBatch) -> Bucket | None:
        """Fills the static tensors of the bucket that the micro-batch runs in; None: it must run without a graph."""
        if not is_decode(micro_batch):
            return None
        bucket = choose_bucket(self.buckets, micro_batch, self._cache.page_size)
        if bucket is not None:
            self._batches[bucket].fill(pad(micro_batch, bucket, self._cache.page_size, self._scratch_block))
        return bucket

    def replay(self, bucket: Bucket, num_requests: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """The stage's layers for what was prepared last; as `StageModule.forward`, but valid only until the next call.

        Args:
            hidden: [num_requests, hidden_size], None on the first stage.
        """
        if hidden is not None:
            self._hidden[:num_requests].copy_(hidden)
        self._replays[bucket]()
        return self._output[:num_requests]

    def _make_step(self, bucket: Bucket, batch: StaticBatch) -> Step:
        module, cache = self._module, self._cache
        hidden = None if module.is_first else self._hidden[: bucket.requests]
        output = self._output[: bucket.requests]

        def step() -> None:
            output.copy_(module.forward(batch.batch(), hidden, cache))

        return step

    def _nobody(self, bucket: Bucket) -> DecodeRows:
        """A micro-batch of padding alone."""
        run = Run(-1, 0, 0, [0], [self._scratch_block], None)
        return pad(MicroBatch(-1, [run], "slot-freed", 0.0), bucket, self._cache.page_size, self._scratch_block)

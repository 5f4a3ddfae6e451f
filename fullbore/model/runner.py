"""Runs one pipeline stage: loads its layers, keeps its KV blocks, computes micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fullbore.config import Backend
from fullbore.errors import ModelError, OutOfMemoryError
from fullbore.model.checkpoint import Checkpoint
from fullbore.model.device import format_bytes, free_memory_bytes, keep_freed_memory, torch_dtype
from fullbore.model.kv_cache import KVCache
from fullbore.model.logprobs import logprobs, sampled_logprobs
from fullbore.model.sampling import sample
from fullbore.model.spec import ModelSpec
from fullbore.model.stage_module import StageModule
from fullbore.scheduler.logprobs import Logprobs, MicroBatchLogprobs, join
from fullbore.scheduler.micro_batch import MicroBatch, PromptLogprobs, Run

if TYPE_CHECKING:  # imported late: only the native backend has graphs
    from fullbore.model.native.buckets import Bucket
    from fullbore.model.native.graphs import DecodeGraphs
    from fullbore.model.native.torch_kernels import TorchKernels

_LOGPROB_ROWS = 64  # prompt positions whose logits exist at one time


class StageRunner:
    """One pipeline stage: its layers, its KV blocks. Micro-batches run in the order of the calls.

    `used_graph`: whether the last `forward` came from a CUDA graph.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: int,
        module: StageModule,
        page_size: int,
        device: str,
        dtype: torch.dtype,
        graph_requests: int = 0,
    ) -> None:
        self.stage = stage
        self.device = device
        self.page_size = page_size
        self.hidden_size = spec.hidden_size
        self.is_first = module.is_first
        self.is_last = module.is_last
        self._spec = spec
        self._module = module
        self._graph_requests = graph_requests
        self._graphs: DecodeGraphs | None = None
        self.used_graph = False
        self._cache: KVCache | None = None
        # The next one, the graph for it if there is one, or what the module made of it.
        self._prepared: tuple[MicroBatch, Bucket | None, Any] | None = None
        self._prompt_logprobs: list[Logprobs] = []  # of the micro-batch computed last
        self.dtype = dtype
        self.weight_bytes = module.weight_bytes()
        self.kv_block_bytes = KVCache.block_bytes(
            module.num_layers, spec.num_kv_heads, page_size, spec.k_head_dim, spec.v_head_dim, dtype
        )

    @classmethod
    def load(
        cls,
        model_path: Path,
        stage: int,
        partition: tuple[int, ...],
        device: str,
        dtype: str,
        page_size: int,
        on_progress: Callable[[int, int], None] | None = None,
        backend: Backend = "auto",
        graph_requests: int = 0,
    ) -> StageRunner:
        """Builds stage `stage` of a Hugging Face folder and reads its tensors, no others.

        Args:
            partition: layers per stage, for all stages.
            device: "cpu", "cuda:0", …
            dtype: "float32", "bfloat16" or "float16".
            page_size: tokens per KV block.
            on_progress: called with (loaded_bytes, total_bytes) of the files after every tensor.
            backend: "auto" is native for the models that it can run, otherwise transformers.
            graph_requests: decode micro-batches of up to so many requests run in CUDA graphs, where the backend can;
                0: none do.

        Raises:
            ModelError: the folder is incomplete, broken or not supported, or does not fit the partition.
            OutOfMemoryError: the stage's weights do not fit into the free memory.
        """
        spec = ModelSpec.from_folder(model_path)
        if sum(partition) != spec.num_layers:
            raise ModelError(
                f"The stages have {sum(partition)} layers together but the model has {spec.num_layers}; "
                "correct --pp-layer-partition."
            )
        first_layer = sum(partition[:stage])
        end_layer = first_layer + partition[stage]
        element = torch_dtype(dtype)
        module = _make_module(backend, model_path, spec, first_layer, end_layer, element, device)
        _require_memory(module.weight_bytes(), f"the weights of stage {stage}", device)
        module.load(Checkpoint.open(model_path), on_progress)
        if device == "cpu":
            keep_freed_memory()
        return cls(spec, stage, module, page_size, device, element, graph_requests)

    def free_memory_bytes(self) -> int:
        """Memory that can still be allocated on this stage's device; stages on one host report the same memory."""
        if self.device != "cpu":
            torch.cuda.empty_cache()  # what loading needed besides the weights
        return free_memory_bytes(self.device)

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocates the KV blocks 0 … num_blocks-1 in every layer of the stage, and captures the CUDA graphs, if any.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        self._cache = self._graphs = None
        graph_kernels = self._graph_kernels()
        scratch_blocks = 1 if graph_kernels is not None else 0
        _require_memory(
            (num_blocks + scratch_blocks) * self.kv_block_bytes,
            f"{num_blocks} KV blocks of {self.page_size} tokens on stage {self.stage}",
            self.device,
            "; lower --max-total-tokens or --mem-fraction-static",
        )
        self._cache = KVCache(
            self._module.first_layer,
            self._module.num_layers,
            num_blocks + scratch_blocks,
            self._spec.num_kv_heads,
            self.page_size,
            self._spec.k_head_dim,
            self._spec.v_head_dim,
            self.dtype,
            self.device,
        )
        if graph_kernels is not None:
            self._graphs = self._capture_graphs(graph_kernels, num_blocks)

    def _graph_kernels(self) -> TorchKernels | None:
        """Those of a module whose decode steps are to run in graphs; None: they are not, or cannot."""
        if not self._graph_requests:
            return None
        from fullbore.model.native.torch_kernels import TorchKernels

        kernels = getattr(self._module, "kernels", None)
        return kernels if isinstance(kernels, TorchKernels) else None

    def _capture_graphs(self, kernels: TorchKernels, num_blocks: int) -> DecodeGraphs:
        from fullbore.model.native.decoder import NativeStage
        from fullbore.model.native.graphs import CudaGraphs, DecodeGraphs, run_anew

        assert isinstance(self._module, NativeStage)
        assert self._cache is not None
        graphs = DecodeGraphs(
            self._module,
            kernels,
            self._cache,
            self._graph_requests,
            min(self._spec.context_length, num_blocks * self.page_size),
            self.hidden_size,
            self.dtype,
            self.device,
        )
        graphs.capture(run_anew if self.device == "cpu" else CudaGraphs(self.device))
        return graphs

    @torch.inference_mode()
    def prepare(self, micro_batch: MicroBatch) -> None:
        """Does what `forward` needs of the plan alone, ahead of it: the engine waits for hidden states anyway."""
        assert self._cache is not None, "allocate_kv first"
        bucket = None if self._graphs is None else self._graphs.prepare(micro_batch)
        inputs = self._module.prepare(micro_batch, self._cache) if bucket is None else None
        self._prepared = (micro_batch, bucket, inputs)

    @torch.inference_mode()
    def forward(self, micro_batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Computes the stage's layers for every token of a micro-batch and stores their keys and values.

        Args:
            hidden: [tokens, hidden_size] from the stage before, None on the first stage.

        Returns:
            hidden states [tokens, hidden_size], or on the last stage logits [num_sampled, vocab_size] in float32: one
            row per run that has `sampling`, for its last token.
        """
        assert self._cache is not None, "allocate_kv first"
        if not self.is_first:
            assert hidden is not None
            if hidden.shape != (micro_batch.num_tokens, self.hidden_size):
                raise ValueError(
                    f"Stage {self.stage} got hidden states of shape {list(hidden.shape)} for micro-batch "
                    f"{micro_batch.id} of {micro_batch.num_tokens} tokens."
                )
        if self._prepared is None or self._prepared[0] is not micro_batch:
            self.prepare(micro_batch)
        assert self._prepared is not None
        _, bucket, inputs = self._prepared
        self._prepared = None
        self.used_graph = bucket is not None
        if self._graphs is not None and bucket is not None:
            output = self._graphs.replay(bucket, len(micro_batch.runs), hidden)
        else:
            output = self._module.forward(inputs, hidden, self._cache)
        if not self.is_last:
            return output
        self._prompt_logprobs = self._compute_prompt_logprobs(micro_batch, output)
        rows = _sampled_rows(micro_batch)
        return self._module.logits(output if len(rows) == len(output) else output[rows])

    @torch.inference_mode()
    def sample(self, micro_batch: MicroBatch, logits: torch.Tensor) -> list[int | None]:
        """Draws one token per run that has `sampling`, in the order of the runs; None: its logits are not finite."""
        samplings = [run.sampling for run in micro_batch.runs if run.sampling is not None]
        return sample(logits, samplings)

    @torch.inference_mode()
    def logprobs(
        self, micro_batch: MicroBatch, logits: torch.Tensor, token_ids: Sequence[int | None]
    ) -> MicroBatchLogprobs | None:
        """The log-probabilities that the runs ask for, after `forward` and `sample`; None: no run does."""
        samplings = [run.sampling for run in micro_batch.runs if run.sampling is not None]
        if not self._prompt_logprobs and all(sampling.num_logprobs is None for sampling in samplings):
            return None
        return MicroBatchLogprobs(sampled_logprobs(logits, samplings, token_ids), self._prompt_logprobs)

    def _compute_prompt_logprobs(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> list[Logprobs]:
        """For each run that asks for them. `hidden`: [tokens, hidden_size] after the last layer."""
        found = []
        end = 0
        for run in micro_batch.runs:
            start, end = end, end + len(run.token_ids)
            if run.prompt_logprobs is not None:
                found.append(self._run_logprobs(run, hidden[start:end], run.prompt_logprobs))
        return found

    def _run_logprobs(self, run: Run, hidden: torch.Tensor, wanted: PromptLogprobs) -> Logprobs:
        """Of the tokens that follow the run's own, from logits that are never there for all of them at once."""
        following = run.token_ids[1:] + ([] if wanted.next_token_id is None else [wanted.next_token_id])
        parts = []
        for start in range(0, len(following), _LOGPROB_ROWS):
            token_ids = following[start : start + _LOGPROB_ROWS]
            logits = self._module.logits(hidden[start : start + len(token_ids)])
            parts.append(logprobs(logits, token_ids, wanted.num_top))
        return join(parts)


def _make_module(
    backend: Backend,
    folder: Path,
    spec: ModelSpec,
    first_layer: int,
    end_layer: int,
    dtype: torch.dtype,
    device: str,
) -> StageModule:
    """The stage without its weights. Imports the backend that it takes and no other: transformers takes seconds."""
    if backend != "transformers":
        from fullbore.model.native.backend import make_native_stage
        from fullbore.model.native.config import UnsupportedError

        try:
            return make_native_stage(folder, spec, first_layer, end_layer, dtype, device)
        except UnsupportedError as error:
            if backend == "native":
                raise ModelError(
                    f"The native backend cannot run this model: {error}; use --backend auto or transformers."
                ) from None
    from fullbore.model.transformers_stage import TransformersStage

    return TransformersStage(folder, spec, first_layer, end_layer, dtype, device)


def _sampled_rows(micro_batch: MicroBatch) -> list[int]:
    """Rows of the last token of each run that has `sampling`."""
    rows = []
    end = 0
    for run in micro_batch.runs:
        end += len(run.token_ids)
        if run.sampling is not None:
            rows.append(end - 1)
    return rows


def _require_memory(
    needed_bytes: int, what: str, device: str, advice: str = "; use more stages or a smaller model"
) -> None:
    free_bytes = free_memory_bytes(device)
    if needed_bytes > free_bytes:
        raise OutOfMemoryError(
            f"Not enough memory for {what}: {format_bytes(needed_bytes)} needed, {format_bytes(free_bytes)} free on "
            f"{device}, {format_bytes(needed_bytes - free_bytes)} missing{advice}."
        )

"""Stages that sleep for a stated time instead of computing, in real processes with real messages and a real KV layout.

With them a pipeline of any number of stages overlaps even on one core, and every output is predictable: a token is a
function of all tokens before it, read back through the block table. Wrong or missing data is noticed at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from fullbore.engine.sleep_model import SleepModel, allowed_tokens, checksum, draw, parse
from fullbore.errors import OutOfMemoryError
from fullbore.scheduler.logprobs import Logprobs, MicroBatchLogprobs
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

_CHECK_PERIOD = 1 << 24  # integers below are exact in float32, in which hidden states travel
_UNWRITTEN = -1
_CERTAIN = Logprobs(bytes(4), b"", b"")


class SleepRunner:
    """One stage; the interface of `fullbore.model.runner.StageRunner`.

    Hidden states: column 0 the token, 1 its position, 2 the layers passed so far, 3 (last row of a run) the first
    stage's checksum of the sequence, which every later stage compares with what its own KV cache holds.
    """

    dtype = torch.float32
    used_graph = False

    def __init__(self, model: SleepModel, stage: int, partition: Sequence[int], page_size: int) -> None:
        self.model = model
        self.hidden_size = model.hidden
        self._stage = stage
        self._is_first = stage == 0
        self._is_last = stage == len(partition) - 1
        self._layers_before = sum(partition[:stage])
        self._layers = partition[stage]
        self._page_size = page_size
        self._kv = torch.empty(0, dtype=torch.int64)
        self._num_forwards = 0

    @classmethod
    def load(cls, model_path: str, stage: int, partition: Sequence[int], page_size: int) -> SleepRunner:
        model = parse(model_path)
        time.sleep(model.load_ms * 1e-3)
        return cls(model, stage, partition, page_size)

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def kv_block_bytes(self) -> int:
        return self._page_size * 8

    def free_memory_bytes(self) -> int:
        return 1 << 30

    def allocate_kv(self, num_blocks: int) -> None:
        self._kv = torch.full((num_blocks * self._page_size,), _UNWRITTEN)

    def prepare(self, micro_batch: MicroBatch) -> None:
        pass

    def forward(self, micro_batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Returns hidden states or, on the last stage, the checksum of each sequence that gets a token."""
        end_s = time.monotonic() + self._duration_s(micro_batch)
        if micro_batch.id >= 0:  # the ones before serving, which measure, do not count
            self._fail_if_due()
        if hidden is None:
            hidden = self._embed(micro_batch)
        checksums = self._pass_through(micro_batch, hidden)
        time.sleep(max(end_s - time.monotonic(), 0.0))
        return torch.tensor(checksums, dtype=torch.int64) if self._is_last else hidden

    def sample(self, micro_batch: MicroBatch, logits: torch.Tensor) -> list[int | None]:
        samplings = [run.sampling for run in micro_batch.runs if run.sampling is not None]
        return [self._draw(value, sampling) for value, sampling in zip(logits.tolist(), samplings, strict=True)]

    def _draw(self, value: int, sampling: Sampling) -> int:
        """Obeys the mask of a grammar; there are no logits that biases and penalties could change."""
        seed = None if sampling.temperature == 0 else sampling.seed
        if sampling.mask is None:
            return draw(value, seed, sampling.choice, self.model.vocab)
        allowed = allowed_tokens(sampling.mask, self.model.vocab)
        return allowed[draw(value, seed, sampling.choice, len(allowed))]

    def logprobs(
        self, micro_batch: MicroBatch, logits: torch.Tensor, token_ids: Sequence[int | None]
    ) -> MicroBatchLogprobs | None:
        """Every token is certain: log-probability 0, and none beside it."""
        due = [run.sampling for run in micro_batch.runs if run.sampling is not None]
        sampled = [None if sampling.num_logprobs is None else _CERTAIN for sampling in due]
        prompt = [
            Logprobs(bytes(4 * (len(run.token_ids) - (run.prompt_logprobs.next_token_id is None))), b"", b"")
            for run in micro_batch.runs
            if run.prompt_logprobs is not None
        ]
        return MicroBatchLogprobs(sampled, prompt) if prompt or any(sampled) else None

    def _duration_s(self, micro_batch: MicroBatch) -> float:
        model = self.model
        layers_ms = self._layers * (model.layer_ms + micro_batch.num_tokens * model.token_ms)
        return (layers_ms + (model.head_ms if self._is_last else 0.0)) * 1e-3

    def _embed(self, micro_batch: MicroBatch) -> torch.Tensor:
        hidden = torch.zeros((micro_batch.num_tokens, self.hidden_size))
        row = 0
        for run in micro_batch.runs:
            end = row + len(run.token_ids)
            hidden[row:end, 0] = torch.tensor(run.token_ids, dtype=torch.float32)
            hidden[row:end, 1] = torch.arange(run.start, run.start + len(run.token_ids))
            row = end
        return hidden

    def _pass_through(self, micro_batch: MicroBatch, hidden: torch.Tensor) -> list[int]:
        """Writes the rows' tokens into the KV cache, checks what came, and returns the checksums that are due."""
        if not bool((hidden[:, 2] == self._layers_before).all()):
            raise RuntimeError(f"stage {self._stage}: hidden states did not pass {self._layers_before} layers before")
        due = []
        row = 0
        for run in micro_batch.runs:
            end = row + len(run.token_ids)
            value = self._write_and_read(run, hidden[row:end])
            if self._is_first:
                hidden[end - 1, 3] = value % _CHECK_PERIOD
            elif int(hidden[end - 1, 3]) != value % _CHECK_PERIOD:
                raise RuntimeError(f"stage {self._stage}: the KV of request {run.request_id} differs from stage 0's")
            if run.sampling is not None:
                due.append(value)
            row = end
        hidden[:, 2] += self._layers
        return due

    def _write_and_read(self, run: Run, rows: torch.Tensor) -> int:
        end = run.start + len(run.token_ids)
        slots = torch.tensor(run.block_ids).unsqueeze(1) * self._page_size + torch.arange(self._page_size)
        slots = slots.flatten()[:end]
        if rows[:, 1].tolist() != list(range(run.start, end)):
            raise RuntimeError(f"stage {self._stage}: the hidden states of request {run.request_id} are not in place")
        self._kv[slots[run.start :]] = rows[:, 0].to(torch.int64)
        tokens = self._kv[slots]
        is_probe = run.request_id < 0  # before serving; it reads whatever is there
        if not is_probe and bool((tokens == _UNWRITTEN).any()):
            raise RuntimeError(f"stage {self._stage}: request {run.request_id} reads KV that was never written")
        return checksum(tokens.tolist())

    def _fail_if_due(self) -> None:
        self._num_forwards += 1
        model = self.model
        if not model.fail or self._stage != model.fail_stage or self._num_forwards != model.fail_at:
            return
        if model.fail == "memory":
            raise OutOfMemoryError(f"Stage {self._stage} ran out of memory, as its settings say.")
        if model.fail == "exit":
            os._exit(3)
        if model.fail == "hang":
            time.sleep(3600)
        raise RuntimeError("failed, as the settings say")

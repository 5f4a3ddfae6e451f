"""What "the same tokens as Hugging Face" means, checked in one place and counted. Use: `from exactness import ...`

A sequence passes if it is identical to the reference, or if the first difference is a tie: the reference itself was
undecided there by less than 1e-4 (between its two best logits, for a random draw between two tokens, or in a router up
to there) and our logits, computed from the reference's tokens, agree with its own to 1e-4. Ties must be rare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from fullbore.engine.messages import AddRequest
from fullbore.engine.runner import Runner
from fullbore.model.sampling import sample, uniform
from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling
from fullbore.scheduler.request import Request

TIE = 1e-4
LARGEST_SHARE_OF_TIES = 0.005


@dataclass
class Tally:
    """Sequences compared, and how many of them differed at a tie."""

    compared: int = 0
    ties: int = 0

    def __str__(self) -> str:
        return f"exactness: {self.compared} sequences compared with Hugging Face's, {self.ties} differ (at ties)"

    def check(self) -> None:
        assert self.ties <= LARGEST_SHARE_OF_TIES * self.compared, str(self)


TALLY = Tally()  # of the whole session; shown at its end


@dataclass(frozen=True)
class Case:
    """A prompt and how to continue it."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0

    def sampling(self, position: int) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.seed, self.choice, position)

    def request(self, request_id: int, eos_token_id: int) -> Request:
        """For the scheduler."""
        return Request(
            request_id,
            list(self.prompt),
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            self.choice,
            stop_token_ids=frozenset([eos_token_id]),
        )

    def message(self, request_id: int) -> AddRequest:
        """For the driver."""
        return AddRequest(
            request_id,
            list(self.prompt),
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            ignore_eos=False,
            choice=self.choice,
        )


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Hugging Face's whole model. It has no Kimi K2, which is DeepSeek-V3 by another name."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "kimi_k2":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    del config["model_type"]
    return DeepseekV3ForCausalLM.from_pretrained(folder, config=DeepseekV3Config.from_dict(config), dtype=dtype)


class Reference:
    """What Hugging Face's `generate` makes of some cases, in float32."""

    def __init__(self, folder: Path, cases: Sequence[Case], eos_token_id: int, tally: Tally = TALLY) -> None:
        self.folder = folder
        self.cases = list(cases)
        self.eos_token_id = eos_token_id
        self.tally = tally
        self.outputs: list[list[int]] = [[] for _ in cases]
        self._logits: list[torch.Tensor] = [torch.empty(0) for _ in cases]
        self._model = load_reference(folder)
        for length in sorted({len(case.prompt) for case in self.cases}):  # prompts as long need no padding
            self._generate([index for index, case in enumerate(self.cases) if len(case.prompt) == length])

    def _generate(self, indices: list[int]) -> None:
        cases = [self.cases[index] for index in indices]
        config = GenerationConfig(
            max_new_tokens=max(case.max_tokens for case in cases),
            do_sample=False,
            eos_token_id=self.eos_token_id,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompts = torch.tensor([case.prompt for case in cases])
        result: Any = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            logits_processor=LogitsProcessorList([_Draw(cases)]),
        )
        logits = torch.stack(result.logits, 1)
        for row, index in enumerate(indices):
            token_ids = result.sequences[row, prompts.shape[1] :].tolist()[: cases[row].max_tokens]
            if self.eos_token_id in token_ids:
                token_ids = token_ids[: token_ids.index(self.eos_token_id) + 1]
            self.outputs[index] = token_ids
            self._logits[index] = logits[row, : len(token_ids)].clone()

    def requests(self, indices: Sequence[int] | None = None, first_id: int = 0) -> list[Request]:
        """Requests with the ids first_id, first_id + 1 … for all cases or those named."""
        chosen = range(len(self.cases)) if indices is None else indices
        return [self.cases[index].request(first_id + k, self.eos_token_id) for k, index in enumerate(chosen)]

    def check(self, index: int, token_ids: list[int], load_stages: Callable[[], list[Runner]]) -> None:
        """Raises AssertionError unless `token_ids` are the case's output, or part from it at a tie.

        Args:
            load_stages: the model as it was run, with at least as many KV blocks as the sequence needs.
        """
        self.tally.compared += 1
        expected = self.outputs[index]
        if token_ids == expected:
            return
        what = f"case {index}: {token_ids} instead of {expected}"
        at = next((k for k, pair in enumerate(zip(token_ids, expected, strict=False)) if pair[0] != pair[1]), None)
        assert at is not None, f"{what}: the wrong number of tokens"
        gap = min(self._choice_gap(index, at), self._router_gap(index, at))
        assert gap < TIE, f"{what}: the first difference is no tie, the reference decided by {gap:.2g}"
        ours = last_logits(load_stages(), [*self.cases[index].prompt, *expected[:at]])
        error = float((ours - self._logits[index][at]).abs().max())
        assert error < TIE, f"{what}: logits from the same tokens differ by {error:.2g}"
        self.tally.ties += 1

    def _choice_gap(self, index: int, at: int) -> float:
        case = self.cases[index]
        logits = self._logits[index][at]
        if case.temperature == 0:
            best = logits.topk(2).values
            return float(best[0] - best[1])
        return draw_gap(logits, case.sampling(len(case.prompt) + at))

    @torch.inference_mode()
    def _router_gap(self, index: int, at: int) -> float:
        """By how little any router decided, in any layer, for any token that output token `at` depends on."""
        tokens = [*self.cases[index].prompt, *self.outputs[index][:at]]
        with _TopKGaps() as gaps:
            self._model(torch.tensor([tokens]))
        return gaps.smallest


def last_logits(stages: list[Runner], token_ids: list[int]) -> torch.Tensor:
    """Our logits [vocab_size] after a sequence that is computed at once, alone, in the first KV blocks."""
    greedy = Sampling(0.0, 1.0, 0, 0, 0, len(token_ids))
    run = Run(0, 0, 0, token_ids, list(range(len(token_ids))), greedy)  # more blocks than any page size needs
    hidden = None
    for stage in stages:
        hidden = stage.forward(MicroBatch(0, [run], "slot-freed", 0.0), hidden)
    assert hidden is not None
    return hidden[0]


class _Draw(LogitsProcessor):
    """Lets `generate` choose what our sampling draws from its logits; greedy rows stay as they are."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        samplings = [case.sampling(input_ids.shape[1]) for case in self._cases]
        drawn = sample(scores.float(), samplings)
        chosen = torch.full_like(scores, float("-inf"))
        for row, (case, token_id) in enumerate(zip(self._cases, drawn, strict=True)):
            if case.temperature == 0:
                chosen[row] = scores[row]
            else:
                chosen[row, token_id] = 0
        return chosen


class _TopKGaps(TorchFunctionMode):
    """The smallest distance, over all top-k choices made inside, between the last that was chosen and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = float("inf")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, torch.Tensor.topk):
            values, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            if k < values.shape[-1]:
                ordered = values.sort(-1, descending=True).values
                self.smallest = min(self.smallest, float((ordered[..., k - 1] - ordered[..., k]).min()))
        return function(*args, **kwargs)


def draw_gap(logits: torch.Tensor, sampling: Sampling) -> float:
    """How far a random draw was from another token: in probability, or where top_k cuts in logits."""
    scaled = logits.double() / sampling.temperature
    ordered, order = scaled.sort(descending=True)
    gaps = []
    allowed = len(ordered)
    if 0 < sampling.top_k < allowed:
        allowed = sampling.top_k
        gaps.append(float(ordered[allowed - 1] - ordered[allowed]))
    shares = ordered[:allowed].softmax(0).cumsum(0)
    if sampling.top_p < 1:
        gaps.append(float((shares - sampling.top_p).abs().min()))
        allowed = int(torch.searchsorted(shares, sampling.top_p)) + 1
    kept = torch.full_like(scaled, float("-inf"))
    kept[order[:allowed]] = ordered[:allowed]
    edges = kept.softmax(0).cumsum(0)
    number = uniform(sampling.seed, sampling.choice, sampling.position)
    inner = edges[(edges > 0) & (edges < 1 - 1e-12)]  # 0 and 1 separate nothing
    gaps.append(float((inner - number).abs().min()) if len(inner) else 1.0)
    return min(gaps)

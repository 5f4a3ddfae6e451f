"""Tiny models of every architecture, what Hugging Face makes of a common set of cases, and our stages of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine_helpers import tokens_of
from exactness import Case, Reference
from loopback_helpers import assert_at_rest, run_to_end
from tiny_models import ARCHITECTURES, EOS_TOKEN_ID, make_tiny_model

from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.engine.runner import Runner
from fullbore.model.partition import partition_layers
from fullbore.scheduler.scheduler import SchedulerConfig

MODELS = ["LlamaForCausalLM-tied", *ARCHITECTURES]
PAGE_SIZE = 4
NUM_KV_BLOCKS = 400  # more than all cases together need

_LENGTHS = (1, 3, 7, 8, 16, 17, 33, 70)  # of prompts; few different ones, so that the reference is soon made
_SAMPLING: list[dict[str, float]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 1, "choice": 1},
    {"temperature": 1.0, "seed": 2**64 - 1},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "top_p": 0.5},
    {"temperature": 1.0, "seed": 5, "top_k": 5},
    {"temperature": 1.0, "seed": 6, "top_k": 40, "top_p": 0.8},
    {"temperature": 0.7, "seed": 7},
    {"temperature": 1.6, "seed": 8, "top_p": 0.95},
]


def _make_cases() -> list[Case]:
    chance = random.Random(5)

    def tokens(length: int) -> list[int]:
        return [chance.randrange(256) for _ in range(length)]

    greedy = [Case(tokens(length), 4 + 5 * k % 17) for k, length in enumerate(2 * _LENGTHS)]
    drawn = [Case(tokens(8), 14, **settings) for settings in _SAMPLING]  # type: ignore[arg-type]
    common = tokens(70)
    prompts = [common[:start] + tokens(length - start) for length, start in [(70, 0), (70, 60), (70, 33), (33, 16)]]
    prompts += [common[:33], common, common[:17], common[:16] + tokens(1)]
    prompts += [common[8:12] + common[4:33], common[4:8] * 8 + [1]]  # known blocks after others than before
    sharing = [Case(prompt, 10, temperature=float(k % 2), seed=k) for k, prompt in enumerate(prompts)]
    return greedy + drawn + sharing


CASES = _make_cases()
GREEDY = range(2 * len(_LENGTHS))
DRAWN = range(GREEDY.stop, GREEDY.stop + len(_SAMPLING))
SHARING = range(DRAWN.stop, len(CASES))  # prompts with common beginnings, every second one drawn at random


class TinyModels:
    """Everything is made once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reference = cache(self._make_reference)
        self.stages = cache(self._load_stages)

    def _make_reference(self, name: str) -> Reference:
        """Hugging Face's outputs for CASES."""
        architecture, _, variant = name.partition("-")
        # Two dense layers before the experts: at P > 1 they fall into different stages.
        overrides = {"first_k_dense_replace": 2} if architecture in ("DeepseekV3ForCausalLM", "kimi_k2") else {}
        folder = make_tiny_model(architecture, self._folder / name, tied=variant == "tied", seed=3, **overrides)
        return Reference(folder, CASES, EOS_TOKEN_ID)

    def _load_stages(self, name: str, pp_size: int) -> list[Runner]:
        """Stages with NUM_KV_BLOCKS blocks, to be used by one engine after another."""
        return load_stages(self.reference(name).folder, partition_layers([1.0] * 4, pp_size), NUM_KV_BLOCKS, PAGE_SIZE)

    def engine(self, name: str, pp_size: int, seed: int | None = None, **settings: int) -> LoopbackEngine:
        """Stages and launches pause at random if there is a seed."""
        config = SchedulerConfig(
            **{"num_kv_blocks": NUM_KV_BLOCKS, "pp_size": pp_size, "page_size": PAGE_SIZE, **settings}  # type: ignore[arg-type]
        )
        return LoopbackEngine(self.stages(name, pp_size), config, seed)

    def run_and_check(self, name: str, engine: LoopbackEngine, indices: Sequence[int], seed: int | None) -> None:
        """Runs the cases on the engine, which then is at rest, and compares every output.

        With a seed they arrive at random moments.
        """
        reference = self.reference(name)
        outputs = run_to_end(engine, reference.requests(indices), arrival_seed=seed)
        assert_at_rest(engine)
        for request_id, index in enumerate(indices):
            reference.check(index, tokens_of(outputs[request_id]), lambda: [stage.runner for stage in engine.stages])

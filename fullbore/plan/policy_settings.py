"""What every policy is told, in the units of the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullbore.scheduler.scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Settings; a policy ignores what it has no notion of."""

    pp: int
    depth: int | Literal["auto"]
    micro_batches: int | Literal["auto"]
    max_micro_batch: int | Literal["auto"]
    max_running: int
    chunk_tokens: int
    num_blocks: int
    page_tokens: int = 16
    has_prefix_cache: bool = False
    exchanges_first: bool = False  # results are exchanged before launching: one micro-batch fewer in flight
    dynamic_chunks: bool = False  # SGLang: later chunks of a prompt are cut smaller, so that all take as long


def config_of(settings: Scheduling) -> SchedulerConfig:
    """The same as the scheduler wants it."""
    return SchedulerConfig(
        num_kv_blocks=settings.num_blocks,
        pp_size=settings.pp,
        pp_async_batch_depth=settings.depth,
        pp_max_micro_batch_size=settings.max_micro_batch,
        num_micro_batches=settings.micro_batches,
        chunked_prefill_size=settings.chunk_tokens,
        max_running_requests=settings.max_running,
        page_size=settings.page_tokens,
        enable_prefix_cache=settings.has_prefix_cache,
    )

"""Who forms the micro-batches: fullbore's own scheduler, or a model of another engine's."""

from __future__ import annotations

from fullbore.plan.engines import Engine
from fullbore.plan.policy_settings import Scheduling, config_of
from fullbore.plan.sglang_policy import SglangScheduler
from fullbore.plan.vllm_policy import VllmScheduler
from fullbore.scheduler.scheduler import Scheduler


def make_scheduler(engine: Engine, settings: Scheduling) -> Scheduler:
    """The scheduler of an engine, as the simulator drives it."""
    if engine.policy == "sglang":
        return SglangScheduler(settings)
    if engine.policy == "vllm":
        return VllmScheduler(settings)
    return Scheduler(config_of(settings))

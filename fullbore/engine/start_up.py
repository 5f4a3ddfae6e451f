"""From settings to stages that are up: started, loaded, given their KV blocks, connected and measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from fullbore.config import EngineConfig
from fullbore.engine import sleep_model
from fullbore.engine.links import POLL_MS, Links
from fullbore.engine.measured_split import remember_head_factor
from fullbore.engine.messages import (
    AllocateKV,
    EngineInfo,
    Execute,
    Executed,
    FromStage,
    Loaded,
    Loading,
    LoadProgress,
    Ping,
    Pong,
    StageInfo,
    StageSetup,
    StopDriver,
)
from fullbore.engine.placement import Placement, choose_transport
from fullbore.engine.probe import Passage, Probe
from fullbore.engine.sizing import num_kv_blocks
from fullbore.engine.supervisor import Supervisor, cores_of_stages
from fullbore.errors import EngineDeadError
from fullbore.scheduler.cost import CostModel
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.scheduler import SchedulerConfig
from fullbore.telemetry.spans import StageRecord


class StopAskedError(Exception):
    """The client asked to stop before the engine was up."""


def start_stages(config: EngineConfig, placement: Placement, path: str, links: Links) -> Supervisor:
    """Starts one process per stage; they load in parallel."""
    is_pinned = placement.devices[0] == "cpu" and placement.architecture != "sleep"
    cores = cores_of_stages(config.pp_size, config.threads_per_stage) if is_pinned else [()] * config.pp_size
    setups = [
        StageSetup(
            config=config,
            model_path=placement.path,
            stage=stage,
            partition=placement.partition,
            device=placement.devices[stage],
            dtype=placement.dtype,
            transport=choose_transport(placement.devices),
            cpu_cores=cores[stage],
            run_dir=path,
            driver_pid=os.getpid(),
        )
        for stage in range(config.pp_size)
    ]
    return Supervisor(setups, links.context)


class StartUp:
    """Takes messages while the engine comes up, and gives up when it must."""

    def __init__(self, config: EngineConfig, links: Links, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._links = links
        self._limit_s = config.load_timeout_s
        self._end_s = time.monotonic() + config.load_timeout_s
        self._records: list[StageRecord] = []  # of the micro-batch under way
        self._returned_ns = 0

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits for the stages.

        Raises:
            StageError: a stage failed.
            EngineDeadError: starting takes longer than `load_timeout_s`.
            StopAskedError: the client does not want it any more.
        """
        while not is_done():
            self._links.wait(POLL_MS)
            for message in self._links.stage_messages():
                self._take_from_stage(message)
            self.supervisor.raise_if_dead()
            for request in self._links.client_messages():
                if isinstance(request, StopDriver):
                    raise StopAskedError
                if isinstance(request, Ping):
                    self._links.send(Pong())
            if time.monotonic() > self._end_s:
                raise EngineDeadError(f"Loading took longer than --load-timeout-s {self._limit_s:g}.")

    def run_alone(self, micro_batch: MicroBatch) -> Passage:
        """Sends a micro-batch through the empty pipeline. Raises as `wait_until` does."""
        self._records = []
        launched_ns = time.monotonic_ns()
        self.supervisor.send(Execute(micro_batch))
        self.wait_until(lambda: len(self._records) == len(self.supervisor.stages))
        return Passage(launched_ns, sorted(self._records, key=lambda record: record.stage), self._returned_ns)

    def _take_from_stage(self, message: FromStage) -> None:
        if isinstance(message, Executed):
            self._records.append(message.record)
            if message.token_ids is not None:
                self._returned_ns = time.monotonic_ns()
            return
        self.supervisor.heard(message)
        if isinstance(message, Loading):
            self._links.send(LoadProgress(message.stage, "loading", message.loaded_bytes, message.total_bytes))


def bring_up(config: EngineConfig, placement: Placement, start_up: StartUp) -> EngineInfo:
    """Waits until all stages have loaded, gives them their KV blocks, and waits until they are connected.

    Raises:
        OutOfMemoryError: the KV cache does not fit.
        StageError, EngineDeadError, StopAskedError: as StartUp does.
    """
    stages = start_up.supervisor.stages
    start_up.wait_until(lambda: all(stage.loaded is not None for stage in stages))
    loaded = [stage.loaded for stage in stages if stage.loaded is not None]
    num_blocks = num_kv_blocks(config, loaded, placement.devices, placement.context_length)
    start_up.supervisor.send(AllocateKV(num_blocks))
    start_up.wait_until(lambda: all(stage.is_ready for stage in stages))

    return _describe(config, placement, loaded, num_blocks)


def _describe(config: EngineConfig, placement: Placement, loaded: Sequence[Loaded], num_blocks: int) -> EngineInfo:
    """What came of the settings."""
    capacity_tokens = num_blocks * config.page_size
    context_length = min(placement.context_length, capacity_tokens)
    device = placement.devices[0].partition(":")[0]
    return EngineInfo(
        config=msgspec.structs.replace(
            config,
            pp_layer_partition=placement.partition,
            context_length=context_length,
            max_total_tokens=capacity_tokens,
            dtype=placement.dtype,
            device=device,
            devices=placement.devices,
        ),
        model_path=placement.path,
        model_name=placement.name,
        architecture=placement.architecture,
        dtype=placement.dtype,
        device=device,
        vocab_size=placement.vocab_size,
        context_length=context_length,
        num_kv_blocks=num_blocks,
        kv_capacity_tokens=capacity_tokens,
        in_flight_limit=scheduler_config(config, num_blocks, context_length).in_flight_limit,
        eos_token_ids=placement.eos_token_ids,
        stages=[
            StageInfo(each.stage, layers, device, each.pid, each.weight_bytes)
            for each, layers, device in zip(loaded, placement.layer_ranges, placement.devices, strict=True)
        ],
    )


def scheduler_config(config: EngineConfig, num_kv_blocks: int, context_length: int) -> SchedulerConfig:
    """What the scheduler has to know of the engine's settings."""
    return SchedulerConfig(
        num_kv_blocks=num_kv_blocks,
        pp_size=config.pp_size,
        pp_async_batch_depth=config.pp_async_batch_depth,
        pp_max_micro_batch_size=config.pp_max_micro_batch_size,
        num_micro_batches=config.num_micro_batches,
        chunked_prefill_size=config.chunked_prefill_size,
        max_running_requests=config.max_running_requests,
        page_size=config.page_size,
        context_length=context_length,
        enable_prefix_cache=not config.disable_radix_cache,
    )


def measure(costs: CostModel, info: EngineInfo, start_up: StartUp) -> None:
    """Fills the scheduler's cost model with what the stages take, before the first request comes."""
    most_requests = info.config.most_in_micro_batch
    probe = Probe(costs, start_up.run_alone, info.num_kv_blocks, info.config.page_size)
    probe.measure_decode(most_requests)
    probe.measure_context(most_requests, info.context_length)
    probe.measure_prefill(min(info.config.chunked_prefill_size, info.context_length))
    if not sleep_model.is_sleep_model(info.config.model):
        remember_head_factor(info, probe.compute_s)

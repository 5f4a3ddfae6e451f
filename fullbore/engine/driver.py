"""The driver: `python -m fullbore.engine.driver`, started by the client with a DriverSetup on standard input.

It owns the scheduler and the stage processes. One loop: take messages from the client and the stages, launch what
can be launched, hand out tokens, look after the stages.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict

import msgspec
import zmq

from fullbore.config import EngineConfig
from fullbore.engine import run_dir
from fullbore.engine.admission import make_scheduler_request
from fullbore.engine.child import ParentWatch, ignore_terminal_signals
from fullbore.engine.grammar import GrammarCompiler, GrammarConstraint, GrammarQueue, Pending
from fullbore.engine.messages import (
    AbortRequest,
    AddRequest,
    AllocateKV,
    DriverSetup,
    EngineDead,
    EngineInfo,
    EngineStats,
    Execute,
    Executed,
    FromDriver,
    FromStage,
    GetRecords,
    GetStats,
    Loading,
    LoadProgress,
    ModelFound,
    Outputs,
    Ping,
    Pong,
    RecordsReply,
    Rejected,
    Shutdown,
    StageInfo,
    StageSetup,
    StopDriver,
    ToDriver,
    encode,
    from_stage_decoder,
    to_driver_decoder,
)
from fullbore.engine.placement import Placement, place_model
from fullbore.engine.probe import Passage, Probe
from fullbore.engine.records import Records
from fullbore.engine.sizing import num_kv_blocks
from fullbore.engine.supervisor import Supervisor, cores_of_stages
from fullbore.errors import EngineDeadError, FullboreError, RequestError
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import TokenOutput
from fullbore.scheduler.scheduler import Scheduler, SchedulerConfig
from fullbore.telemetry.spans import StageRecord

_POLL_MS = 100  # the most that deadlines, the supervisor's look and a stop may be late
_DRAIN_S = 2.0  # when stopping: micro-batches in flight get this long to come out


class StageError(Exception):
    """A verdict about a stage; carries what the client is told."""

    def __init__(self, dead: EngineDead) -> None:
        super().__init__(dead.message)
        self.dead = dead


class StopAskedError(Exception):
    """The client asked to stop before the engine was up."""


class Links:
    """The driver's sockets to the client and from the stages."""

    def __init__(self, path: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from_client = self._socket(zmq.PULL)
        self._from_client.bind(run_dir.driver_address(path))
        self._to_client = self._socket(zmq.PUSH)
        self._to_client.connect(run_dir.client_address(path))
        self._from_stages = self._socket(zmq.PULL)
        self._from_stages.bind(run_dir.from_stages_address(path))
        self._poller = zmq.Poller()
        self._poller.register(self._from_client, zmq.POLLIN)
        self._poller.register(self._from_stages, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(0)  # bounded by the requests that run; a full queue would only block this loop
        return socket

    def wait_also_for(self, source: GrammarQueue) -> None:
        self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> None:
        self._poller.poll(timeout_ms)

    def client_messages(self) -> Iterator[ToDriver]:
        for data in _drain(self._from_client):
            yield to_driver_decoder.decode(data)

    def stage_messages(self) -> Iterator[FromStage]:
        for data in _drain(self._from_stages):
            yield from_stage_decoder.decode(data)

    def send(self, message: FromDriver) -> None:
        self._to_client.send(encode(message))

    def close(self) -> None:
        """Closes everything; what was sent to the client gets a second to leave."""
        self.context.destroy(linger=1000)


def _drain(socket: zmq.Socket[bytes], most: int = 256) -> Iterator[bytes]:
    """What is there now, but not without end: launches must not wait for a flood of messages to stop."""
    for _ in range(most):
        try:
            yield socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return


# ---------------------------------------------------------------------------------------------------------- start-up


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
            self._links.wait(_POLL_MS)
            for message in self._links.stage_messages():
                self._take_from_stage(message)
            _raise_if_dead(self.supervisor)
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

    capacity_tokens = num_blocks * config.page_size
    return EngineInfo(
        config=msgspec.structs.replace(
            config,
            pp_layer_partition=placement.partition,
            context_length=min(placement.context_length, capacity_tokens),
            max_total_tokens=capacity_tokens,
            dtype=placement.dtype,
            device=placement.devices[0].partition(":")[0],
        ),
        model_path=placement.path,
        model_name=placement.name,
        architecture=placement.architecture,
        dtype=placement.dtype,
        device=placement.devices[0].partition(":")[0],
        vocab_size=placement.vocab_size,
        context_length=min(placement.context_length, capacity_tokens),
        num_kv_blocks=num_blocks,
        kv_capacity_tokens=capacity_tokens,
        in_flight_limit=0,  # the scheduler's; filled in by the driver
        eos_token_ids=placement.eos_token_ids,
        stages=[
            StageInfo(
                stage,
                placement.layer_ranges[stage],
                placement.devices[stage],
                loaded[stage].pid,
                loaded[stage].weight_bytes,
            )
            for stage in range(config.pp_size)
        ],
    )


def measure(driver: Driver, start_up: StartUp) -> None:
    """Lets the driver's scheduler know what its stages cost, before the first request comes."""
    info = driver.info
    cap = info.config.pp_max_micro_batch_size
    most_requests = info.config.max_running_requests if cap == "auto" else cap
    probe = Probe(driver.scheduler.costs, start_up.run_alone, info.num_kv_blocks, info.config.page_size)
    probe.measure_decode(most_requests)
    probe.measure_context(most_requests, info.context_length)
    probe.measure_prefill(min(info.config.chunked_prefill_size, info.context_length))


def _raise_if_dead(supervisor: Supervisor) -> None:
    dead = supervisor.find_dead(time.monotonic())
    if dead is not None:
        raise StageError(dead)


# ----------------------------------------------------------------------------------------------------------- serving


class Driver:
    """Serves requests with stages that are up."""

    def __init__(self, info: EngineInfo, links: Links, supervisor: Supervisor, grammars: GrammarQueue) -> None:
        config = info.config
        self.links = links
        self.supervisor = supervisor
        self.grammars = grammars
        links.wait_also_for(grammars)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_kv_blocks=info.num_kv_blocks,
                pp_size=config.pp_size,
                pp_async_batch_depth=config.pp_async_batch_depth,
                pp_max_micro_batch_size=config.pp_max_micro_batch_size,
                num_micro_batches=config.num_micro_batches,
                chunked_prefill_size=config.chunked_prefill_size,
                max_running_requests=config.max_running_requests,
                page_size=config.page_size,
                context_length=info.context_length,
                enable_prefix_cache=not config.disable_radix_cache,
            )
        )
        self.info = msgspec.structs.replace(info, in_flight_limit=self.scheduler.in_flight_limit)
        self.records = Records(config.pp_size, self.scheduler.in_flight_limit, time.monotonic_ns())
        self._last_stage = config.pp_size - 1
        self._live: set[int] = set()  # requests whose end the client has not been told
        self._outputs: list[TokenOutput] = []
        self._in_flight: dict[int, MicroBatch] = {}
        self._progress: dict[int, int] = {}  # micro-batch in flight -> stages that are done with it
        self._progress_s = time.monotonic()  # when a micro-batch last got on
        self._stop_at_s: float | None = None  # set: admit nothing; cut what still runs at this time

    def serve(self) -> None:
        """Runs until StopDriver. Raises StageError when the pipeline breaks."""
        while not self._is_stopped():
            self.links.wait(_POLL_MS)
            for message in self.links.stage_messages():
                self._take_from_stage(message)
            for request in self.links.client_messages():
                self._take_from_client(request)
            for pending, constraint in self.grammars.finished():
                self._take_compiled(pending, constraint)
            self._expire(time.monotonic())
            self._launch()
            self._hand_out()
            self._look_after_stages()
        self._finish()

    def _take_from_stage(self, message: FromStage) -> None:
        if not isinstance(message, Executed):
            self.supervisor.heard(message)
            return
        record = message.record
        self.records.add_step(record)
        self.scheduler.observe(record)
        now_s = self._progress_s = time.monotonic()
        if record.stage < self._last_stage:
            if record.micro_batch_id in self._progress:  # a later stage's message may overtake an earlier one's
                self._progress[record.micro_batch_id] = record.stage + 1
        else:
            self._progress.pop(record.micro_batch_id, None)
            token_ids = message.token_ids or []
            self._outputs += self.scheduler.complete(record.micro_batch_id, token_ids, now_s, message.logprobs)
            self._write_down("result", self._in_flight.pop(record.micro_batch_id))

    def _write_down(self, event: str, micro_batch: MicroBatch | None = None) -> None:
        self.records.add_event(self.scheduler.record(event, time.monotonic_ns(), micro_batch))

    def _take_from_client(self, message: ToDriver) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            self._abort(message.request_id)
        elif isinstance(message, GetStats):
            self.links.send(self.stats())
        elif isinstance(message, GetRecords):
            recording = self.records.recording(time.monotonic_ns(), message.seconds, message.since_ns)
            expected_s = self.scheduler.costs.decode_points()
            self.links.send(RecordsReply(msgspec.structs.replace(recording, decode_s=expected_s)))
        elif isinstance(message, Ping):
            self.links.send(Pong())
        elif self._stop_at_s is None:
            self._stop_at_s = time.monotonic() + message.grace_s

    def _add(self, message: AddRequest) -> None:
        if self._stop_at_s is not None:
            self.links.send(Rejected(message.request_id, "The server is shutting down.", None, is_stopping=True))
            return
        constraint = None if message.grammar is None else self.grammars.cached(message.grammar)
        if message.grammar is None or constraint is not None:
            self._enter(message, constraint, time.monotonic())
        else:  # the scheduler hears of it when it can run
            self._live.add(message.request_id)
            self.grammars.add(message, message.grammar, time.monotonic())

    def _take_compiled(self, pending: Pending, constraint: GrammarConstraint | RequestError) -> None:
        if isinstance(constraint, RequestError):
            self._reject(pending.message.request_id, constraint)
        else:
            self._enter(pending.message, constraint, pending.arrival_s)

    def _enter(self, message: AddRequest, constraint: GrammarConstraint | None, arrival_s: float) -> None:
        info = self.info
        try:
            self.scheduler.add(
                make_scheduler_request(message, info.vocab_size, info.eos_token_ids, arrival_s, constraint)
            )
        except RequestError as error:
            self._reject(message.request_id, error)
        else:
            self._live.add(message.request_id)
            self._write_down("arrival")

    def _reject(self, request_id: int, error: RequestError) -> None:
        self._live.discard(request_id)
        self.links.send(Rejected(request_id, str(error), error.param))

    def _abort(self, request_id: int) -> None:
        if self.grammars.remove(request_id):
            self._outputs.append(TokenOutput(request_id, None, "abort"))
            return
        output = self.scheduler.abort(request_id)
        if output is not None:
            self._cut([output])

    def _expire(self, now_s: float) -> None:
        self._outputs += [TokenOutput(request_id, None, "timeout") for request_id in self.grammars.expire(now_s)]
        self._cut(self.scheduler.expire(now_s))

    def _cut(self, ends: list[TokenOutput]) -> None:
        """Takes note of requests that ended before their time."""
        self._outputs += ends
        for _ in ends:
            self._write_down("end")

    def _launch(self) -> None:
        while (micro_batch := self.scheduler.next_micro_batch(time.monotonic())) is not None:
            self.supervisor.send_plan(micro_batch)
            if not self._progress:
                self._progress_s = time.monotonic()
            self._progress[micro_batch.id] = 0
            self._in_flight[micro_batch.id] = micro_batch
            self._write_down("launch", micro_batch)

    def _hand_out(self) -> None:
        if not self._outputs:
            return
        self._live.difference_update(output.request_id for output in self._outputs if output.finish_reason is not None)
        self.links.send(Outputs(self._outputs))
        self._outputs = []

    def _look_after_stages(self) -> None:
        _raise_if_dead(self.supervisor)
        limit_s = self.supervisor.step_timeout_s + self.supervisor.stage_timeout_s
        stalled_s = time.monotonic() - self._progress_s
        if self._progress and stalled_s > limit_s:
            oldest = min(self._progress)
            message = f"did not return micro-batch {oldest} within {stalled_s:.0f} s."
            raise StageError(self.supervisor.blame(self._progress[oldest], message))

    def _is_stopped(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._live or time.monotonic() >= self._stop_at_s

    def _finish(self) -> None:
        """Cuts what still runs, lets the pipeline run dry, and ends the stages."""
        for request_id in sorted(self._live):
            self._abort(request_id)
        self._hand_out()
        end_s = time.monotonic() + _DRAIN_S
        while self._progress and time.monotonic() < end_s:
            self.links.wait(_POLL_MS)
            for message in self.links.stage_messages():
                self._take_from_stage(message)
            _raise_if_dead(self.supervisor)
        self.supervisor.send(Shutdown())
        self.supervisor.wait_for_exits()

    def stats(self) -> EngineStats:
        state = asdict(self.scheduler.state())
        state["waiting"] += len(self.grammars)
        return EngineStats(
            **state,
            max_in_flight=max(self.records.in_flight_at_launch, default=0),
            in_flight_at_launch=dict(self.records.in_flight_at_launch),
            requests_in_micro_batch=dict(self.records.requests_in_micro_batch),
            stage_busy_s=self.records.stage_busy_s,
            steps_in_bucket=self.records.steps_in_bucket,
        )


# -------------------------------------------------------------------------------------------------------------- main


def run(setup: DriverSetup, links: Links) -> None:
    """From nothing to stopped. Whatever happens, no stage is left."""

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        links.send(LoadProgress(-1, what, done_bytes, total_bytes))

    placement = place_model(setup.config, report)
    links.send(ModelFound(placement.path))
    supervisor = start_stages(setup.config, placement, setup.run_dir, links)
    try:
        start_up = StartUp(setup.config, links, supervisor)
        grammars = GrammarQueue(GrammarCompiler(placement.path, placement.vocab_size, placement.eos_token_ids))
        driver = Driver(bring_up(setup.config, placement, start_up), links, supervisor, grammars)
        start_up.wait_until(lambda: grammars.is_loaded)
        supervisor.is_serving = True
        report("measuring the stages", 0, 0)
        measure(driver, start_up)
        gc.collect()
        gc.freeze()
        links.send(driver.info)
        driver.serve()
    finally:
        supervisor.kill()


def main() -> None:
    """Exit code 0 after a stop, otherwise the error's; the client is told why."""
    ignore_terminal_signals()
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=DriverSetup)

    def clean_up() -> None:
        run_dir.remove(setup.run_dir)
        os._exit(1)  # and the system ends the stages with their parent

    ParentWatch(setup.client_pid, clean_up).start()
    links = Links(setup.run_dir)
    dead: EngineDead | None = None
    try:
        run(setup, links)
    except StopAskedError:
        pass
    except StageError as error:
        dead = error.dead
    except FullboreError as error:
        dead = EngineDead(str(error), None, "", type(error).__name__, error.exit_code)
    except Exception as error:
        message = f"The engine's driver failed: {type(error).__name__}: {error}"
        dead = EngineDead(message, None, traceback.format_exc())
    if dead is not None:
        links.send(dead)
    links.close()
    sys.exit(0 if dead is None else dead.exit_code)


if __name__ == "__main__":
    main()

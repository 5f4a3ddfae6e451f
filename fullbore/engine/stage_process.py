"""One stage: `python -m fullbore.engine.stage_process`, started by the driver with a StageSetup on standard input.

It obeys: plans come from the driver and are executed in their order. Nothing is decided here.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from fullbore.engine import run_dir, sleep_model
from fullbore.engine.child import ParentWatch, allow_tracing_by, die_with_parent, ignore_terminal_signals
from fullbore.engine.messages import (
    AllocateKV,
    Execute,
    Executed,
    FromStage,
    Heartbeat,
    Loaded,
    Loading,
    Shutdown,
    StageFailed,
    StageReady,
    StageSetup,
    ToStage,
    encode,
    to_stage_decoder,
)
from fullbore.engine.turns import short_turns
from fullbore.errors import EngineDeadError, FullboreError
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.telemetry.spans import StageRecord

if TYPE_CHECKING:  # torch is imported late, when heartbeats already beat
    from fullbore.engine.nccl_transport import NcclTransport
    from fullbore.engine.runner import Runner
    from fullbore.engine.transport import Received, Transport

HEARTBEAT_PERIOD_S = 0.5
_PROGRESS_PERIOD_S = 0.1


class DriverLink:
    """Messages from and to the driver. Each thread that sends has a socket of its own."""

    def __init__(self, setup: StageSetup) -> None:
        self._context = zmq.Context()
        self._run_dir = setup.run_dir
        self._from_driver = self._context.socket(zmq.PULL)
        self._from_driver.set_hwm(0)
        self._from_driver.bind(run_dir.stage_address(setup.run_dir, setup.stage))
        self._to_driver = self.new_sender()

    def new_sender(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.linger = 1000  # ms: a StageFailed must still arrive
        socket.connect(run_dir.from_stages_address(self._run_dir))
        return socket

    def send(self, message: FromStage) -> None:
        self._to_driver.send(encode(message))

    def receive(self, *, block: bool) -> ToStage | None:
        """The driver's next message; None if there is none yet and `block` is False."""
        try:
            return to_stage_decoder.decode(self._from_driver.recv(0 if block else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self._context.destroy(linger=1000)


class Step(NamedTuple):
    """A plan that waits for its turn; its receive is posted already."""

    micro_batch: MicroBatch
    num_tokens: int
    received: Received | None  # None on the first stage
    plan_received_ns: int
    receive_posted_ns: int


class Stage:
    """The compute loop of one stage."""

    def __init__(self, setup: StageSetup, link: DriverLink) -> None:
        self.setup = setup
        self.link = link
        self.stage = setup.stage
        self.is_first = setup.stage == 0
        self.is_last = setup.stage == len(setup.partition) - 1
        self.step_since_ns = 0  # read by the heartbeat thread
        self.runner: Runner
        self.transport: Transport | None = None  # None: the only stage
        self._steps: deque[Step] = deque()
        self._is_stopping = False
        self._last_progress_s = 0.0

    def load(self) -> None:
        """Reads the weights, allocates the KV blocks that the driver asks for, meets the neighbours."""
        import torch

        from fullbore.engine.runner import load_runner

        torch.set_num_threads(self.setup.config.threads_per_stage)
        if self.setup.device != "cpu":
            torch.cuda.set_device(self.setup.device)
        self.runner = load_runner(self.setup, self._report_progress)
        runner = self.runner
        self.link.send(
            Loaded(self.stage, os.getpid(), runner.weight_bytes, runner.kv_block_bytes, runner.free_memory_bytes())
        )
        message = self.link.receive(block=True)
        if not isinstance(message, AllocateKV):
            self._is_stopping = True  # Shutdown while others still load
            return
        runner.allocate_kv(message.num_blocks)
        if len(self.setup.partition) > 1:
            with short_turns():
                self.transport = self._connect()
        gc.collect()
        gc.freeze()  # what is loaded now lives to the end; do not look through it again and again
        self.link.send(StageReady(self.stage))

    def run(self) -> None:
        """Executes plans until Shutdown."""
        while True:
            if not self._is_stopping:
                self._take_plans(block=not self._steps)
            if not self._steps:
                break
            self._execute(self._steps.popleft())
        if self.transport is not None:
            self.transport.close()

    def _connect(self) -> Transport:
        import torch

        from fullbore.engine.slow_link import SlowLink
        from fullbore.engine.transport import TorchTransport

        config = self.setup.config
        device = torch.device(self.setup.device)
        ends: dict[str, Any] = {
            "stage": self.stage,
            "num_stages": len(self.setup.partition),
            "hidden_size": self.runner.hidden_size,
            "dtype": self.runner.dtype,
            "device": device,
            "max_tokens": config.chunked_prefill_size + config.max_running_requests,
        }
        transport: TorchTransport | NcclTransport
        if self.setup.transport == "nccl":
            from fullbore.engine.nccl_transport import CudaStreams, NcclTransport

            transport = NcclTransport(**ends, streams=CudaStreams(device))
        else:
            transport = TorchTransport(**ends)
        transport.connect(run_dir.rendezvous_file(self.setup.run_dir))
        hop_s = sleep_model.hop_s(self.setup.model_path)
        return SlowLink(transport, hop_s) if hop_s else transport

    def _report_progress(self, loaded_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if loaded_bytes == total_bytes or now_s - self._last_progress_s >= _PROGRESS_PERIOD_S:
            self._last_progress_s = now_s
            self.link.send(Loading(self.stage, loaded_bytes, total_bytes))

    def _take_plans(self, *, block: bool) -> None:
        """Takes in every plan that is here and posts its receive. Waits for one if `block`."""
        while (message := self.link.receive(block=block)) is not None:
            if isinstance(message, Execute):
                self._steps.append(self._prepare(message.micro_batch))
                block = False
            elif isinstance(message, Shutdown):
                self._is_stopping = True
                return

    def _prepare(self, micro_batch: MicroBatch) -> Step:
        plan_received_ns = time.monotonic_ns()
        num_tokens = micro_batch.num_tokens
        if self.is_first or self.transport is None:
            return Step(micro_batch, num_tokens, None, plan_received_ns, plan_received_ns)
        received = self.transport.post_receive(micro_batch.id, num_tokens)
        return Step(micro_batch, num_tokens, received, plan_received_ns, time.monotonic_ns())

    def _execute(self, step: Step) -> None:
        micro_batch = step.micro_batch
        hidden = None
        receive_end_ns = step.receive_posted_ns
        if step.received is not None:
            self.runner.prepare(micro_batch)
            hidden = step.received.wait()
            receive_end_ns = time.monotonic_ns()

        self.step_since_ns = compute_start_ns = time.monotonic_ns()
        output = self.runner.forward(micro_batch, hidden)
        self._synchronize()
        compute_end_ns = sample_end_ns = time.monotonic_ns()
        token_ids = logprobs = None
        if self.is_last:
            token_ids = self.runner.sample(micro_batch, output)
            logprobs = self.runner.logprobs(micro_batch, output, token_ids)
            sample_end_ns = time.monotonic_ns()
        self.step_since_ns = 0

        send_start_ns = send_end_ns = sample_end_ns
        if not self.is_last and self.transport is not None:
            self.transport.send(micro_batch.id, output)
            send_end_ns = time.monotonic_ns()  # handed over; the transport sees to the rest
        if step.received is not None:
            step.received.release()
        record = StageRecord(
            stage=self.stage,
            micro_batch_id=micro_batch.id,
            plan_received_ns=step.plan_received_ns,
            receive_posted_ns=step.receive_posted_ns,
            receive_end_ns=receive_end_ns,
            compute_start_ns=compute_start_ns,
            compute_end_ns=compute_end_ns,
            sample_end_ns=sample_end_ns,
            send_start_ns=send_start_ns,
            send_end_ns=send_end_ns,
        )
        self.link.send(Executed(record, token_ids, logprobs, self.runner.used_graph))

    def _synchronize(self) -> None:
        """On a GPU, waits until the work is done and not only queued, so that recorded times are true."""
        if self.setup.device != "cpu":
            import torch

            torch.cuda.current_stream(torch.device(self.setup.device)).synchronize()


def main() -> None:
    """Runs one stage to its end. Exit code 0 after Shutdown, 1 after a failure, which the driver is told."""
    ignore_terminal_signals()
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=StageSetup)
    die_with_parent(setup.driver_pid)
    allow_tracing_by(setup.driver_pid)
    if setup.cpu_cores:
        os.sched_setaffinity(0, setup.cpu_cores)
    with short_turns():  # for threads that hand on messages; those that compute take usual ones, unlike the driver
        link = DriverLink(setup)
        stage = Stage(setup, link)
        _start_heartbeat(stage)
    exit_code = 0
    try:
        stage.load()
        stage.run()
    except Exception as error:
        link.send(_describe(error, setup.stage))
        exit_code = 1
    link.close()
    # A normal exit would run destructors that may wait for neighbours which are no longer there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _start_heartbeat(stage: Stage) -> None:
    setup = stage.setup
    sender = stage.link.new_sender()

    def beat() -> None:
        with suppress(zmq.ZMQError):  # the sockets are closed already, the process is about to end
            sender.send(encode(Heartbeat(setup.stage, stage.step_since_ns)))

    def clean_up() -> None:
        run_dir.remove(setup.run_dir)
        os._exit(1)

    ParentWatch(setup.driver_pid, clean_up, beat, HEARTBEAT_PERIOD_S).start()


def _describe(error: Exception, stage: int) -> StageFailed:
    from fullbore.engine.transport import PeerLostError

    stack = traceback.format_exc()
    if isinstance(error, FullboreError):
        return StageFailed(stage, str(error), stack, type(error).__name__, isinstance(error, PeerLostError))
    if _is_out_of_memory(error):
        message = (
            f"Stage {stage} ran out of memory ({error}). Use --max-total-tokens or --mem-fraction-static for a smaller "
            "KV cache, a smaller --chunked-prefill-size, or more stages."
        )
        return StageFailed(stage, message, stack, "OutOfMemoryError")
    return StageFailed(stage, f"Stage {stage} failed: {type(error).__name__}: {error}", stack, EngineDeadError.__name__)


def _is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


if __name__ == "__main__":
    main()

"""The stage processes: started, watched and ended for the driver, which asks here who is to blame when one breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from fullbore.engine import run_dir
from fullbore.engine.child import describe_exit, is_stopped, spawn
from fullbore.engine.messages import (
    EngineDead,
    FromStage,
    Heartbeat,
    Loaded,
    StageFailed,
    StageReady,
    StageSetup,
    ToStage,
    encode,
    encode_plan,
)
from fullbore.scheduler.micro_batch import MicroBatch

CHECK_PERIOD_S = 0.1
SETTLE_S = 0.5  # after a symptom that may be the consequence of another one, wait this long for its cause
_STOPPED_S = 1.5  # silent for this long and stopped (SIGSTOP): no need to wait for the whole timeout
_PAUSE_S = 1.0  # if the driver itself did not run for this long, silence proves nothing
_STACK_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 2.0


@dataclass(eq=False)
class StageProcess:
    """One stage as the driver sees it."""

    stage: int
    process: subprocess.Popen[bytes]
    socket: zmq.Socket[bytes]
    last_heard_s: float
    loaded: Loaded | None = None
    is_ready: bool = False
    step_s: float = 0.0  # how long its current step had been computing at the last heartbeat
    failed: StageFailed | None = None

    def __str__(self) -> str:
        return f"Stage {self.stage} (pid {self.process.pid})"


@dataclass(frozen=True)
class Symptom:
    """What is wrong with a stage. The lowest rank is the likeliest cause of all the others."""

    rank: int
    message: str
    stack: str = ""
    error: str = "EngineDeadError"
    wants_stack: bool = False

    @property
    def is_cause(self) -> bool:
        """It cannot be a mere consequence of another stage's end."""
        return self.rank <= 2


class StageError(Exception):
    """A verdict about a stage; carries what the client is told."""

    def __init__(self, dead: EngineDead) -> None:
        super().__init__(dead.message)
        self.dead = dead


class Supervisor:
    """All stage processes of one engine."""

    def __init__(self, setups: Sequence[StageSetup], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.stage_timeout_s = setups[0].config.stage_timeout_s
        self.step_timeout_s = setups[0].config.step_timeout_s
        self.is_serving = False  # while loading, a stage may be silent for long (imports, page cache)
        self.stages = [self._start(setup, context) for setup in setups]
        self._last_check_s = time.monotonic()
        self._first_symptom_s: float | None = None

    def _start(self, setup: StageSetup, context: zmq.Context[zmq.Socket[bytes]]) -> StageProcess:
        socket = context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(run_dir.stage_address(setup.run_dir, setup.stage))
        process = spawn("fullbore.engine.stage_process", setup, stage_environment(setup.config.threads_per_stage))
        return StageProcess(setup.stage, process, socket, time.monotonic())

    def send(self, message: ToStage) -> None:
        """Sends to every stage; encoded once."""
        data = encode(message)
        for stage in self.stages:
            stage.socket.send(data)

    def send_plan(self, micro_batch: MicroBatch) -> None:
        """Sends every stage what it needs of a plan."""
        for_earlier, for_last = encode_plan(micro_batch)
        for stage in self.stages[:-1]:
            stage.socket.send(for_earlier)
        self.stages[-1].socket.send(for_last)

    def heard(self, message: FromStage) -> None:
        """Takes note of what a stage says about itself."""
        if isinstance(message, Heartbeat):
            stage = self.stages[message.stage]
            stage.last_heard_s = time.monotonic()
            is_computing = message.step_since_ns > 0
            stage.step_s = (time.monotonic_ns() - message.step_since_ns) * 1e-9 if is_computing else 0.0
        elif isinstance(message, Loaded):
            self.stages[message.stage].loaded = message
        elif isinstance(message, StageReady):
            self.stages[message.stage].is_ready = True
        elif isinstance(message, StageFailed):
            self.stages[message.stage].failed = message

    def find_dead(self, now_s: float) -> EngineDead | None:
        """The verdict, once there is one; call it often (it looks at most every CHECK_PERIOD_S).

        When one stage dies its neighbours fail, too, because their connections break. So a stage that was killed,
        failed by itself, or is stopped or stuck wins over one that only lost a neighbour.
        """
        elapsed_s = now_s - self._last_check_s
        if elapsed_s < CHECK_PERIOD_S:
            return None
        self._last_check_s = now_s
        if elapsed_s > _PAUSE_S:
            for stage in self.stages:
                stage.last_heard_s = min(stage.last_heard_s + elapsed_s, now_s)
        found = [(symptom, stage) for stage in self.stages if (symptom := self._examine(stage, now_s)) is not None]
        if not found:
            return None
        symptom, stage = min(found, key=lambda pair: pair[0].rank)
        if self._first_symptom_s is None:
            self._first_symptom_s = now_s
        if not symptom.is_cause and now_s - self._first_symptom_s < SETTLE_S:
            return None
        stack = python_stack(stage.process.pid) if symptom.wants_stack else symptom.stack
        return EngineDead(symptom.message, stage.stage, stack, symptom.error)

    def raise_if_dead(self) -> None:
        """Raises StageError once there is a verdict."""
        dead = self.find_dead(time.monotonic())
        if dead is not None:
            raise StageError(dead)

    def blame(self, stage: int, message: str) -> StageError:
        """A verdict that the driver reached by itself, to be raised."""
        process = self.stages[stage]
        return StageError(EngineDead(f"{process} {message}", stage, python_stack(process.process.pid)))

    def _examine(self, stage: StageProcess, now_s: float) -> Symptom | None:
        return_code = stage.process.poll()
        if return_code is not None:
            return self._examine_exit(stage, return_code)
        if stage.failed is not None:
            return _failure(stage.failed)
        silence_s = now_s - stage.last_heard_s
        if silence_s > _STOPPED_S and is_stopped(stage.process.pid):
            return Symptom(2, f"{stage} is stopped (SIGSTOP) and does not answer.", wants_stack=True)
        if not self.is_serving:
            return None
        if silence_s > self.stage_timeout_s:
            return Symptom(2, f"{stage} has not answered for {silence_s:.1f} s.", wants_stack=True)
        if stage.step_s > self.step_timeout_s:
            message = f"{stage} has been computing one micro-batch for {stage.step_s:.0f} s (--step-timeout-s)."
            return Symptom(2, message, wants_stack=True)
        return None

    def _examine_exit(self, stage: StageProcess, return_code: int) -> Symptom:
        if stage.failed is not None:
            return _failure(stage.failed)
        message = f"{stage} {describe_exit(return_code)}."
        # A broken connection can make a neighbour abort; nothing but a kill or a crash of its own gives other signals.
        if return_code < 0 and return_code != -signal.SIGABRT:
            return Symptom(0, message)
        return Symptom(3, message)

    def wait_for_exits(self, timeout_s: float = _EXIT_TIMEOUT_S) -> None:
        """Lets the stages end, and reaps them."""
        end_s = time.monotonic() + timeout_s
        for stage in self.stages:
            with suppress(subprocess.TimeoutExpired):
                stage.process.wait(max(end_s - time.monotonic(), 0.0))

    def kill(self) -> None:
        """Ends whatever is left; works for stopped and stuck processes, too."""
        for stage in self.stages:
            if stage.process.poll() is None:
                stage.process.kill()
        self.wait_for_exits()


def _failure(failed: StageFailed) -> Symptom:
    return Symptom(4 if failed.is_peer_lost else 1, failed.message, failed.stack, failed.error)


def python_stack(pid: int) -> str:
    """The Python stack of all its threads by py-spy, or "" where that is not installed or not permitted."""
    beside_python = Path(sys.executable).parent / "py-spy"
    py_spy = str(beside_python) if beside_python.exists() else "py-spy"
    with suppress(OSError, subprocess.SubprocessError):
        # Non-blocking: it must work on a stopped process, and never pause one.
        command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_TIMEOUT_S, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""


def stage_environment(threads_per_stage: int) -> dict[str, str]:
    """The environment of a stage process."""
    threads = {name: str(threads_per_stage) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # stages of one host; nothing listens on the network
    # torch's own threads, which sample, must not spin for milliseconds on the cores that the next step needs.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def cores_of_stages(num_stages: int, threads_per_stage: int) -> list[tuple[int, ...]]:
    """CPU cores for each stage to be pinned to: cores of its own where there are enough, else shared in turn."""
    cores = _usable_cores()
    return [
        tuple(sorted({cores[(stage * threads_per_stage + thread) % len(cores)] for thread in range(threads_per_stage)}))
        for stage in range(num_stages)
    ]


def _usable_cores() -> list[int]:
    """The cores that this process may use, those first that share nothing with an earlier one (hyper-threads last)."""
    cores = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for core in cores:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        (second if siblings in seen else first).append(core)
        seen.add(siblings)
    return first + second

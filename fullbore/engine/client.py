"""The engine as its user sees it: starts the driver, sends requests, receives tokens. For one thread."""

from __future__ import annotations

import os
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TypeVar

import zmq

from fullbore import errors
from fullbore.config import EngineConfig
from fullbore.engine import run_dir
from fullbore.engine.child import describe_exit, is_stopped, spawn
from fullbore.engine.messages import (
    AbortRequest,
    AddRequest,
    DriverSetup,
    EngineDead,
    EngineInfo,
    EngineStats,
    FromDriver,
    GetRecords,
    GetStats,
    LoadProgress,
    ModelFound,
    Outputs,
    Ping,
    RecordsReply,
    Rejected,
    StopDriver,
    ToDriver,
    encode,
    from_driver_decoder,
)
from fullbore.errors import EngineDeadError, FullboreError
from fullbore.model.cache import remove_abandoned
from fullbore.telemetry.accounting import Recording

CHECK_PERIOD_S = 0.5
_STOPPED_S = 1.5  # a driver that does not answer for this long and is stopped (SIGSTOP) is given up
_PAUSE_S = 1.0  # if this process itself did not run for this long, silence proves nothing
EXIT_TIMEOUT_S = 8.0  # beyond the grace period: draining and ending the stages
_REPLY_TIMEOUT_S = 5.0
_GIVE_UP_TIMEOUT_S = 2.0

OnProgress = Callable[[LoadProgress], None]
OnModel = Callable[[str], None]
Reply = TypeVar("Reply", EngineStats, RecordsReply)


class EngineClient:
    """A running engine. Use it as a context manager, or call `stop`; at the end of the program it is stopped anyway."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, has_waiting_clients: bool = False) -> None:
        """Starts the driver without waiting for it; use `start`."""
        self.config = config
        self.dead: EngineDead | None = None
        self.has_ended = False  # dead, or stopped as it was asked to
        self._is_started = False
        self._is_stopping = False
        self._has_exited = False
        self._request_ids = count()
        self._received: deque[Outputs | Rejected] = deque()
        self._reply: EngineStats | RecordsReply | None = None
        self._ping_sent_s: float | None = None
        self._last_check_s = time.monotonic()

        self._run_dir = run_dir.RunDir.create()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_driver = self._context.socket(zmq.PUSH)
        self._to_driver.set_hwm(0)
        self._to_driver.connect(run_dir.driver_address(self._run_dir.path))
        self.from_driver = self._context.socket(zmq.PULL)
        self.from_driver.set_hwm(0)
        self.from_driver.bind(run_dir.client_address(self._run_dir.path))
        setup = DriverSetup(config, str(self._run_dir.path), os.getpid(), has_waiting_clients)
        # transformers makes torch create this folder; in here it goes away with everything else.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self._run_dir.path / "inductor"), **os.environ}
        self._process = spawn("fullbore.engine.driver", setup, environment)
        self.close = weakref.finalize(self, _tear_down, os.getpid(), self._process, self._context, self._run_dir)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        cancelled: Event | None = None,
        on_model: OnModel | None = None,
        has_waiting_clients: bool = False,
    ) -> EngineClient:
        """Starts driver and stages and waits until requests may come.

        Args:
            on_progress: called with every step of loading (stage -1: fetching the model).
            cancelled: set it from another thread to give up.
            on_model: called with the folder of the model's tokenizer before weights are loaded; what it raises ends the
                start.
            has_waiting_clients: this process serves others; the driver ends it if it is stopped (SIGSTOP) for longer
                than `stage_timeout_s` while everything else runs.

        Raises:
            FullboreError: the subclass that fits, with one sentence; nothing is left running.
        """
        config.validate()
        client = cls(config, has_waiting_clients)
        try:
            client._wait_until_started(on_progress, cancelled, on_model)
        except BaseException:
            client._give_up_start()
            raise
        return client

    def _give_up_start(self) -> None:
        """Lets the driver end a download or a conversion, but not for long; what is left of one is removed then."""
        try:
            self.begin_stop(0.0)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GIVE_UP_TIMEOUT_S)
        finally:
            self.close()
            remove_abandoned()

    def _wait_until_started(
        self, on_progress: OnProgress | None, cancelled: Event | None, on_model: OnModel | None
    ) -> None:
        # Without any news for this long the driver, which watches the same limit, must be at fault itself.
        limit_s = self.config.load_timeout_s + 5
        end_s = time.monotonic() + limit_s
        while not self._is_started:
            self.from_driver.poll(int(CHECK_PERIOD_S * 1e3))
            messages = self.drain()
            for message in messages:
                if isinstance(message, LoadProgress):
                    end_s = time.monotonic() + limit_s
                    if on_progress is not None:
                        on_progress(message)
                elif isinstance(message, ModelFound) and on_model is not None:
                    on_model(message.tokenizer_path)
            if not messages:
                self.check_driver()
            if self.dead is not None:
                raise _start_error(self.dead)
            if time.monotonic() > end_s:
                raise EngineDeadError(f"Loading took longer than --load-timeout-s {self.config.load_timeout_s:g}.")
            if cancelled is not None and cancelled.is_set():
                raise EngineDeadError("The start was cancelled.")

    # -------------------------------------------------------------------------------------------------- requests

    @property
    def driver_pid(self) -> int:
        return self._process.pid

    @property
    def run_dir(self) -> Path:
        """The private folder with the engine's sockets."""
        return self._run_dir.path

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def add(self, request: AddRequest) -> None:
        """Queues a request; its tokens, or a Rejected, come by `receive`."""
        self.send(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; unknown and ended ones are ignored. Its end comes by `receive`."""
        self.send(AbortRequest(request_id))

    def receive(self, timeout_s: float) -> list[Outputs | Rejected]:
        """What has come, waiting at most `timeout_s` for the first message; may be empty.

        Raises:
            EngineDeadError: the pipeline is gone.
        """
        end_s = time.monotonic() + timeout_s
        while not self._received and self._wait(end_s):
            pass
        received = list(self._received)
        self._received.clear()
        return received

    def stats(self) -> EngineStats:
        """Counters and gauges now. Raises EngineDeadError."""
        return self._ask(GetStats(), EngineStats)

    def records(self, seconds: float, since_ns: int | None = None) -> Recording:
        """What driver and stages recorded in the last `seconds`, or since `since_ns`. Raises EngineDeadError."""
        return self._ask(GetRecords(seconds, since_ns), RecordsReply).recording

    def _ask(self, question: GetStats | GetRecords, kind: type[Reply]) -> Reply:
        self._reply = None
        self.send(question)
        end_s = time.monotonic() + _REPLY_TIMEOUT_S
        while not isinstance(self._reply, kind):
            if not self._wait(end_s):
                raise EngineDeadError(f"The engine's driver did not answer for {_REPLY_TIMEOUT_S:g} s.")
        return self._reply

    def stop(self, grace_s: float = 0.0) -> None:
        """Admits no more requests, lets running ones finish for `grace_s`, then ends everything. Twice is fine."""
        if self.close.alive:
            self.begin_stop(grace_s)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s + EXIT_TIMEOUT_S)
            self.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ----------------------------------------------------------- the parts that the asynchronous client uses as well

    def send(self, message: ToDriver) -> None:
        """Never blocks. Raises EngineDeadError if the engine is dead or stopped."""
        self._raise_if_dead()
        if not self.close.alive:
            raise EngineDeadError("The engine was stopped.")
        self._to_driver.send(encode(message), zmq.NOBLOCK)

    def begin_stop(self, grace_s: float) -> None:
        """Asks the driver to stop; from now on its exit is no failure."""
        self._is_stopping = True
        with suppress(FullboreError):
            self.send(StopDriver(grace_s))

    def drain(self) -> list[FromDriver]:
        """Every message that is here, without waiting. Notes the ones about the engine itself."""
        messages: list[FromDriver] = []
        with suppress(zmq.Again):
            while True:
                messages.append(from_driver_decoder.decode(self.from_driver.recv(zmq.NOBLOCK)))
        for message in messages:
            if isinstance(message, EngineInfo):
                self.info = message
                self._is_started = True
            elif isinstance(message, EngineDead):
                self._note_death(message)
        if messages:
            self._ping_sent_s = None
        return messages

    def check_driver(self) -> None:
        """Finds out whether the driver is gone, stopped or stuck; to be called after CHECK_PERIOD_S of silence."""
        if self.has_ended:
            return
        now_s = time.monotonic()
        elapsed_s, self._last_check_s = now_s - self._last_check_s, now_s
        return_code = self._process.poll()
        if return_code is not None:
            self._note_exit(return_code)
        elif self._ping_sent_s is None or elapsed_s > _PAUSE_S + CHECK_PERIOD_S:
            self.send(Ping())
            self._ping_sent_s = now_s
        else:
            self._judge_silence(now_s - self._ping_sent_s)

    def _note_exit(self, return_code: int) -> None:
        """At the second silence after the exit: what the driver said last has been received then."""
        if not self._has_exited:
            self._has_exited = True
        elif self._is_stopping:
            self.has_ended = True
        else:
            self._declare_dead(f"The engine's driver process (pid {self._process.pid}) {describe_exit(return_code)}.")

    def _judge_silence(self, silence_s: float) -> None:
        pid = self._process.pid
        if silence_s > _STOPPED_S and is_stopped(pid):
            self._declare_dead(f"The engine's driver process (pid {pid}) is stopped (SIGSTOP) and does not answer.")
        elif self._is_started and silence_s > self.config.stage_timeout_s:
            self._declare_dead(f"The engine's driver process (pid {pid}) has not answered for {silence_s:.1f} s.")

    def _note_death(self, dead: EngineDead) -> None:
        self.dead = dead
        self.has_ended = True

    def _declare_dead(self, message: str) -> None:
        self._note_death(EngineDead(message, None, ""))
        if self._process.poll() is None:
            self._process.kill()  # and the system ends the stages with it

    # ------------------------------------------------------------------------------------------------------- inside

    def _wait(self, end_s: float) -> bool:
        """Waits for messages until `end_s` and sorts them in; False if none came. Raises EngineDeadError."""
        while True:
            self._raise_if_dead()
            remaining_s = end_s - time.monotonic()
            self.from_driver.poll(int(max(min(remaining_s, CHECK_PERIOD_S), 0) * 1e3))
            messages = self.drain()
            for message in messages:
                if isinstance(message, Outputs | Rejected):
                    self._received.append(message)
                elif isinstance(message, EngineStats | RecordsReply):
                    self._reply = message
            if messages:
                return True
            if remaining_s <= 0:
                return False
            self.check_driver()

    def _raise_if_dead(self) -> None:
        if self.dead is not None:
            self.close()
            raise EngineDeadError(self.dead.message)


def _start_error(dead: EngineDead) -> FullboreError:
    """Why the engine did not start, as the exception that fits."""
    kind = getattr(errors, dead.error, EngineDeadError)
    error: FullboreError = kind(dead.message)
    return error


def _tear_down(
    owner_pid: int,
    process: subprocess.Popen[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    directory: run_dir.RunDir,
) -> None:
    """Ends what is left. Runs once: by `close`, when the client is collected, or at the end of the program."""
    if os.getpid() != owner_pid:
        return  # a fork of the user's program must not end its parent's engine
    if process.poll() is None:
        process.kill()  # and the system ends the stages with it
        process.wait()
    context.destroy(linger=0)
    directory.remove()

"""Child processes whose lives are tied to their parent's: the driver (child of the client) and the stages (of the
driver)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PAUSE_S = 1.5  # if this process itself did not run for this long, a parent that is stopped proves nothing


def spawn(module: str, setup: msgspec.Struct, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python -m module` and hands it `setup` as JSON on its standard input: nothing is visible in its command
    line, and a user's script needs no `if __name__ == "__main__"`.

    What it prints goes to standard error, so that a command's own output stays clean.
    """
    # -P: a torch.py or json.py in the current folder must not be taken for the real one.
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=dict(env))
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(setup))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died already; whoever watches it will say so
    return process


def ignore_terminal_signals() -> None:
    """A Ctrl-C or a closed terminal reaches every process of the group; only the client acts on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent ends, even if it is stopped or stuck. For children of a parent's
    main thread only: the kernel counts the end of the thread that started the child."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(1)


def allow_tracing_by(pid: int) -> None:
    """Lets `pid` and its children read this process's stack where the system restricts that to ancestors."""
    _prctl(_PR_SET_PTRACER, pid)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


class ParentWatch(threading.Thread):
    """Calls `on_orphaned` when the parent is gone, and `on_tick` every `period_s` until then."""

    def __init__(
        self,
        parent_pid: int,
        on_orphaned: Callable[[], None],
        on_tick: Callable[[], None] | None = None,
        period_s: float = 0.5,
    ) -> None:
        super().__init__(name="parent-watch", daemon=True)
        self._parent_pid = parent_pid
        self._on_orphaned = on_orphaned
        self._on_tick = on_tick
        self._period_s = period_s

    def run(self) -> None:
        while os.getppid() == self._parent_pid:
            if self._on_tick is not None:
                self._on_tick()
            time.sleep(self._period_s)
        self._on_orphaned()


class StoppedParent:
    """Ends a parent that is stopped (SIGSTOP) while this process runs on.

    Those who wait for its answers would wait for ever; so the system closes their connections. One that is stopped
    together with this process (Ctrl-Z), or by a debugger, is left alone.
    """

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._last_look_s = time.monotonic()

    def look(self) -> None:
        """To be called about twice a second."""
        now_s = time.monotonic()
        has_paused = now_s - self._last_look_s > _PAUSE_S
        self._last_look_s = now_s
        if has_paused or not is_stopped(self._pid):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > self._limit_s:
            os.kill(self._pid, signal.SIGKILL)
            with suppress(OSError):
                print(f"The server's process (pid {self._pid}) was stopped (SIGSTOP) and is ended.", file=sys.stderr)


def describe_exit(return_code: int) -> str:
    """`was killed by SIGKILL`, `exited with code 1`."""
    if return_code >= 0:
        return f"exited with code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = f"signal {-return_code}"
    hint = " (by hand, or by the system for lack of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def is_stopped(pid: int) -> bool:
    """Whether the process is there but does not run (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False

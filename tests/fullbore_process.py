"""Runs the `fullbore` command as a user does. Use: `from fullbore_process import ...`"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

FULLBORE = str(Path(sys.executable).parent / "fullbore")
START_TIMEOUT_S = 240  # importing torch in every process takes long on a busy machine
EXIT_TIMEOUT_S = 60


def run_fullbore(*arguments: str | Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    command = [FULLBORE, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, env=_environment(temporary)
    )


class ServeProcess:
    """`fullbore serve` on a free port, ready for requests. Killed at the end if it has not ended."""

    def __init__(self, *arguments: str | Path, temporary: Path) -> None:
        """`temporary` becomes the directory for temporary files."""
        command = [FULLBORE, "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(temporary)
        )
        self._lines: list[str] = []
        self._errors: list[str] = []
        self._is_ready = threading.Event()
        self._readers = [threading.Thread(target=self._read_output), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if line.startswith("Stop with"):
                self._is_ready.set()
        self._is_ready.set()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def errors(self) -> str:
        return "".join(self._errors)

    @property
    def url(self) -> str:
        """Where it listens, from what it printed."""
        return next(line for line in self._lines if line.startswith("API:")).split()[1].removesuffix("/v1")

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return_code = self.process.wait(EXIT_TIMEOUT_S)
        for reader in self._readers:
            reader.join(EXIT_TIMEOUT_S)
        return return_code

    def __enter__(self) -> ServeProcess:
        if not (self._is_ready.wait(START_TIMEOUT_S) and "Stop with" in self.output):
            self.process.kill()
            raise AssertionError(f"The server did not start.\n{self.output}\n{self.errors}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def assert_all_end(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    """None of these is left, not even as a zombie."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    assert not alive


def _environment(temporary: Path) -> dict[str, str]:
    environment = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200"}
    for name in ("FULLBORE_API_KEY", "TORCHINDUCTOR_CACHE_DIR"):  # torch, once imported, sets the latter for all below
        environment.pop(name, None)
    return environment


def eventually(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Waits until `condition()` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)

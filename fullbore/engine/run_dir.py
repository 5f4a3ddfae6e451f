"""The private folder of one engine: its sockets and the stages' rendezvous file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from fullbore.errors import ConfigError

_PREFIX = "fullbore-run-"
_LOCK = "lock"
_NEEDED_BYTES, _NEEDED_FILES = 100_000, 100  # with room to spare
_MAX_SOCKET_PATH_BYTES = 100  # the system's limit for a local socket's path is 107


class RunDir:
    """Readable by the owner alone (mode 0700). Removed by whoever of client, driver and stages ends last or survives.

    The client holds a lock in it; a folder whose lock nobody holds was left by processes that were all killed at once,
    and the next start removes it.
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls) -> RunDir:
        """A new one. Raises ConfigError where none can be made and locked, or its disk is full."""
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(_PREFIX) + 40 > _MAX_SOCKET_PATH_BYTES:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        try:
            _require_room(parent)
            while True:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                try:
                    lock = _lock(path / _LOCK)
                except BlockingIOError:  # another start takes it for abandoned
                    continue
                except OSError:
                    remove(path)
                    raise
                if path.exists():  # else another start has removed it before it was locked
                    return cls(path, lock)
                lock.close()
        except OSError as error:
            raise ConfigError(
                f"No folder for the engine's sockets can be made in {parent} ({error.strerror}); "
                "set TMPDIR to a local folder that you can write to."
            ) from None

    def remove(self) -> None:
        remove(self.path)
        self._lock.close()


def remove(path: Path | str) -> None:
    """Removes a run folder; it may be gone already, or be going."""
    shutil.rmtree(path, ignore_errors=True)


# Receivers bind and senders connect: what is sent before the other side is up waits in the sender's queue.


def driver_address(path: Path | str) -> str:
    return f"ipc://{path}/to-driver"


def client_address(path: Path | str) -> str:
    return f"ipc://{path}/to-client"


def stage_address(path: Path | str, stage: int) -> str:
    return f"ipc://{path}/to-stage-{stage}"


def from_stages_address(path: Path | str) -> str:
    return f"ipc://{path}/from-stages"


def rendezvous_file(path: Path | str) -> Path:
    return Path(path) / "rendezvous"


def _require_room(parent: Path) -> None:
    """Raises OSError where the disk is nearly full: sockets would fail later, one by one, in any process."""
    disk = os.statvfs(parent)
    has_files = disk.f_files == 0 or disk.f_favail >= _NEEDED_FILES  # 0: the file system does not count them
    if disk.f_bavail * disk.f_frsize < _NEEDED_BYTES or not has_files:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(path: Path) -> IO[bytes]:
    lock = path.open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(_PREFIX + "*"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid() or not (path / _LOCK).exists():
                continue
            with _lock(path / _LOCK):
                remove(path)

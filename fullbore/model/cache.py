"""The folders where fullbore keeps what it fetched, converted or compiled, and how to write there safely."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fullbore.errors import ModelError

_PARTIAL = ".partial"  # how the names of folders end in which something is being made


def models_folder() -> Path:
    """`$XDG_CACHE_HOME/fullbore/models` (by default under ~/.cache), created if need be.

    Raises:
        ModelError: it cannot be created.
    """
    return _folder("models")


def kernels_folder() -> Path:
    """Beside the models: what was compiled for this machine. Raises ModelError if it cannot be created."""
    return _folder("kernels")


def splits_folder() -> Path:
    """What was measured of models on this machine; may not be there."""
    return _path("splits")


def _path(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "fullbore" / name


def _folder(name: str) -> Path:
    folder = _path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The cache folder {folder} cannot be created ({error.strerror}); "
            "set the environment variable XDG_CACHE_HOME to a folder that you can write to."
        ) from None
    return folder


@contextmanager
def exclusive(target: Path, *, block: bool = True) -> Iterator[None]:
    """Holds a lock for `target` against other processes and threads; released also when the process dies.

    What an interrupted run left of `target` is removed.

    Raises:
        ModelError: the lock's file cannot be made.
        BlockingIOError: another holds the lock, and not `block`.
    """
    path = target.with_name(f".{target.name}.lock")
    while True:
        try:
            lock = path.open("w")
        except OSError as error:
            raise ModelError(f"{target.parent} cannot be written to ({error.strerror}); set XDG_CACHE_HOME.") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
            if not _is_at(lock, path):  # whoever held it before has removed it; others lock a new one
                continue
            try:
                for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{_PARTIAL}"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Yields an empty folder to fill, which becomes `target` at the end of the block and vanishes if that fails.

    Call it under `exclusive(target)`.

    Raises:
        ModelError: the disk is full or cannot be written to.
    """
    try:
        with partial_folder(target) as folder:
            yield folder
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written ({error.strerror or error}).") from None


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to make it in; gone at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_PARTIAL, dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Removes what killed processes left half done among the models; what others are working on stays."""
    for leftover in _path("models").glob(f".*{_PARTIAL}"):
        name = leftover.name[1:].rsplit(".", 2)[0]  # of .NAME.RANDOM.partial
        with suppress(ModelError, BlockingIOError), exclusive(leftover.with_name(name), block=False):
            pass


def require_free_space(folder: Path, needed_bytes: int) -> None:
    """Raises ModelError unless the disk of `folder` has that much room."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"The disk of {folder} has {free_bytes / 1e9:.2f} GB free but {needed_bytes / 1e9:.2f} GB are needed; "
            "free some space, or set XDG_CACHE_HOME to a folder on another disk."
        )

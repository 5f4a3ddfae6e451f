"""The folders where fullbore keeps what it fetched, converted or compiled, and how to write there safely."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullbore.errors import ModelError


def models_folder() -> Path:
    """`$XDG_CACHE_HOME/fullbore/models` (by default under ~/.cache), created if need be.

    Raises:
        ModelError: it cannot be created.
    """
    return _folder("models")


def kernels_folder() -> Path:
    """Beside the models: what was compiled for this machine. Raises ModelError if it cannot be created."""
    return _folder("kernels")


def _folder(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache).expanduser() / "fullbore" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The cache folder {folder} cannot be created ({error.strerror}); "
            "set the environment variable XDG_CACHE_HOME to a folder that you can write to."
        ) from None
    return folder


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Holds a lock for `target` against other processes and threads; released also when the process dies."""
    try:
        lock = target.with_name(f".{target.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"{target.parent} cannot be written to ({error.strerror}); set XDG_CACHE_HOME.") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """Yields an empty folder to fill, which becomes `target` at the end of the block and vanishes if that fails.

    Call it under `exclusive(target)`: whatever an interrupted run left behind is removed.

    Raises:
        ModelError: the disk is full or cannot be written to.
    """
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        try:
            yield folder
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{target} cannot be written ({error.strerror or error}).") from None


def require_free_space(folder: Path, needed_bytes: int) -> None:
    """Raises ModelError unless the disk of `folder` has that much room."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"The disk of {folder} has {free_bytes / 1e9:.2f} GB free but {needed_bytes / 1e9:.2f} GB are needed; "
            "free some space, or set XDG_CACHE_HOME to a folder on another disk."
        )

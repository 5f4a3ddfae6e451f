from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fullbore.engine.run_dir import RunDir, client_address
from fullbore.errors import ConfigError


@pytest.fixture
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short folder that stands for /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_private_and_removed(temp_root: Path) -> None:
    run_dir = RunDir.create()
    assert run_dir.path.parent == temp_root
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    (run_dir.path / "something").touch()
    run_dir.remove()
    assert list(temp_root.iterdir()) == []


def test_socket_paths_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    run_dir = RunDir.create()
    assert len(client_address(run_dir.path)) < 107
    run_dir.remove()


def test_next_start_removes_what_killed_processes_left_and_nothing_else(temp_root: Path) -> None:
    in_use = RunDir.create()
    (temp_root / "fullbore-run-without-lock").mkdir()
    script = (
        "from fullbore.engine.run_dir import RunDir; import os; print(RunDir.create().path, flush=True); os._exit(9)"
    )
    command = [sys.executable, "-c", f"import tempfile; tempfile.tempdir = {str(temp_root)!r}; {script}"]
    left = Path(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip())
    assert left.exists()
    new = RunDir.create()
    assert not left.exists()
    assert in_use.path.exists()
    assert (temp_root / "fullbore-run-without-lock").exists()
    new.remove()
    in_use.remove()


def test_a_folder_that_cannot_be_made_or_locked_is_an_error_with_a_way_out(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temp_root / "missing"))
    with pytest.raises(ConfigError, match=r"missing.*TMPDIR"):
        RunDir.create()

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(temp_root))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"No locks available.*TMPDIR"):
        RunDir.create()
    assert list(temp_root.iterdir()) == []


@pytest.mark.parametrize("full", [{"f_bavail": 1}, {"f_files": 1000, "f_favail": 5}], ids=["bytes", "files"])
def test_a_full_disk_is_an_error_with_a_way_out(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch, full: dict[str, int]
) -> None:
    names = "f_bsize f_frsize f_blocks f_bfree f_bavail f_files f_ffree f_favail f_flag f_namemax"
    status = dict(zip(names.split(), os.statvfs(temp_root), strict=True)) | full
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status.values()))
    with pytest.raises(ConfigError, match=r"No space left on device.*TMPDIR"):
        RunDir.create()
    assert list(temp_root.iterdir()) == []


def test_a_folder_that_another_start_removed_is_made_again(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_flock, made = fcntl.flock, []

    def flock(file: object, operation: int) -> None:
        path = Path(file.name).parent  # type: ignore[attr-defined]
        made.append(path)
        if len(made) == 1:
            raise BlockingIOError
        if len(made) == 2:
            shutil.rmtree(path)
        real_flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock)
    run_dir = RunDir.create()
    assert run_dir.path == made[2]
    assert run_dir.path.exists()
    run_dir.remove()

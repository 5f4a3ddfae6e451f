"""The lock of what is made in the cache."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fullbore.model.cache import exclusive, models_folder, partial_folder, remove_abandoned


def test_one_at_a_time_and_no_lock_is_left(tmp_path: Path) -> None:
    inside, most_inside, entered = 0, 0, 0

    def enter() -> None:
        nonlocal inside, most_inside, entered
        for _ in range(30):
            with exclusive(tmp_path / "model"):
                inside += 1
                most_inside = max(most_inside, inside)
                entered += 1
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most_inside, entered) == (1, 240)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".model.lock").touch()
    with exclusive(tmp_path / "model"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_but_not_what_others_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remove_abandoned()
    assert list(tmp_path.iterdir()) == [], "it makes no folder"
    models = models_folder()
    whole, left = models / "whole", models / ".org.model [Q4]-1a.b_3.partial"
    whole.mkdir()
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with exclusive(models / "other"), partial_folder(models / "other") as in_work:
        remove_abandoned()
        assert in_work.exists()
        assert not left.exists()
    assert list(models.iterdir()) == [whole]

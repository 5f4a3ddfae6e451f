"""Any process of a server is killed or stopped while clients stream: each client is told, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import psutil
import pytest
from fullbore_process import ServeProcess, assert_all_end
from tiny_models import VOCAB_SIZE, make_byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NUM_STREAMS, NUM_OTHERS = 12, 4
MODEL = f"sleep://layers=6,layer_ms=1,vocab={VOCAB_SIZE},context=100000"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    make_byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tmp").mkdir()
    arguments = (MODEL, "--pp-size", "3", "--tokenizer-path", tmp_path / "tokenizer", "--max-total-tokens", "200000")
    shared_memory = os.listdir("/dev/shm")
    with ServeProcess(*arguments, temporary=tmp_path / "tmp") as server:
        processes = server.processes()
        yield server
        server.wait()
    assert_all_end(processes)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert os.listdir("/dev/shm") == shared_memory


def victim_of(server: ServeProcess, name: str) -> int:
    """Its process id."""
    if name == "server":
        return server.process.pid
    if name == "driver":
        [driver] = psutil.Process(server.process.pid).children()
        return driver.pid
    stages = httpx.get(f"{server.url}/server_info", timeout=60).json()["stages"]
    return int(stages[int(name)]["pid"])


def ask(server: ServeProcess, stream: bool, has_begun: Barrier) -> str:
    """The last that a client hears: the message of its error, or how its connection broke."""
    body = {"prompt": [65] * 20, "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    lines: list[str] = []
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            for line in filter(None, response.iter_lines()):
                if stream and not lines:
                    has_begun.wait(60)
                lines.append(line.removeprefix("data: "))
    except httpx.RemoteProtocolError as error:
        return str(error)
    if stream:
        assert lines.pop() == "[DONE]"
    else:
        assert response.status_code == 503
    error = json.loads(lines[-1])["error"]
    assert error["code"] == "engine_dead"
    return str(error["message"])


@pytest.mark.parametrize(
    ("victim", "number"),
    [("0", signal.SIGSTOP), ("2", signal.SIGKILL), ("driver", signal.SIGSTOP), ("driver", signal.SIGKILL)],
    ids=str,
)
def test_a_stage_or_the_driver(server: ServeProcess, victim: str, number: signal.Signals) -> None:
    messages = kill_under_load(server, victim_of(server, victim), number)
    name = "The engine's driver process" if victim == "driver" else f"Stage {victim}"
    assert all(name in message and number.name in message for message in messages), messages
    assert server.wait() not in (0, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_the_process_that_tokenizes(server: ServeProcess, number: signal.Signals) -> None:
    """It serves HTTP too, so nobody can tell clients more than that their connection has ended before its time."""
    messages = kill_under_load(server, server.process.pid, number)
    assert all("without" in message for message in messages), messages
    assert server.wait() == -signal.SIGKILL
    assert number != signal.SIGSTOP or "was stopped (SIGSTOP)" in server.errors


def kill_under_load(server: ServeProcess, pid: int, number: signal.Signals) -> list[str]:
    """What each of the clients heard last."""
    has_begun = Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(NUM_STREAMS + NUM_OTHERS) as threads:
        waiting = [
            threads.submit(ask, server, number < NUM_STREAMS, has_begun) for number in range(NUM_STREAMS + NUM_OTHERS)
        ]
        has_begun.wait(60)
        os.kill(pid, number)
        return [each.result(60) for each in waiting]  # the limit is 5 s; the machine may be busy

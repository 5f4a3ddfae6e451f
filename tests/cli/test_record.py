"""`fullbore record` and `fullbore account` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fullbore_process import FULLBORE, ServeProcess, run_fullbore
from recordings import simulated_timeline
from tiny_models import make_tiny_model

from fullbore.telemetry.accounting import CAUSES
from fullbore.telemetry.recording import read_timeline, write_timeline


@pytest.fixture(scope="module")
def busy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A tiny model on two stages, with one client that never stops asking."""
    folder = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))
    arguments = (folder, "--pp-size", "2", "--dtype", "float32", "--device", "cpu")
    is_over = threading.Event()

    def keep_asking(server: ServeProcess) -> None:
        body = {"model": folder.name, "prompt": "abc", "max_tokens": 50}
        while not is_over.is_set():
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ServeProcess(*arguments, temporary=tmp_path_factory.mktemp("tmp")) as server:
        client = threading.Thread(target=keep_asking, args=(server,))
        client.start()
        yield server
        is_over.set()
        client.join()


@pytest.mark.slow
@pytest.mark.alone
def test_record_and_account(busy_server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "run.fbr"
    done = run_fullbore("record", "--url", busy_server.url, "--seconds", "2", "-o", file, temporary=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{file}: 2.00 s, 2 stages, ")
    assert done.stderr.count("\n") == 1, "one line that says that it records"
    timeline = read_timeline(file)
    assert len(timeline.recording.stage_records) > 10

    document = json.loads(run_fullbore("account", file, "--json", temporary=tmp_path).stdout)
    assert document["window_s"] == pytest.approx(2.0)
    for stage in document["stages"]:
        assert set(stage["seconds"]) == set(CAUSES)
        assert sum(stage["seconds"].values()) == pytest.approx(2.0)
        assert stage["seconds"]["few-requests"] > 0
    text = run_fullbore("account", file, temporary=tmp_path).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "Largest loss" in text


@pytest.mark.slow
@pytest.mark.alone
def test_record_for_perfetto(busy_server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = ("record", "--url", busy_server.url, "--seconds", "1", "-o", file, "--format", "perfetto")
    assert run_fullbore(*arguments, temporary=tmp_path).returncode == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "i", "C"}


@pytest.mark.slow
@pytest.mark.alone
def test_ctrl_c_leaves_what_there_is(busy_server: ServeProcess, tmp_path: Path) -> None:
    file = tmp_path / "run.fbr"
    process = subprocess.Popen(
        [FULLBORE, "record", "--url", busy_server.url, "--seconds", "600", "-o", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_sigint,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Recording")
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert read_timeline(file).window_s < 600
    assert output.startswith(f"{file}: ")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("fbr")] == ["run.fbr"]


def _heed_sigint() -> None:
    """As from a terminal; in the background of a script it would be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_errors(tmp_path: Path) -> None:
    def error_of(*arguments: str | Path) -> str:
        done = run_fullbore(*arguments, temporary=tmp_path)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    (tmp_path / "text").write_text("hello")
    assert "not a fullbore recording" in error_of("account", tmp_path / "text")
    assert "does not answer" in error_of("record", "--url", "http://127.0.0.1:9", "-o", tmp_path / "run.fbr")
    assert "folder does not exist" in error_of("record", "-o", tmp_path / "none" / "run.fbr")
    assert "--seconds must be more than 0" in error_of("record", "--seconds", "0", "-o", tmp_path / "run.fbr")
    assert not (tmp_path / "run.fbr").exists()


def test_account_of_a_file(tmp_path: Path) -> None:
    write_timeline(tmp_path / "run.fbr", simulated_timeline())
    done = run_fullbore("account", tmp_path / "run.fbr", temporary=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("run.fbr: tiny, ")
    assert "3 stages" in done.stdout

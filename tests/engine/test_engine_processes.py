"""Whole engines: client, driver and stages that only sleep, each a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_helpers import (
    MODEL,
    add_request,
    assert_nothing_left,
    collect,
    config,
    expected,
    greedy_request,
    pids_of,
    prompt_of,
    tokens_of,
)
from tiny_models import make_tiny_model

from fullbore.engine.client import EngineClient
from fullbore.engine.loopback import LoopbackEngine, load_stages
from fullbore.engine.messages import LoadProgress, Rejected
from fullbore.errors import ConfigError, EngineDeadError, ModelError, OutOfMemoryError
from fullbore.scheduler.scheduler import SchedulerConfig


@pytest.fixture(scope="module", params=[1, 2, 4])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with EngineClient.start(config(request.param, chunked_prefill_size=32)) as client:
        yield client
        stats = client.stats()
        assert (stats.running, stats.waiting, stats.in_flight, stats.used_blocks) == (0, 0, 0, 0)
        pids, run_dir = pids_of(client), client.run_dir
    assert_nothing_left(pids, run_dir)


def test_tokens_are_right_and_max_tokens_is_exact(client: EngineClient) -> None:
    prompts = {client.next_request_id(): prompt_of(k, 1 + 17 * k % 100) for k in range(12)}
    lengths = {request_id: 1 + 3 * k for k, request_id in enumerate(prompts)}
    for request_id, prompt in prompts.items():
        client.add(add_request(request_id, prompt, lengths[request_id]))
    outputs = collect(client, len(prompts))
    for request_id, prompt in prompts.items():
        assert tokens_of(outputs[request_id]) == expected(MODEL, prompt, lengths[request_id])
        assert outputs[request_id][-1].finish_reason == "length"


def test_seeded_sampling_differs_from_greedy_and_is_reproducible(client: EngineClient) -> None:
    prompt = prompt_of(3, 20)
    ids = [client.next_request_id() for _ in range(3)]
    for request_id, seed in zip(ids, (5, 5, 6), strict=True):
        client.add(add_request(request_id, prompt, 8, temperature=1.0, seed=seed))
    outputs = collect(client, 3)
    first, again, other = (tokens_of(outputs[request_id]) for request_id in ids)
    assert first == again == expected(MODEL, prompt, 8, seed=5)
    assert other == expected(MODEL, prompt, 8, seed=6)


def test_micro_batches_in_flight(client: EngineClient) -> None:
    pp_size = client.info.config.pp_size
    before = client.stats()
    ids = [client.next_request_id() for _ in range(8)]
    for request_id in ids:
        client.add(add_request(request_id, prompt_of(request_id, 5), 60))
    collect(client, 8)
    after = client.stats()
    launches = {k: n - before.in_flight_at_launch.get(k, 0) for k, n in after.in_flight_at_launch.items()}
    full = sum(count for in_flight, count in launches.items() if in_flight >= pp_size)
    assert full > 0.8 * sum(launches.values()), launches
    assert after.max_in_flight <= client.info.in_flight_limit
    assert all(busy_s > 0 for busy_s in after.stage_busy_s)


def test_request_that_cannot_fit_is_rejected(client: EngineClient) -> None:
    request_id = client.next_request_id()
    client.add(add_request(request_id, [1] * 10, 10_000_000))
    (message,) = client.receive(30)
    assert isinstance(message, Rejected)
    assert message.request_id == request_id
    assert message.param == "max_tokens"


@pytest.mark.parametrize("token_id", [-1, 1000, 2**40])
def test_token_outside_the_vocabulary_is_rejected(client: EngineClient, token_id: int) -> None:
    client.add(add_request(client.next_request_id(), [1, token_id, 2], 5))
    (message,) = client.receive(30)
    assert isinstance(message, Rejected)
    assert "between 0 and 999" in message.message


def test_deadline(client: EngineClient) -> None:
    request_id = client.next_request_id()
    client.add(add_request(request_id, [1, 2, 3], 4000, timeout_s=0.2))
    outputs = collect(client, 1)[request_id]
    assert outputs[-1].finish_reason == "timeout"
    assert 0 < len(outputs) < 4000


def test_abort_storm(client: EngineClient) -> None:
    chance = random.Random(7)
    ids = [client.next_request_id() for _ in range(150)]
    for request_id in ids:
        client.add(add_request(request_id, prompt_of(request_id, chance.randint(1, 80)), chance.randint(20, 60)))
        if chance.random() < 0.7:
            client.abort(chance.choice(ids))  # also ones not added yet, and ones aborted before
        if chance.random() < 0.1:
            time.sleep(0.01)
    for request_id in ids:
        client.abort(request_id)
        client.abort(request_id)
    collect(client, len(ids))
    end_s = time.monotonic() + 30
    while (stats := client.stats()).in_flight > 0 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert (stats.running, stats.waiting, stats.in_flight, stats.used_blocks) == (0, 0, 0, 0)


def test_real_model_over_processes(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "model")
    prompts = [[token % 250 for token in prompt_of(k, 3 + 9 * k)] for k in range(4)]
    stages = load_stages(folder, (4,), 64, 16)
    alone = LoopbackEngine(stages, SchedulerConfig(num_kv_blocks=64))
    reference = alone.generate([greedy_request(k, prompt, 12) for k, prompt in enumerate(prompts)])
    progress: list[LoadProgress] = []
    settings = config(2, str(folder), chunked_prefill_size=7, dtype="float32", device="cpu")
    with EngineClient.start(settings, progress.append) as client:
        assert [stage.stage for stage in client.info.stages] == [0, 1]
        for k, prompt in enumerate(prompts):
            client.add(add_request(k, prompt, 12, ignore_eos=True))
        outputs = collect(client, 4)
    assert {k: tokens_of(outputs[k]) for k in range(4)} == reference
    assert {step.stage for step in progress if 0 < step.total_bytes == step.done_bytes} == {0, 1}


# ------------------------------------------------------------------------------------------------- start and stop


def test_end_token_stops_unless_ignored() -> None:
    model = MODEL + ",vocab=4,eos=2"
    prompt = [3, 0, 1]
    sequence = expected(model, prompt, 30)
    assert 2 in sequence
    with EngineClient.start(config(2, model)) as client:
        client.add(add_request(0, prompt, 30))
        client.add(add_request(1, prompt, 30, ignore_eos=True))
        outputs = collect(client, 2)
    assert tokens_of(outputs[0]) == sequence[: sequence.index(2) + 1]
    assert outputs[0][-1].finish_reason == "stop"
    assert tokens_of(outputs[1]) == sequence


def test_stop_lets_requests_finish_within_the_grace() -> None:
    client = EngineClient.start(config(2, "sleep://layers=2,layer_ms=2"))
    pids, run_dir = pids_of(client), client.run_dir
    client.add(add_request(0, [1, 2], 100))
    client.add(add_request(1, [1, 2], 4000))
    while not client.receive(1):
        pass
    client.begin_stop(3.0)
    client.add(add_request(2, [1, 2], 1))
    outputs = {}
    rejected = []
    while sum(items[-1].finish_reason is not None for items in outputs.values()) < 2:
        for message in client.receive(10):
            if isinstance(message, Rejected):
                rejected.append(message)
            else:
                for output in message.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
    assert outputs[0][-1].finish_reason == "length"
    assert outputs[1][-1].finish_reason == "abort"
    assert [(message.request_id, message.is_stopping) for message in rejected] == [(2, True)]
    client.stop()
    client.stop()
    assert_nothing_left(pids, run_dir)
    with pytest.raises(EngineDeadError, match="stopped"):
        client.stats()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"pp_size": 9}, ConfigError, "9 is more than the model's 8 layers"),
        ({"pp_size": 2, "pp_layer_partition": (5, 4)}, ConfigError, "adds up to 9"),
        ({"pp_size": 1, "model": "sleep://layer=3"}, ModelError, "layer"),
        ({"pp_size": 1, "model": "/nowhere/at/all"}, ModelError, "/nowhere/at/all"),
        ({"pp_size": 1, "context_length": 9999}, ConfigError, "9999"),
        ({"pp_size": 2, "max_total_tokens": 10**9}, OutOfMemoryError, "missing"),
        ({"pp_size": 0}, ConfigError, "--pp-size must be at least 1"),
    ],
)
def test_start_up_errors(settings: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineClient.start(config(**settings))  # type: ignore[arg-type]


def test_loading_that_takes_too_long() -> None:
    with pytest.raises(EngineDeadError, match="--load-timeout-s"):
        EngineClient.start(config(1, MODEL + ",load_ms=60000", load_timeout_s=6.0))


def test_stage_killed_while_loading(tmp_path: Path) -> None:
    """The child process prints what its start raised; meanwhile its stages are looked for and one is killed."""
    script = tmp_path / "start.py"
    script.write_text(
        "from fullbore.config import EngineConfig\nfrom fullbore.engine.client import EngineClient\n"
        f"EngineClient.start(EngineConfig(model='{MODEL},load_ms=60000', pp_size=2))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    stages: list[psutil.Process] = []
    while len(stages) < 2:
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
        stages = [child for child in children if "fullbore.engine.stage_process" in child.cmdline()]
        time.sleep(0.05)
    stages[1].kill()
    _, errors = process.communicate(timeout=30)
    assert f"Stage 1 (pid {stages[1].pid}) was killed by SIGKILL" in errors
    assert_nothing_left([stage.pid for stage in stages], tmp_path / "none")


# A user's script, without a main guard. It says who its processes are, and generates until it is killed.
CLIENT_SCRIPT = f"""
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
sys.path.insert(0, {str(Path(__file__).parent)!r})
from engine_helpers import add_request, config, pids_of
from fullbore.engine.client import EngineClient
client = EngineClient.start(config({{pp_size}}, {MODEL!r}))
client.add(add_request(0, [1, 2, 3], 4000))
print(json.dumps([pids_of(client), str(client.run_dir)]), flush=True)
while client.receive(60):
    {{action}}
"""


@pytest.mark.parametrize(
    ("pp_size", "action", "signal_number"),
    [
        (2, "pass", signal.SIGKILL),
        (1, "pass", signal.SIGTERM),
        (2, "pass", signal.SIGINT),
        (1, "sys.exit(3)", None),
        (1, "1 / 0", None),
    ],
)
def test_end_of_the_client_ends_everything(pp_size: int, action: str, signal_number: int | None) -> None:
    script = CLIENT_SCRIPT.replace("{action}", action).replace("{pp_size}", str(pp_size))
    # A session of its own, whose whole group gets the signal as from a terminal.
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    pids, run_dir = json.loads(process.stdout.readline())
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)
    elif signal_number is not None:
        process.send_signal(signal_number)
    process.wait(timeout=30)
    process.stdout.close()
    assert_nothing_left(pids, Path(run_dir))


def test_collected_client_ends_everything() -> None:
    client = EngineClient.start(config(1))
    pids, run_dir = pids_of(client), client.run_dir
    assert run_dir.stat().st_mode & 0o777 == 0o700
    del client
    assert_nothing_left(pids, run_dir)

"""Shared by the engine's tests: requests, and the proof that nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from fullbore.config import EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.engine.messages import AddRequest, Outputs, Rejected
from fullbore.engine.sleep_model import expected_tokens, parse
from fullbore.scheduler.request import Request, TokenOutput

MODEL = "sleep://layers=8,layer_ms=0.5"


def config(pp_size: int, model: str = MODEL, **settings: object) -> EngineConfig:
    return EngineConfig(model=model, pp_size=pp_size, **{"max_total_tokens": 16_384, **settings})  # type: ignore[arg-type]


def add_request(request_id: int, prompt: list[int], max_tokens: int, **settings: object) -> AddRequest:
    defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "ignore_eos": False}
    return AddRequest(request_id, prompt, max_tokens, **{**defaults, **settings})  # type: ignore[arg-type]


def prompt_of(request_id: int, length: int) -> list[int]:
    return [(request_id * 37 + position * 11) % 997 for position in range(length)]


def expected(model: str, prompt: list[int], count: int, seed: int | None = None) -> list[int]:
    return expected_tokens(parse(model), prompt, count, seed)


def greedy_request(request_id: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(request_id, prompt, max_tokens)


def collect(client: EngineClient, num_requests: int, timeout_s: float = 60) -> dict[int, list[TokenOutput]]:
    """Receives until that many requests have ended. Returns request id -> its outputs."""
    outputs: dict[int, list[TokenOutput]] = {}
    num_ended = 0
    end_s = time.monotonic() + timeout_s
    while num_ended < num_requests:
        assert time.monotonic() < end_s, f"{num_ended} of {num_requests} requests ended"
        for message in client.receive(1.0):
            assert not isinstance(message, Rejected), message.message
            assert isinstance(message, Outputs)
            for output in message.outputs:
                outputs.setdefault(output.request_id, []).append(output)
                num_ended += output.finish_reason is not None
    return outputs


def tokens_of(outputs: Iterable[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def pids_of(client: EngineClient) -> list[int]:
    return [client.driver_pid, *(stage.pid for stage in client.info.stages)]


def assert_nothing_left(pids: Iterable[int], run_dir: Path, timeout_s: float = 5.0) -> None:
    """No process, no socket, no folder; waits a little for processes that are about to end."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        left = [pid for pid in pids if _is_alive(pid)]
        if not left and not run_dir.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: processes {left}, {run_dir} {'exists' if run_dir.exists() else 'is gone'}")


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

"""Whole engines are accounted for: with one thing wrong on purpose, most of the idle time gets that cause.

Stages sleep for tens of milliseconds, so that a busy machine changes little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from engine_helpers import add_request, config, prompt_of

from fullbore.engine.client import EngineClient
from fullbore.engine.messages import Outputs
from fullbore.telemetry.accounting import BUSY, CAUSES, Recording, account

TOKENS = 40


@dataclass
class Run:
    """An engine, and what is asked of it: `num_requests` at once."""

    pp_size: int
    num_requests: int
    model: str
    settings: dict[str, object] = field(default_factory=dict)
    prompt_length: int = 4

    def recording(self) -> Recording:
        """From when all requests that can have a token until the first of them ends, or for a while."""
        with EngineClient.start(config(self.pp_size, self.model, **self.settings)) as client:
            for request_id in range(self.num_requests):
                prompt = prompt_of(request_id, self.prompt_length)
                client.add(add_request(request_id, prompt, TOKENS))
            _receive(client, num_tokens=4 * self.num_requests)
            since_ns = time.monotonic_ns()
            _receive(client, num_tokens=(TOKENS - 10) * self.num_requests)
            return client.records(0.0, since_ns)


def _receive(client: EngineClient, num_tokens: int) -> None:
    """Waits for so many tokens, or for the first request's end."""
    while num_tokens > 0:
        for message in client.receive(10.0):
            assert isinstance(message, Outputs)
            num_tokens -= len(message.outputs)
            if any(output.finish_reason is not None for output in message.outputs):
                return


def shares_of_idle_time(recording: Recording) -> dict[str, float]:
    stages = account(recording)
    window_ns = recording.end_ns - recording.start_ns
    assert window_ns > 0
    for seconds in stages:
        assert all(isinstance(ns, int) and ns >= 0 for ns in seconds.values())
        assert sum(seconds.values()) == window_ns
    idle_ns = {cause: sum(stage[cause] for stage in stages) for cause in CAUSES if cause not in BUSY}
    whole = sum(idle_ns.values())
    assert whole > 0.1 * window_ns * recording.pp_size, "the example is meant to leave stages idle"
    return {cause: round(ns / whole, 3) for cause, ns in idle_ns.items() if ns}


EVEN = "sleep://layers=4,layer_ms=20"
BY_TOKENS = "sleep://layers=6,layer_ms=0,token_ms=14"  # micro-batches of any size cost the same per request
WRONG: dict[str, tuple[set[str], Run]] = {
    "one request on two stages": ({"few-requests"}, Run(2, 1, EVEN)),
    "one request on four stages": ({"few-requests"}, Run(4, 1, EVEN)),
    "two requests on four stages": ({"few-requests"}, Run(4, 2, EVEN)),
    "a slow first stage": ({"imbalance"}, Run(2, 6, BY_TOKENS, {"pp_layer_partition": (4, 2)})),
    "a slow last stage": ({"imbalance"}, Run(4, 8, BY_TOKENS, {"pp_layer_partition": (1, 1, 1, 3)})),
    "memory for one request": ({"memory"}, Run(2, 4, EVEN, {"max_total_tokens": 64}, prompt_length=20)),
    # Where a step costs the same for any number of requests and one stage is slow, one micro-batch gives the most
    # tokens: more of them would keep the fast stage busier, and every request waiting longer.
    "a slow stage that makes one micro-batch best": (
        {"imbalance", "packed"},
        Run(2, 4, "sleep://layers=2,layer_ms=20,head_ms=60"),
    ),
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("example", WRONG)
def test_what_is_wrong_gets_most_of_the_blame(example: str) -> None:
    causes, run = WRONG[example]
    shares = shares_of_idle_time(run.recording())
    assert max(shares, key=lambda cause: shares[cause]) in causes, shares
    assert sum(shares.get(cause, 0.0) for cause in causes) >= 0.7, shares
    assert all(shares.get(cause, 0.0) > 0.1 for cause in causes), shares


@pytest.mark.slow
@pytest.mark.alone
def test_nobody_there() -> None:
    with EngineClient.start(config(2, EVEN)) as client:
        time.sleep(0.5)
        recording = client.records(0.3)
        assert recording.end_ns - recording.start_ns == 300_000_000
        assert shares_of_idle_time(recording) == {"no-requests": 1.0}


@pytest.mark.slow
@pytest.mark.alone
def test_a_full_pipeline_is_busy() -> None:
    recording = Run(2, 8, BY_TOKENS).recording()
    window_ns = recording.end_ns - recording.start_ns
    for seconds in account(recording):
        assert sum(seconds.values()) == window_ns
        assert seconds["compute"] + seconds["host"] > 0.8 * window_ns

"""The driver's ends of the control plane."""

from __future__ import annotations

import time
from pathlib import Path

import zmq
from engine_helpers import add_request

from fullbore.engine import run_dir
from fullbore.engine.links import Links
from fullbore.engine.messages import AddRequest, encode

NUM_REQUESTS = 100


def test_a_flood_of_requests_does_not_hold_up_launches(tmp_path: Path) -> None:
    """They are taken in over many rounds, all of them, and in order."""
    links = Links(str(tmp_path))
    client = links.context.socket(zmq.PUSH)
    client.connect(run_dir.driver_address(tmp_path))
    for request_id in range(NUM_REQUESTS):
        client.send(encode(add_request(request_id, [1] * 1000, 5)))
    taken: list[int] = []
    most_in_a_round = 0
    while len(taken) < NUM_REQUESTS:
        links.wait(10_000)
        before = len(taken)
        for message in links.client_messages():
            assert isinstance(message, AddRequest)
            taken.append(message.request_id)
            time.sleep(0.001)  # the driver's work on it
        most_in_a_round = max(most_in_a_round, len(taken) - before)
    assert taken == list(range(NUM_REQUESTS))
    assert most_in_a_round < 10
    links.close()

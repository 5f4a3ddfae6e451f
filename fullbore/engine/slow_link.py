"""A link with latency, for experiments: hidden states are there a fixed time after they were sent, and not earlier.

Like on a real link the wait costs the receiver nothing while it computes something else. The time of sending travels in
a row of its own behind the rows of the message; on one host all processes share the monotonic clock.
"""

from __future__ import annotations

import time

import torch

from fullbore.engine.transport import Received, Sent, Transport

_STAMP_BYTES = 8


class SlowLink:
    """A `Transport` whose receives wait until `latency_s` after the send. Rows must have at least 8 bytes."""

    def __init__(self, transport: Transport, latency_s: float) -> None:
        self._transport = transport
        self._latency_s = latency_s

    def post_receive(self, micro_batch_id: int, num_tokens: int) -> Received:
        return _LateReceived(self._transport.post_receive(micro_batch_id, num_tokens + 1), self._latency_s)

    def send(self, micro_batch_id: int, hidden: torch.Tensor) -> Sent:
        stamp = hidden.new_zeros(1, hidden.shape[1])
        stamp.view(torch.uint8)[0, :_STAMP_BYTES] = torch.tensor([time.monotonic_ns()]).view(torch.uint8)
        return self._transport.send(micro_batch_id, torch.cat((hidden, stamp)))

    def close(self) -> None:
        self._transport.close()


class _LateReceived:
    def __init__(self, received: Received, latency_s: float) -> None:
        self._received = received
        self._latency_s = latency_s

    def wait(self) -> torch.Tensor:
        rows = self._received.wait()
        stamp = rows[-1:].contiguous().view(torch.uint8)[0, :_STAMP_BYTES]
        sent_ns = int(stamp.clone().view(torch.int64))
        time.sleep(max(sent_ns * 1e-9 + self._latency_s - time.monotonic(), 0.0))
        return rows[:-1]

    def release(self) -> None:
        self._received.release()

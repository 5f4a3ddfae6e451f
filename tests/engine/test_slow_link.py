"""A link with latency: what is sent arrives whole, and not before its time."""

from __future__ import annotations

import pytest
import torch

from fullbore.engine import slow_link
from fullbore.engine.slow_link import SlowLink
from fullbore.engine.transport import LoopbackTransport, WrongMessageError

LATENCY_S = 2.0


class Clock:
    """Time passes only in sleep."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns * 1e-9

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slow_link, "time", clock)
    return clock


def linked() -> tuple[SlowLink, SlowLink]:
    ends = [LoopbackTransport(4, torch.float32) for _ in range(2)]
    ends[0].link(ends[1])
    return SlowLink(ends[0], LATENCY_S), SlowLink(ends[1], LATENCY_S)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rows_arrive_late_and_whole(num_tokens: int, clock: Clock) -> None:
    sender, receiver = linked()
    hidden = torch.randn(num_tokens, 4)
    sent_s = clock.monotonic()
    sender.send(3, hidden)
    received = receiver.post_receive(3, num_tokens)
    rows = received.wait()
    assert clock.monotonic() - sent_s == pytest.approx(LATENCY_S)
    assert torch.equal(rows, hidden)
    received.release()


def test_the_way_overlaps_with_work(clock: Clock) -> None:
    """Two that were sent at once are both there after one latency, or at once after work that took longer."""
    sender, receiver = linked()
    sent_s = clock.monotonic()
    for number in range(3):
        sender.send(number, torch.randn(1, 4))
    for number in range(2):
        receiver.post_receive(number, 1).wait()
    assert clock.monotonic() - sent_s == pytest.approx(LATENCY_S)
    clock.sleep(LATENCY_S)
    receiver.post_receive(2, 1).wait()
    assert clock.monotonic() - sent_s == pytest.approx(2 * LATENCY_S)


def test_a_mix_up_is_still_noticed(clock: Clock) -> None:
    sender, receiver = linked()
    sender.send(3, torch.randn(2, 4))
    with pytest.raises(WrongMessageError):
        receiver.post_receive(4, 2).wait()

"""GPU streams as vector clocks: what is ordered before what, and accesses to a buffer that are not ordered at all.

A stream is a queue of work; the host launches work, which happens after what the host has waited for. NCCL has a queue
of its own per direction, which takes up work after what the stream it was launched from has in it by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Clock = dict[str, int]


@dataclass
class Mark:
    model: StreamModel
    clock: Clock

    def synchronize(self) -> None:
        _merge(self.model.clocks["host"], self.clock)


@dataclass
class Access:
    queue: str
    time: int  # of the queue
    what: str


@dataclass
class StreamModel:
    """`fullbore.engine.nccl_transport.Streams`, and a detector of races."""

    clocks: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    races: list[str] = field(default_factory=list)
    current: str = "compute"
    writes: dict[int, Access] = field(default_factory=dict)
    reads: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def on_transfer(self) -> Iterator[None]:
        self.current = "transfer"
        yield
        self.current = "compute"

    def mark_compute(self) -> Mark:
        return self._mark("compute")

    def mark_transfer(self) -> Mark:
        return self._mark("transfer")

    def compute_after(self, mark: Mark) -> None:
        _merge(self.clocks["compute"], mark.clock)

    def transfer_after(self, mark: Mark) -> None:
        _merge(self.clocks["transfer"], mark.clock)

    def launch_on_nccl(self, queue: str, buffer: torch.Tensor, *, writes: bool) -> Mark:
        """A send or receive, launched from the current stream; the mark is its end."""
        _merge(self.clocks[queue], self.clocks[self.current])
        return self.access(queue, buffer, writes=writes)

    def access(self, queue: str, buffer: torch.Tensor, *, writes: bool) -> Mark:
        """Work in a queue that reads or writes a buffer; notes a race with earlier work on it, if there is one."""
        clock = self.clocks[queue]
        _merge(clock, self.clocks["host"])
        clock[queue] = clock.get(queue, 0) + 1
        address = buffer.data_ptr()
        access = Access(queue, clock[queue], f"{queue} {'writes' if writes else 'reads'}")
        last_write = self.writes.get(address)
        conflicting = ([last_write] if last_write else []) + (self.reads[address] if writes else [])
        for earlier in conflicting:
            if clock.get(earlier.queue, 0) < earlier.time:
                self.races.append(f"{access.what} what {earlier.what}")
        if writes:
            self.writes[address] = access
            self.reads[address] = []
        else:
            self.reads[address].append(access)
        return self._mark(queue)

    def _mark(self, queue: str) -> Mark:
        return Mark(self, dict(self.clocks[queue]))


def _merge(clock: Clock, other: Clock) -> None:
    for queue, time in other.items():
        clock[queue] = max(clock.get(queue, 0), time)

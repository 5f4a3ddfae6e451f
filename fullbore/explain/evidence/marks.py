"""Log lines that matter whichever engine wrote them: hangs, memory, links, aborts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from fullbore.explain.facts import Fact, Source

_SHOWN_CHARS = 200


class MarkKind(NamedTuple):
    name: str
    needle: str  # cheap test before the pattern
    pattern: re.Pattern[str]


_KINDS = [
    MarkKind(name, needle, re.compile(pattern))
    for name, needle, pattern in (
        ("collective-timeout", "Watchdog caught", r"Watchdog caught collective operation timeout"),
        (
            "collective-timeout",
            "NCCL",
            r"NCCL.*(?:operation timed? ?out|timeout exceeded|ncclRemoteError|remote process exited)",
        ),
        ("collective-timeout", "imed out waiting", r"[Tt]imed out waiting \d+ ?ms for (?:recv|send)"),
        ("scheduler-watchdog", "atchdog", r"[Ww]atchdog (?:timeout|timed out)|self\.watchdog_timeout"),
        ("broadcast-stuck", "shared memory broadcast", r"No available shared memory broadcast block found"),
        ("rpc-timeout", "imed out", r"RPC call to \w+ timed out|EngineCore.*timed out|execute_model timed out"),
        ("engine-dead", "ead", r"EngineDeadError|Engine core proc\w* .*died|worker .*died|Worker proc .*died"),
        ("engine-dead", "ctor", r"RayActorError|ActorDiedError|actor died unexpectedly"),
        ("killed", "exit", r"exit(?:ed with)? code:? -9|signal 9|SIGKILL"),
        (
            "out-of-memory",
            "emory",
            r"CUDA out of memory|OutOfMemoryError|HIP out of memory|cudaMalloc failed: out of memory",
        ),
        ("no-kv-memory", "emory", r"No available memory for the cache blocks|Not enough memory\. Please try"),
        ("retraction", "etract", r"KV cache pool is full\. Retract|[Rr]etract(?:ed)? requests?|#retracted"),
        ("retraction", "KV cache", r"failed to find (?:a |free )+(?:space|slot)[^\n]* KV cache"),
        ("preemption", "preempt", r"preempted by|Preempting|is preempted"),
        ("network-socket", "NET/Socket", r"via NET/Socket|NET/Socket : Using"),
        ("network-socket", "Using network Socket", r"Using network Socket"),
        ("network-rdma", "NET/IB", r"via NET/IB|NET/IB : Using"),
        ("network-rdma", "Using network IB", r"Using network IB|Using network AWS"),
        ("peer-direct", "via P2P", r"via P2P"),
        ("peer-through-memory", "via SHM", r"via SHM"),
        (
            "no-peer-access",
            "P2P",
            r"P2P is disabled|GPU P2P capability or P2P test failed|peer access is not supported",
        ),
        (
            "eager-forced",
            "aph",
            r"[Cc]uda ?[Gg]raph is disabled|[Cc]udagraph is disabled|To see the debug.*enforce_eager",
        ),
        ("no-output-received", "esponse", r"no response from|Health check failed"),
    )
]
_NEEDLES = tuple({kind.needle for kind in _KINDS})
_INTERFACE = re.compile(r"Using \[\d+\]([\w:]+?)[:<]")


@dataclass
class Mark:
    """All lines of one kind: how many, and the first and last."""

    name: str
    count: int
    first: Source
    last: Source
    text: str

    def fact(self) -> Fact:
        times = f"{self.count} times, first: " if self.count > 1 else ""
        return Fact(f'{times}"{self.text}"', self.count, self.first)


class Marks:
    def __init__(self) -> None:
        self.found: dict[str, Mark] = {}
        self.interface: str | None = None  # network interface that NCCL uses over sockets

    def read_line(self, line: str, source: Source) -> bool:
        if not any(needle in line for needle in _NEEDLES):
            return False
        is_taken = False
        for kind in _KINDS:
            if kind.needle in line and kind.pattern.search(line):
                self._take(kind.name, line, source)
                is_taken = True
        return is_taken

    def get(self, *names: str) -> Mark | None:
        """The first of these kinds that occurs."""
        return next((self.found[name] for name in names if name in self.found), None)

    def _take(self, name: str, line: str, source: Source) -> None:
        if name == "network-socket" and (match := _INTERFACE.search(line)) is not None:
            self.interface = match[1]
        mark = self.found.get(name)
        if mark is None:
            self.found[name] = Mark(name, 1, source, source, line.strip()[:_SHOWN_CHARS])
        else:
            mark.count += 1
            mark.last = source

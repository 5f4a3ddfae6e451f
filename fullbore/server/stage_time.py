"""How stages spent their time since the engine's start: counters brought up to date when somebody looks."""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import replace

from fullbore.telemetry.accounting import BUSY, CAUSES, Recording, account

IDLE_CAUSES = tuple(cause for cause in CAUSES if cause not in BUSY)
LONGEST_WINDOW_S = 120.0  # accounted at once; what nobody looked at for longer is left out


class RecordsSource(Protocol):
    """The engine's client."""

    async def records(self, seconds: float, since_ns: int | None = None) -> Recording: ...


class StageTime:
    """Idle time by cause, and how busy each stage has been since the last look."""

    def __init__(self) -> None:
        self.idle_ns: list[dict[str, int]] = []  # per stage; empty before the first look
        self.busy_ratio: list[float] = []
        self._until_ns: int | None = None
        self._lock = asyncio.Lock()

    async def update(self, engine: RecordsSource) -> None:
        """Accounts for the time since the last call. Raises EngineDeadError."""
        async with self._lock:
            recording = await engine.records(LONGEST_WINDOW_S, self._until_ns)
            start_ns = max(recording.start_ns, recording.end_ns - round(LONGEST_WINDOW_S * 1e9))
            if start_ns < recording.end_ns:
                # In a thread: tokens on their way to clients must not wait for it.
                self._add(await asyncio.to_thread(account, replace(recording, start_ns=start_ns)))
            self._until_ns = recording.end_ns  # at last: a caller that loses patience loses nothing else

    def _add(self, totals: list[dict[str, int]]) -> None:
        if not self.idle_ns:
            self.idle_ns = [dict.fromkeys(IDLE_CAUSES, 0) for _ in totals]
        for idle_ns, total in zip(self.idle_ns, totals, strict=True):
            for cause in IDLE_CAUSES:
                idle_ns[cause] += total[cause]
        self.busy_ratio = [sum(total[cause] for cause in BUSY) / sum(total.values()) for total in totals]

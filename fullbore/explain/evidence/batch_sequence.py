"""The batches that one rank formed, in order, in bounded memory: what stages are compared by."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from fullbore.explain.facts import Source

KEPT = 30_000  # batches of each rank; up to twice as many are held


class Batch(NamedTuple):
    """One batch line. Decode batches have no new sequences."""

    new_seqs: int
    new_tokens: int
    cached_tokens: int
    running: int
    queued: int

    @property
    def is_prefill(self) -> bool:
        return self.new_seqs >= 0

    @property
    def composition(self) -> tuple[int, ...]:
        """What must be equal on every stage. Queue lengths may differ by requests that are still being forwarded."""
        return (self.new_seqs, self.new_tokens, self.cached_tokens) if self.is_prefill else (-1, self.running)

    def __str__(self) -> str:
        if not self.is_prefill:
            return f"decode, #running-req {self.running}"
        return f"#new-seq {self.new_seqs}, #new-token {self.new_tokens}, #cached-token {self.cached_tokens}"


@dataclass
class BatchSequence:
    """The newest batches; `dropped` older ones are not kept. Files are numbered in `files`."""

    dropped: int = 0

    def __post_init__(self) -> None:
        self._values = array("q")
        self._lines = array("q")
        self.files: list[str] = []

    def add(self, batch: Batch, source: Source) -> None:
        if not self.files or self.files[-1] != source.file:
            self.files.append(source.file)
        self._values.extend(batch)
        self._lines.append((len(self.files) - 1) << 40 | (source.line or 0))
        if len(self._lines) >= 2 * KEPT:
            del self._values[: KEPT * 5]
            del self._lines[:KEPT]
            self.dropped += KEPT

    def __len__(self) -> int:
        return len(self._lines)

    def batch(self, position: int) -> Batch:
        return Batch(*self._values[position * 5 : position * 5 + 5])

    def source(self, position: int) -> Source:
        packed = self._lines[position]
        return Source(self.files[packed >> 40], packed & ((1 << 40) - 1))

"""One rank's PyTorch profiler trace: when its GPU computed, communicated, or did neither.

A spinning NCCL receive occupies the GPU and a blocked one does not; neither is computing, so both read the same here.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from fullbore.explain.evidence.files import EvidenceFile
from fullbore.explain.evidence.trace_events import TraceStream
from fullbore.explain.facts import Source
from fullbore.explain.series import Series

Interval = tuple[float, float]  # begin and end, µs

BLOB_GAP_US = 300.0  # kernels closer than this belong to one stretch of work
_MAX_INTERVALS = 200_000

_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|sendrecv|cross_device_reduce", re.I)
_POINT_TO_POINT = re.compile(r"sendrecv|send|recv", re.I)
_EXCHANGE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce", re.I)
_STEP = re.compile(r"step\[(\w+) bs=(\d+)")
_BATCH_SPAN = re.compile(r"^(?:run_batch|forward|execute_model|model_forward)", re.I)
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.I)
_STAGE_IN_NAME = re.compile(r"\bPP[-_]?(\d+)", re.I)
_HOST_SPANS = ("recv_requests", "process_input_requests", "get_next_batch_to_run", "process_batch_result")


@dataclass
class TraceRank:
    """One rank. Times are µs on the trace's own clock; `base_us` makes ranks of one machine comparable."""

    source: Source
    rank: int | None = None
    world_size: int | None = None
    stage: int | None = None
    device: str | None = None
    base_us: float = 0.0
    compute: list[Interval] = field(default_factory=list)  # merged, exact
    exchanges: list[Interval] = field(default_factory=list)  # of tensor ranks, in the middle of their work; merged
    exchange_kernels: int = 0
    point_to_point_kernels: int = 0
    kernels: int = 0
    launches: int = 0
    graph_launches: int = 0
    batch_sizes: Series = field(default_factory=Series)
    decode_steps: int = 0
    extend_steps: int = 0
    host_us: dict[str, float] = field(default_factory=dict)
    has_device_events: bool = False
    begin_us: float = float("inf")
    end_us: float = float("-inf")
    problem: str | None = None

    @property
    def window_us(self) -> float:
        return max(self.end_us - self.begin_us, 0.0)

    @property
    def compute_us(self) -> float:
        return sum(end - begin for begin, end in self.compute)

    def kernels_us(self) -> list[Interval]:
        """Computing and exchanging."""
        return merge([*self.compute, *self.exchanges], 0.0)

    @property
    def kernel_us(self) -> float:
        return sum(end - begin for begin, end in self.kernels_us())

    def blobs(self) -> list[Interval]:
        """Stretches of work: compute and exchanges, with the short gaps between kernels included."""
        stretches = merge([*self.compute, *self.exchanges], BLOB_GAP_US)
        return [stretch for stretch in stretches if self._has_compute(stretch)]

    def _has_compute(self, stretch: Interval) -> bool:
        """An exchange by itself is not work."""
        position = bisect_left(self.compute, (stretch[0], 0.0))
        return position < len(self.compute) and self.compute[position][0] < stretch[1]


def read(file: EvidenceFile) -> TraceRank:
    """Reads one trace, in memory bounded by the number of gaps in it."""
    rank = TraceRank(Source(file.name))
    stream = TraceStream(file)
    device: list[Interval] = []
    host: list[Interval] = []
    for event in stream:
        _take(event, rank, device, host)
        for intervals in (device, host, rank.exchanges):
            if len(intervals) > 2 * _MAX_INTERVALS:
                intervals[:] = merge(intervals, 0.0)
                if len(intervals) > _MAX_INTERVALS:
                    intervals[:] = merge(intervals, 10.0)
    rank.compute = merge(device if rank.has_device_events else host, 0.0)
    rank.exchanges = merge(rank.exchanges, 0.0)
    rank.problem = stream.problem
    _read_metadata(stream.outside, file.name, rank)
    return rank


def merge(intervals: list[Interval], gap_us: float) -> list[Interval]:
    """The union, with gaps up to `gap_us` closed."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1] + gap_us:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def _take(event: dict[str, Any], rank: TraceRank, device: list[Interval], host: list[Interval]) -> None:
    if event.get("ph") != "X":
        return
    begin, duration = event.get("ts"), event.get("dur", 0)
    try:
        begin, duration = float(begin), float(duration)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
    end = begin + max(duration, 0.0)
    rank.begin_us, rank.end_us = min(rank.begin_us, begin), max(rank.end_us, end)
    if category in ("kernel", "gpu_memset"):
        rank.has_device_events = True
        _take_kernel(name, begin, end, rank, device)
    elif category == "gpu_memcpy":
        rank.has_device_events = True
        if "PtoP" not in name and "Peer" not in name:
            device.append((begin, end))
    elif category == "cuda_runtime" or category == "cuda_driver":
        if "GraphLaunch" in name:
            rank.graph_launches += 1
        elif "LaunchKernel" in name:
            rank.launches += 1
    else:
        _take_span(name, begin, end, rank, host)


def _take_kernel(name: str, begin: float, end: float, rank: TraceRank, device: list[Interval]) -> None:
    if not _COMMUNICATION.search(name):
        rank.kernels += 1
        device.append((begin, end))
        return
    if _POINT_TO_POINT.search(name):
        rank.point_to_point_kernels += 1
    elif _EXCHANGE.search(name):
        rank.exchange_kernels += 1
        rank.exchanges.append((begin, end))


def _take_span(name: str, begin: float, end: float, rank: TraceRank, host: list[Interval]) -> None:
    if (step := _STEP.search(name)) is not None:
        rank.batch_sizes.add(int(step[2]))
        if "DECODE" in step[1].upper():
            rank.decode_steps += 1
        else:
            rank.extend_steps += 1
        host.append((begin, end))
    elif _BATCH_SPAN.match(name):
        host.append((begin, end))
    elif name in _HOST_SPANS:
        rank.host_us[name] = rank.host_us.get(name, 0.0) + end - begin


def _read_metadata(text: str, file: str, rank: TraceRank) -> None:
    info = re.search(r"\"distributedInfo\"\s*:\s*(\{[^}]*\})", text)
    if info is not None:
        try:
            found = json.loads(info[1])
        except ValueError:
            found = {}
        rank.rank = found.get("rank") if isinstance(found.get("rank"), int) else None
        rank.world_size = found.get("world_size") if isinstance(found.get("world_size"), int) else None
    if rank.rank is None and (match := _RANK_IN_NAME.search(file)) is not None:
        rank.rank = int(match[1])
    if (match := _STAGE_IN_NAME.search(file)) is not None:
        rank.stage = int(match[1])
    if (base := re.search(r"\"baseTimeNanoseconds\"\s*:\s*(\d+)", text)) is not None:
        rank.base_us = int(base[1]) / 1000
    if (device := re.search(r"\"deviceProperties\"[^]]*?\"name\"\s*:\s*\"([^\"]+)\"", text)) is not None:
        rank.device = device[1]

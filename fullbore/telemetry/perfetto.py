"""A recording as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open as it is.

One track per stage, on which work and waits follow each other without a gap; a wait is named after its main cause and
carries the others as arguments. Arrows follow each micro-batch from stage to stage. The driver's events and the
scheduler's state are a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from fullbore.telemetry.accounting import Piece, pieces
from fullbore.telemetry.recording import Timeline
from fullbore.telemetry.spans import DriverRecord, StageRecord

STAGES_PID = 1
DRIVER_PID = 2
_EVENTS_TID = 1

# Between neighbours: a viewer that rounds both to whole nanoseconds must not see them overlap.
_GAP_NS = 2
_INSIDE_NS = 10  # so far before a slice's end an arrow still begins inside it

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The whole document; `json.dumps` of it is the file. Times count from the recording's start."""
    trace = _Trace(timeline)
    events = [*trace.names(), *trace.work(), *trace.waits(), *trace.flows(), *trace.driver()]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"fullbore": timeline.fullbore, "model": timeline.model},
    }


class _Trace:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._recording = recording = timeline.recording
        in_window = [
            r
            for r in recording.stage_records
            if r.compute_start_ns < recording.end_ns and _end_ns(r) > recording.start_ns
        ]
        self._records = sorted(in_window, key=lambda r: (r.micro_batch_id, r.stage))
        self._events = [r for r in recording.driver_records if recording.start_ns <= r.at_ns <= recording.end_ns]
        self._launches = {r.micro_batch_id: r for r in recording.driver_records if r.event == "launch"}

    def names(self) -> Iterator[Event]:
        """Names and order of processes and tracks."""
        yield _meta("process_name", STAGES_PID, 0, name="stages")
        yield _meta("process_sort_index", STAGES_PID, 0, sort_index=1)
        yield _meta("process_name", DRIVER_PID, 0, name="driver")
        yield _meta("process_sort_index", DRIVER_PID, 0, sort_index=2)
        yield _meta("thread_name", DRIVER_PID, _EVENTS_TID, name="events")
        for stage in range(self._recording.pp_size):
            yield _meta("thread_name", STAGES_PID, _tid(stage), name=self._stage_name(stage))
            yield _meta("thread_sort_index", STAGES_PID, _tid(stage), sort_index=stage)

    def work(self) -> Iterator[Event]:
        """A slice for each step, with compute, sampling and sending inside."""
        for r in self._records:
            args = self._step_args(r)
            yield from self._slice(r.stage, self._step_name(r), "step", r.compute_start_ns, _end_ns(r), args)
            for name, category, begin_ns, end_ns in (
                ("compute", "compute", r.compute_start_ns, r.compute_end_ns),
                ("sample", "host", r.compute_end_ns, r.sample_end_ns),
                ("send", "host", r.send_start_ns, r.send_end_ns),
            ):
                yield from self._slice(r.stage, name, category, begin_ns, end_ns - _GAP_NS)

    def waits(self) -> Iterator[Event]:
        """A slice for each wait, named after its main cause."""
        for stage, stage_pieces in enumerate(pieces(self._recording)):
            for piece in stage_pieces:
                if piece.is_wait:
                    args = _shares_ms(piece)
                    yield from self._slice(stage, piece.main_cause, "idle", piece.begin_ns, piece.end_ns, args)

    def flows(self) -> Iterator[Event]:
        """Arrows from the end of a micro-batch's step on one stage to its step on the next."""
        for record, following in pairwise(self._records):
            is_next = (following.micro_batch_id, following.stage) == (record.micro_batch_id, record.stage + 1)
            if is_next and record.compute_end_ns - _INSIDE_NS > self._recording.start_ns:
                flow = {"name": "micro-batch", "cat": "flow", "id": record.micro_batch_id * 1000 + record.stage}
                yield {**flow, "ph": "s", **self._at(record.stage, record.compute_end_ns - _INSIDE_NS)}
                yield {**flow, "ph": "f", "bp": "e", **self._at(following.stage, following.compute_start_ns)}

    def driver(self) -> Iterator[Event]:
        """An instant for each event in the driver, and the scheduler's state as counters."""
        for record in self._events:
            at = {"ts": self._us(record.at_ns), "pid": DRIVER_PID, "tid": _EVENTS_TID}
            yield {"name": _event_name(record), "cat": "driver", "ph": "i", "s": "t", **at, "args": _event_args(record)}
            counters = {
                "requests": {"running": record.running, "waiting": record.waiting},
                "micro-batches in flight": {"in flight": record.in_flight},
                "free KV blocks": {"free": record.free_blocks},
            }
            for name, values in counters.items():
                yield {"name": name, "cat": "driver", "ph": "C", **at, "args": values}

    def _slice(
        self, stage: int, name: str, category: str, begin_ns: int, end_ns: int, args: Event | None = None
    ) -> Iterator[Event]:
        """A slice, as far as it lies in the window."""
        begin_ns = max(begin_ns, self._recording.start_ns)
        duration_ns = min(end_ns, self._recording.end_ns) - begin_ns - _GAP_NS
        if duration_ns > 0:
            at = self._at(stage, begin_ns)
            yield {"name": name, "cat": category, "ph": "X", **at, "dur": duration_ns / 1e3, "args": args or {}}

    def _at(self, stage: int, at_ns: int) -> Event:
        return {"ts": self._us(at_ns), "pid": STAGES_PID, "tid": _tid(stage)}

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._recording.start_ns) / 1e3

    def _stage_name(self, stage: int) -> str:
        if not self._timeline.stages:
            return f"stage {stage}"
        description = self._timeline.stages[stage]
        return f"stage {stage} (layers {description.layers[0]}-{description.layers[1] - 1}, {description.device})"

    def _step_name(self, record: StageRecord) -> str:
        launch = self._launches.get(record.micro_batch_id)
        if launch is None:
            return f"micro-batch {record.micro_batch_id}"
        parts = []
        if launch.prefill_tokens:
            parts.append(f"prefill {launch.prefill_tokens}")
        if launch.num_decodes:
            parts.append(f"decode {launch.num_decodes}")
        return " + ".join(parts)

    def _step_args(self, record: StageRecord) -> Event:
        args: Event = {"micro_batch": record.micro_batch_id}
        launch = self._launches.get(record.micro_batch_id)
        if launch is not None:
            args |= {"requests": launch.num_requests, "launched because": launch.reason}
        return args


def _tid(stage: int) -> int:
    return stage + 1  # 0 is taken by the process in some viewers


def _end_ns(record: StageRecord) -> int:
    return max(record.sample_end_ns, record.send_end_ns)


def _meta(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _shares_ms(piece: Piece) -> Event:
    shares = sorted(piece.causes.items(), key=lambda item: -item[1])
    return {f"{cause} (ms)": round(ns * 1e-6, 4) for cause, ns in shares if ns > 0}


def _event_name(record: DriverRecord) -> str:
    return f"launch ({record.reason})" if record.event == "launch" else record.event


def _event_args(record: DriverRecord) -> Event:
    args: Event = {"running": record.running, "waiting": record.waiting, "ready": record.ready}
    if record.micro_batch_id >= 0:
        args["micro_batch"] = record.micro_batch_id
    return args

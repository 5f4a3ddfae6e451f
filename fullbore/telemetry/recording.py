"""Recordings with their context, as files (.fbr) and as the JSON of /timeline; see docs/recording-format.md."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from fullbore.errors import RecordingError
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.spans import DriverRecord, StageRecord

FORMAT_VERSION = 1
_HEADER = struct.Struct(">8sH")  # magic, format version
_MAGIC = b"fullbore"


class StageDescription(Struct):
    """What a stage is."""

    layers: tuple[int, int]  # first layer, end (exclusive)
    device: str


class Timeline(Struct, kw_only=True):
    """A recording, and what it is a recording of. `stage_fields` and `driver_fields` name the items of a record."""

    version: int = FORMAT_VERSION
    fullbore: str = ""  # version of the software that recorded it
    model: str = ""
    stages: list[StageDescription] = []
    captured_unix_s: float = 0.0  # at `recording.end_ns`
    stage_fields: tuple[str, ...] = StageRecord.__struct_fields__
    driver_fields: tuple[str, ...] = DriverRecord.__struct_fields__
    recording: Recording

    @property
    def window_s(self) -> float:
        return (self.recording.end_ns - self.recording.start_ns) * 1e-9


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Writes a file that is either complete or not there. Raises RecordingError."""
    data = _HEADER.pack(_MAGIC, FORMAT_VERSION) + gzip.compress(msgspec.msgpack.encode(timeline), compresslevel=6)
    write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name first, so that nobody ever finds half of it. Raises RecordingError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RecordingError(f"{path} cannot be written: {error.strerror}.") from None


def read_timeline(path: Path) -> Timeline:
    """Reads what `write_timeline` wrote.

    Raises:
        RecordingError: it is missing, something else, cut off or damaged, or of a newer format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}.") from None
    if not data.startswith(_MAGIC):
        raise RecordingError(
            f"{path} is not a fullbore recording; make one with `fullbore record --url URL -o run.fbr`."
        )
    try:
        _, version = _HEADER.unpack_from(data)
        _check_version(version, str(path))
        timeline = msgspec.msgpack.decode(gzip.decompress(data[_HEADER.size :]), type=Timeline)
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error, msgspec.DecodeError):
        raise RecordingError(f"{path} is cut off or damaged ({len(data)} bytes); record it again.") from None
    return _checked(timeline, str(path))


def decode_timeline(data: bytes, source: str) -> Timeline:
    """Reads the JSON of /timeline. Raises RecordingError, naming `source`."""
    try:
        _check_version(msgspec.json.decode(data, type=_Versioned).version, source)
        timeline = msgspec.json.decode(data, type=Timeline)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{source} did not answer with a fullbore timeline ({error}).") from None
    return _checked(timeline, source)


def join(parts: Sequence[Recording]) -> Recording:
    """One recording from several of the same engine, each of which begins where the one before ends (or earlier).

    Raises:
        RecordingError: there is a gap between two, or the engine is another one (see `check_follows`).
    """
    for first, second in pairwise(parts):
        check_follows(first, second)
    stage_records: list[StageRecord] = []
    driver_records: list[DriverRecord] = []
    last_ids: dict[int, int] = {}
    last_event_ns = -1
    for part in parts:
        stage_records += [r for r in part.stage_records if r.micro_batch_id > last_ids.get(r.stage, -1)]
        last_ids |= {record.stage: record.micro_batch_id for record in part.stage_records}  # of each stage in order
        driver_records += [r for r in part.driver_records if r.at_ns > last_event_ns]
        last_event_ns = driver_records[-1].at_ns if driver_records else -1
    last = parts[-1]
    return replace(last, start_ns=parts[0].start_ns, stage_records=stage_records, driver_records=driver_records)


def check_follows(first: Recording, second: Recording) -> None:
    """Raises RecordingError unless `second` goes on where `first` ends."""
    if second.start_ns > first.end_ns or second.end_ns < first.end_ns or second.pp_size != first.pp_size:
        raise RecordingError("The recording has a gap: the server was restarted, or was asked too late.")


class _Versioned(Struct):
    version: int


def _check_version(version: int, source: str) -> None:
    if version > FORMAT_VERSION:
        raise RecordingError(
            f"{source} comes from a newer fullbore (format {version}; this one reads up to {FORMAT_VERSION}); update."
        )


def _checked(timeline: Timeline, source: str) -> Timeline:
    recording = timeline.recording
    is_sound = (
        recording.pp_size >= 1
        and recording.start_ns <= recording.end_ns
        and len(timeline.stages) in (0, recording.pp_size)
        and all(0 <= record.stage < recording.pp_size for record in recording.stage_records)
    )
    if not is_sound:
        raise RecordingError(f"{source} is damaged: its stages or times contradict each other; record it again.")
    return timeline

"""The .fbr format: what is written is read again, and nothing else is."""

from __future__ import annotations

import gzip
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from recordings import simulated_recording, simulated_timeline

from fullbore.errors import RecordingError
from fullbore.telemetry.accounting import Recording, account
from fullbore.telemetry.recording import (
    FORMAT_VERSION,
    Timeline,
    decode_timeline,
    join,
    read_timeline,
    write_timeline,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.fbr"
    write_timeline(path, simulated_timeline())
    return path


def test_what_is_written_is_read(file: Path) -> None:
    assert read_timeline(file) == simulated_timeline()
    assert [path.name for path in file.parent.iterdir()] == ["run.fbr"]


def test_json_is_the_same(file: Path) -> None:
    assert decode_timeline(msgspec.json.encode(simulated_timeline()), "server") == read_timeline(file)


def test_the_format_is_the_documented_one(file: Path) -> None:
    """Read by hand, as docs/recording-format.md says."""
    data = file.read_bytes()
    assert data[:8] == b"fullbore"
    assert struct.unpack(">H", data[8:10]) == (FORMAT_VERSION,)
    document: dict[str, Any] = msgspec.msgpack.decode(gzip.decompress(data[10:]))
    assert document["version"] == FORMAT_VERSION
    assert document["stages"][1] == {"layers": [2, 4], "device": "cpu"}
    recording = document["recording"]
    assert list(recording) == [
        "pp_size",
        "in_flight_limit",
        "start_ns",
        "end_ns",
        "stage_records",
        "driver_records",
        "decode_s",
    ]
    step = dict(zip(document["stage_fields"], recording["stage_records"][0], strict=True))
    assert step["compute_start_ns"] < step["compute_end_ns"]
    event = dict(zip(document["driver_fields"], recording["driver_records"][0], strict=True))
    assert event["event"] == "arrival"


def test_later_additions_are_no_obstacle(file: Path) -> None:
    """Further keys, and further items at the end of a record, do not make a file unreadable."""
    document = msgspec.msgpack.decode(gzip.decompress(file.read_bytes()[10:]))
    document["colour"] = "red"
    document["recording"]["stage_records"] = [[*record, 7] for record in document["recording"]["stage_records"]]
    data = b"fullbore" + struct.pack(">H", FORMAT_VERSION) + gzip.compress(msgspec.msgpack.encode(document))
    file.write_bytes(data)
    assert read_timeline(file) == simulated_timeline()


@pytest.mark.parametrize("content", [b"", b"fullbor", b"{}", b"\x1f\x8b", b"GIF89a" * 100])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="other is not a fullbore recording"):
        read_timeline(path)


def test_file_cut_off_anywhere(file: Path) -> None:
    data = file.read_bytes()
    for length in [8, 9, 10, 11, 20, *range(30, len(data), 97), len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(RecordingError, match="cut off or damaged"):
            read_timeline(file)


def test_damaged_file(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for position in range(10, len(data), 131):
        damaged = data.copy()
        damaged[position] ^= 0x55
        file.write_bytes(damaged)
        try:
            timeline = read_timeline(file)
        except RecordingError:
            continue
        assert timeline == simulated_timeline(), "only what gzip does not use may be changed unnoticed"


def test_file_of_a_newer_version(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:8] + struct.pack(">H", FORMAT_VERSION + 1) + b"who knows")
    with pytest.raises(RecordingError, match="newer fullbore"):
        read_timeline(file)


@pytest.mark.parametrize(
    "changes",
    [{"pp_size": 2}, {"pp_size": 0}, {"start_ns": 2 * 10**12, "end_ns": 10**12}],
)
def test_contradictions(file: Path, changes: dict[str, Any]) -> None:
    timeline = simulated_timeline()
    write_timeline(file, replace(timeline, recording=replace(timeline.recording, **changes)))
    with pytest.raises(RecordingError, match="contradict"):
        read_timeline(file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        read_timeline(tmp_path / "none.fbr")
    with pytest.raises(RecordingError, match="cannot be written"):
        write_timeline(tmp_path / "none" / "run.fbr", simulated_timeline())


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"[]", b'{"version": 1}', b'{"version": 1, "recording": {"pp_size": "2"}}']
)
def test_answer_of_another_server(data: bytes) -> None:
    with pytest.raises(RecordingError, match="here did not answer with a fullbore timeline"):
        decode_timeline(data, "here")


def test_answer_of_a_newer_server() -> None:
    with pytest.raises(RecordingError, match="newer"):
        decode_timeline(b'{"version": 2, "recording": "of another kind"}', "here")


# ------------------------------------------------------------------------------------------------------------- joining


def part(whole: Recording, start_ns: int, end_ns: int) -> Recording:
    """What a server would have answered at `end_ns`, with some context before `start_ns`."""
    context_ns = start_ns - 100_000_000
    return replace(
        whole,
        start_ns=start_ns,
        end_ns=end_ns,
        stage_records=[r for r in whole.stage_records if context_ns <= r.send_end_ns <= end_ns],
        driver_records=[r for r in whole.driver_records if context_ns <= r.at_ns <= end_ns],
    )


def test_parts_add_up_to_the_whole() -> None:
    whole = simulated_recording()
    bounds = [whole.start_ns + n * (whole.end_ns - whole.start_ns) // 5 for n in range(6)]
    parts = [part(whole, bounds[0], bounds[0])]
    for start_ns, end_ns in pairwise(bounds):
        parts.append(replace(part(whole, start_ns, end_ns), decode_s=[{1: end_ns * 1.0}]))
    joined = join(parts)
    expected = part(whole, bounds[0], bounds[-1])
    assert sorted(joined.stage_records, key=str) == sorted(expected.stage_records, key=str)
    assert joined.driver_records == expected.driver_records
    assert account(joined) == account(expected)
    assert joined.decode_s == [{1: bounds[-1]}]


def test_gaps_are_not_glossed_over() -> None:
    whole = simulated_recording()
    middle_ns = (whole.start_ns + whole.end_ns) // 2
    first = part(whole, whole.start_ns, middle_ns)
    with pytest.raises(RecordingError, match="gap"):
        join([first, part(whole, middle_ns + 1, whole.end_ns)])
    with pytest.raises(RecordingError, match="gap"):
        join([first, part(whole, whole.start_ns, middle_ns - 1)])
    with pytest.raises(RecordingError, match="gap"):
        join([first, replace(first, pp_size=2)])


def test_empty_timeline_can_be_written(tmp_path: Path) -> None:
    timeline = Timeline(recording=Recording(1, 2, 5, 5, [], []))
    write_timeline(tmp_path / "run.fbr", timeline)
    assert read_timeline(tmp_path / "run.fbr") == timeline

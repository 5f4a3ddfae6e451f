"""The Perfetto export against the trace-event format."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from recordings import simulated_timeline

from fullbore.telemetry.accounting import CAUSES, account
from fullbore.telemetry.perfetto import DRIVER_PID, STAGES_PID, chrome_trace

Event = dict[str, Any]
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA["thread_sort_index"] = "sort_index"


@pytest.fixture(scope="module")
def events() -> list[Event]:
    document = json.loads(json.dumps(chrome_trace(simulated_timeline())))
    validate(document)
    events: list[Event] = document["traceEvents"]
    return events


def validate(document: Any) -> None:
    """The rules of the trace-event format for the phases that are used (JSON object format)."""
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            continue
        assert isinstance(event["ts"], float | int)
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert isinstance(event["args"], dict)
        elif event["ph"] in "sf":
            assert type(event["id"]) is int
            assert event["ph"] == "s" or event["bp"] == "e"
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            raise AssertionError(f"phase {event['ph']} is not expected")
    slices = tracks(document["traceEvents"])
    for track in slices.values():
        assert_nested(track)
    assert_flows_join_slices(document["traceEvents"], slices)


def tracks(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def assert_nested(track: list[Event]) -> None:
    """Slices of one track lie within or beside each other, also in whole nanoseconds rounded down."""
    ordered = sorted(track, key=lambda e: (e["ts"], -e["dur"]))
    open_until: list[int] = []
    for event in ordered:
        begin = int(event["ts"] * 1000)
        end = begin + int(event["dur"] * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def assert_flows_join_slices(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    assert flows
    for start, end in flows.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for event in (start, end):
            track = slices[event["pid"], event["tid"]]
            assert any(e["cat"] == "step" and e["ts"] <= event["ts"] <= e["ts"] + e["dur"] for e in track)


def test_tracks_are_named_and_in_order(events: list[Event]) -> None:
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [named[STAGES_PID, stage + 1] for stage in range(3)] == [
        "stage 0 (layers 0-1, cpu)",
        "stage 1 (layers 2-3, cpu)",
        "stage 2 (layers 4-5, cpu)",
    ]
    assert (DRIVER_PID, 1) in named


def test_every_micro_batch_is_followed_through_all_stages(events: list[Event]) -> None:
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "step":
            steps[event["args"]["micro_batch"]].append(event)
    whole = [group for group in steps.values() if len(group) == 3]
    assert len(whole) > 10
    num_flows = sum(event["ph"] == "s" for event in events)
    assert num_flows >= 2 * len(whole)
    for group in whole:
        assert [event["tid"] for event in sorted(group, key=lambda e: e["ts"])] == [1, 2, 3]
        assert all(event["name"].startswith(("decode", "prefill")) for event in group)


def test_waits_show_their_causes_and_add_up_to_the_account(events: list[Event]) -> None:
    timeline = simulated_timeline()
    totals_ms: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "idle":
            assert event["name"] in CAUSES
            assert next(iter(event["args"])) == f"{event['name']} (ms)"
            for name, ms in event["args"].items():
                totals_ms[event["tid"] - 1, name.removesuffix(" (ms)")] += ms
    for stage, total in enumerate(account(timeline.recording)):
        for cause, ns in total.items():
            if cause not in ("compute", "host"):
                assert totals_ms[stage, cause] == pytest.approx(ns * 1e-6, abs=0.05)
    assert sum(totals_ms.values()) > 10


def test_a_stage_is_always_at_work_or_waiting(events: list[Event]) -> None:
    """No gap on a track but what the driver's view would call host time (here none)."""
    for track in tracks(events).values():
        outer = sorted((e for e in track if e["cat"] in ("step", "idle")), key=lambda e: e["ts"])
        assert all(0 < after["ts"] - (e["ts"] + e["dur"]) < 0.01 for e, after in pairwise(outer))


def test_driver_events_and_state(events: list[Event]) -> None:
    names = {event["name"] for event in events if event["ph"] == "i"}
    assert "result" in names
    assert any(name.startswith("launch (") for name in names)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"requests", "micro-batches in flight", "free KV blocks"}


def test_one_stage_has_no_flows() -> None:
    document = chrome_trace(simulated_timeline(1, 1))
    assert not [event for event in document["traceEvents"] if event["ph"] in "sf"]

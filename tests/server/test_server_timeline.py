"""/timeline, /account and what /metrics says about the stages' time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from recordings import simulated_recording
from running_server import RunningServer, StartServer

from fullbore.collect.timeline import TimelineRecorder, TimelineSource
from fullbore.errors import RecordingError
from fullbore.telemetry.accounting import BUSY, CAUSES, account
from fullbore.telemetry.recording import decode_timeline

WHOLE = simulated_recording(pp_size=2)
WINDOW_S = (WHOLE.end_ns - WHOLE.start_ns) * 1e-9


def test_timeline(server: RunningServer) -> None:
    timeline = decode_timeline(server.get("/timeline?seconds=3600").content, "the server")
    assert timeline.recording == WHOLE
    assert timeline.model == "tiny"
    assert [stage.layers for stage in timeline.stages] == [(0, 2), (2, 4)]
    middle_ns = (WHOLE.start_ns + WHOLE.end_ns) // 2
    later = decode_timeline(server.get(f"/timeline?since_ns={middle_ns}").content, "the server")
    assert later.recording.start_ns == middle_ns


def test_account(server: RunningServer) -> None:
    document = server.get("/account?seconds=3600").json()
    assert document["window_s"] == pytest.approx(WINDOW_S)
    for stage, total in enumerate(account(WHOLE)):
        assert document["stages"][stage]["stage"] == stage
        assert document["stages"][stage]["seconds"] == pytest.approx({c: ns * 1e-9 for c, ns in total.items()})
    assert server.get("/account").status_code == 200
    assert server.engine.records_asked[-1] == (10.0, None)


@pytest.mark.parametrize("query", ["seconds=-1", "seconds=nan", "seconds=1e9", "seconds=x", "since_ns=1.5"])
def test_bad_parameters(server: RunningServer, query: str) -> None:
    response = server.get(f"/timeline?{query}")
    assert response.status_code == 400
    assert query.partition("=")[0] in response.json()["error"]["message"]


def test_dead_engine(server: RunningServer) -> None:
    server.call(server.engine.die)
    for path in ("/timeline", "/account"):
        response = httpx.get(f"{server.url}{path}", timeout=20)
        assert response.status_code == 503
        assert "Stage 1" in response.json()["error"]["message"]


# -------------------------------------------------------------------------------------------------------------- metrics


def samples(server: RunningServer) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values in the order of the labels' names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_idle_time_by_cause(server: RunningServer) -> None:
    totals = account(WHOLE)
    found = samples(server)
    idle_causes = [cause for cause in CAUSES if cause not in BUSY]
    expected = {(cause, str(stage)): totals[stage][cause] * 1e-9 for stage in (0, 1) for cause in idle_causes}
    assert found["fullbore_stage_idle_seconds_total"] == pytest.approx(expected)
    assert max(expected.values()) > 0
    busy = {(str(s),): sum(totals[s][cause] for cause in BUSY) / sum(totals[s].values()) for s in (0, 1)}
    assert found["fullbore_stage_busy_ratio"] == pytest.approx(busy)


def test_idle_time_goes_on_from_the_last_scrape(server: RunningServer) -> None:
    middle_ns = (WHOLE.start_ns + WHOLE.end_ns) // 2
    server.engine.recording = replace(WHOLE, end_ns=middle_ns)
    first = samples(server)["fullbore_stage_idle_seconds_total"]
    assert samples(server)["fullbore_stage_idle_seconds_total"] == first, "no time has passed"
    server.engine.recording = WHOLE
    second = samples(server)["fullbore_stage_idle_seconds_total"]
    assert all(second[labels] >= value for labels, value in first.items())
    parts = [account(replace(WHOLE, end_ns=middle_ns)), account(replace(WHOLE, start_ns=middle_ns))]
    for (cause, stage), value in second.items():
        assert value == pytest.approx(sum(part[int(stage)][cause] for part in parts) * 1e-9)
    assert [since for _, since in server.engine.records_asked] == [None, middle_ns, middle_ns]


def test_long_unwatched_time_is_left_out(server: RunningServer) -> None:
    server.engine.recording = replace(WHOLE, end_ns=WHOLE.start_ns + 10**12)
    found = samples(server)["fullbore_stage_idle_seconds_total"]
    assert sum(value for (_, stage), value in found.items() if stage == "0") == pytest.approx(120)


def test_histograms(server: RunningServer) -> None:
    found = samples(server)
    sizes = found["fullbore_micro_batch_requests_bucket"]
    assert (sizes["1",], sizes["+Inf",]) == (7, 7)
    assert found["fullbore_micro_batch_requests_sum"][()] == 7
    steps = found["fullbore_stage_step_seconds_bucket"]
    assert steps["0.005", "0"] == 0
    assert steps["0.01", "0"] == steps["+Inf", "1"] == 7
    assert found["fullbore_stage_step_seconds_count"]["0",] == 7
    assert found["fullbore_stage_step_seconds_sum"]["1",] == 0.25


def test_dead_engine_leaves_the_other_metrics(server: RunningServer) -> None:
    server.call(server.engine.die)
    found = samples(server)
    assert "fullbore_time_to_first_token_seconds_count" in found
    assert "fullbore_stage_idle_seconds_total" not in found


# ------------------------------------------------------------------------------------------------------------ recording


class Clockwork:
    """Lets the fake engine's time go on by a step at every question."""

    def __init__(self, server: RunningServer, step_ns: int) -> None:
        self.server = server
        self.step_ns = step_ns
        self.end_ns = WHOLE.start_ns + step_ns
        self.questions: list[Callable[[], None]] = []

    def fetch(self, fetch: Callable[..., Any], *args: Any) -> Any:
        self.server.engine.recording = replace(WHOLE, end_ns=min(self.end_ns, WHOLE.end_ns))
        self.end_ns += self.step_ns
        return fetch(*args)


@pytest.fixture
def source(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> TimelineSource:
    monkeypatch.setattr("fullbore.collect.timeline.POLL_S", 0.0)
    clockwork = Clockwork(server, step_ns=60_000_000)
    source = TimelineSource(f"{server.url}/v1/")
    original = source.fetch
    monkeypatch.setattr(source, "fetch", lambda *args: clockwork.fetch(original, *args))
    return source


def test_recording_a_server(source: TimelineSource) -> None:
    progress: list[float] = []
    recorder = TimelineRecorder(source)
    recorder.record(0.2, progress.append)
    assert recorder.timeline is not None
    recording = recorder.timeline.recording
    assert recording.end_ns - recording.start_ns == 200_000_000
    assert len(progress) > 2
    assert progress[-1] == 0.2
    expected = account(replace(WHOLE, start_ns=recording.start_ns, end_ns=recording.end_ns))
    assert account(recording) == expected


def test_what_was_recorded_before_the_server_died_is_kept(source: TimelineSource, server: RunningServer) -> None:
    recorder = TimelineRecorder(source)

    def die_soon(recorded_s: float) -> None:
        if recorded_s > 0.1:
            server.call(server.engine.die)

    with pytest.raises(RecordingError, match="answered 503"):
        recorder.record(10.0, die_soon)
    assert recorder.timeline is not None
    assert recorder.timeline.window_s > 0.1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "http://[", "http://a:b", "nonsense", ""])
def test_no_server(url: str) -> None:
    with pytest.raises(RecordingError, match=r"does not answer|is not a URL"):
        TimelineSource(url).fetch(1.0)


def test_other_server_and_wrong_key(start_server: StartServer) -> None:
    server = start_server(api_key="sk-secret", shutdown_grace_s=0.2)
    with pytest.raises(RecordingError, match="--api-key"):
        TimelineSource(server.url).fetch(1.0)
    with pytest.raises(RecordingError, match="404; is it a fullbore server"):
        TimelineSource(f"{server.url}/docs", "sk-secret").fetch(1.0)
    assert TimelineSource(server.url, "sk-secret").fetch(1.0).model == "tiny"


def test_accounts_are_evidence_for_explain(server: RunningServer, tmp_path: Path) -> None:
    from fullbore.explain.evidence import account as evidence

    tree: Mapping[str, Any] = server.get("/account?seconds=3600").json()
    assert evidence.is_account(tree)
    assert evidence.read(dict(tree), "account.json").window_s == pytest.approx(WINDOW_S)

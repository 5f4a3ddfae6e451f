"""A fullbore recording (.fbr, or the JSON of /timeline): accounted for, with the stages' times and the load."""

from __future__ import annotations

from statistics import median

from fullbore.explain.evidence.account import Account
from fullbore.explain.evidence.files import EvidenceFile
from fullbore.explain.facts import Source
from fullbore.explain.replay import replay_of
from fullbore.telemetry.accounting import Recording, account

_NS = 1e-9


def read(file: EvidenceFile, is_json: bool) -> Account:
    """Raises RecordingError: it is damaged, or of a newer format."""
    from fullbore.telemetry.recording import decode_timeline, read_timeline

    timeline = decode_timeline(file.text(1 << 30).encode(), file.name) if is_json else read_timeline(file.path)
    found = of_recording(timeline.recording, file.name)
    found.device = timeline.stages[0].device if timeline.stages else None
    found.layers = [stage.layers[1] - stage.layers[0] for stage in timeline.stages]
    return found


def of_recording(recording: Recording, name: str) -> Account:
    """The account of a recording, and what the records say beyond it."""
    window_s = (recording.end_ns - recording.start_ns) * _NS
    stages = [{cause: ns * _NS for cause, ns in stage.items()} for stage in account(recording)]
    found = Account(Source(name), window_s, stages, kind="recording")
    _read_launches(recording, found)
    _read_stages(recording, found)
    return found


def _read_launches(recording: Recording, found: Account) -> None:
    launches = [r for r in recording.driver_records if r.event == "launch" and recording.start_ns <= r.at_ns]
    if launches:
        found.running = median(r.running for r in launches)
        found.waiting = median(r.waiting for r in launches)
        found.micro_batch = median(r.num_requests for r in launches)


def _read_stages(recording: Recording, found: Account) -> None:
    times: list[list[float]] = [[] for _ in range(recording.pp_size)]
    for r in recording.stage_records:
        times[r.stage].append((r.sample_end_ns - r.compute_start_ns) * _NS)
    if all(times):
        found.stage_s = [median(each) for each in times]
    found.replay = replay_of(recording)

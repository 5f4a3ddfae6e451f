"""Evidence: files of any kind, each recognised by content, read into typed readings that know their source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullbore.errors import FullboreError
from fullbore.explain.evidence import (
    account,
    bench,
    bench_text,
    dmon,
    fullbore_bench,
    launch,
    log,
    metrics_account,
    notes,
    nvidia_smi,
    prometheus,
    recording,
    server_info,
    smi_table,
    trace,
)
from fullbore.explain.evidence.files import EvidenceFile, find_files
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.evidence.log import LogReadings
from fullbore.explain.evidence.recognise import Kind, recognise
from fullbore.explain.facts import Reading, Source
from fullbore.explain.secrets import Masker

MAX_JSON_CHARS = 64 << 20


@dataclass
class FileNote:
    """What a file was taken for. `is_evidence` is False where nothing could be used."""

    name: str
    kind: str
    is_evidence: bool
    remark: str = ""


@dataclass
class Evidence:
    """Everything that was read, by kind."""

    files: list[FileNote] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    bench_gpus: list[Gpu] = field(default_factory=list)  # means by the bench: used where nothing else samples GPUs
    launches: list[launch.Launch] = field(default_factory=list)
    logs: LogReadings = field(default_factory=LogReadings)
    metrics: list[prometheus.MetricsDump] = field(default_factory=list)
    server_infos: list[server_info.ServerInfo] = field(default_factory=list)
    traces: list[trace.TraceRank] = field(default_factory=list)
    bench: list[bench.BenchRow] = field(default_factory=list)
    notes: dict[str, Reading] = field(default_factory=dict)
    accounts: list[account.Account] = field(default_factory=list)
    masker: Masker = field(default_factory=Masker)

    @property
    def account(self) -> account.Account | None:
        """The most telling one: a recording, else the bench's level with the most clients, else the longest."""
        kinds = ("metrics", "account", "bench", "recording")
        with_load = [one for one in self.accounts if one.request_s > 0]
        if not with_load:
            return None
        return max(with_load, key=lambda one: (kinds.index(one.kind), one.concurrency or 0, one.request_s))

    @property
    def is_readable(self) -> bool:
        return any(note.is_evidence for note in self.files)


def read_evidence(paths: list[Path], on_file: Callable[[str], None] | None = None) -> Evidence:
    """Reads files and folders. Never raises for what is in a file: the file's note says what was wrong with it.

    Args:
        on_file: told each file's name before it is read.
    """
    evidence = Evidence()
    files, evidence.problems = find_files(paths)
    for file in files:
        if on_file is not None:
            on_file(file.name)
        kind = recognise(file.head, file.is_binary, file.is_empty)
        if kind not in (Kind.TRACE, Kind.NVIDIA_SMI_CSV, Kind.DMON, Kind.METRICS, Kind.BINARY):
            evidence.masker.learn(file.head)
        evidence.files.append(_read_file(file, kind, evidence))
    evidence.gpus = evidence.gpus or evidence.bench_gpus
    has_many_machines = len({gpu.machine for gpu in evidence.gpus}) > 1
    for gpu in evidence.gpus:
        gpu.has_many_machines = has_many_machines
    noted = evidence.notes.get("gpus")
    count = noted.value if noted is not None and isinstance(noted.value, int) else len(evidence.gpus)
    bench.resolve_splits(evidence.bench, count)
    fullbore_bench.note_what_differs(evidence.bench)
    told = metrics_account.account_of(evidence.metrics)
    evidence.accounts += [told] if told is not None else []
    _know_layers(evidence)
    return evidence


def _know_layers(evidence: Evidence) -> None:
    """An account without a recording does not say how many layers each stage has; the server's settings do."""
    known = {tuple(info.stage_layers) for info in evidence.server_infos if info.stage_layers}
    if len(known) != 1:
        return
    layers = list(known.pop())
    for one in evidence.accounts:
        if not one.layers and len(one.stages) == len(layers):
            one.layers = layers
            one.stage_s = one.stage_s or [stage.get("compute", 0.0) for stage in one.stages]


def _read_file(file: EvidenceFile, kind: Kind, evidence: Evidence) -> FileNote:
    try:
        note = _READERS[kind](file, evidence)
    except RecursionError:
        note = FileNote(file.name, kind, False, "nested too deeply")
    if file.problem:
        note.remark = "; ".join(part for part in (note.remark, file.problem) if part)
    return note


def _gpus(read: Callable[..., list[Gpu]], kind: Kind) -> Callable[[EvidenceFile, Evidence], FileNote]:
    def reader(file: EvidenceFile, evidence: Evidence) -> FileNote:
        gpus = read(file.lines(), file.name)
        evidence.gpus += gpus
        if not gpus:
            return FileNote(file.name, kind, False, "no samples in it")
        loaded = max(gpu.load.utilisation_percent.count for gpu in gpus)
        idle = max(gpu.idle.utilisation_percent.count for gpu in gpus)
        return FileNote(file.name, kind, True, f"{len(gpus)} GPUs, {loaded} moments under load, {idle} idle")

    return reader


def _launch(file: EvidenceFile, evidence: Evidence) -> FileNote:
    launches = launch.read(file.lines(), file.name)
    evidence.launches += launches
    engines = ", ".join(dict.fromkeys(one.engine for one in launches))
    measured = _bench_text(file, evidence)
    remark = "; ".join(part for part in (engines or "no engine is started in it", measured) if part)
    return FileNote(file.name, Kind.LAUNCH, bool(launches or measured), remark)


def _log(file: EvidenceFile, evidence: Evidence) -> FileNote:
    understood = evidence.logs.read(file.lines(), file.name)
    measured = _bench_text(file, evidence)
    is_evidence = understood > 0 or evidence.logs.last_line_s is not None or bool(measured)
    return FileNote(
        file.name, Kind.LOG, is_evidence, "; ".join(part for part in (f"{understood} lines used", measured) if part)
    )


def _bench_text(file: EvidenceFile, evidence: Evidence) -> str:
    """Results of a benchmark in a text, as "N measurements"; empty if there are none."""
    if not bench_text.HINT.search(file.head):
        return ""
    rows = bench_text.read_rows(file.lines())
    evidence.bench += [bench.row_of(row, Source(file.name, line)) for line, row in rows]
    return _measurements(len(rows)) if rows else ""


def _metrics(file: EvidenceFile, evidence: Evidence) -> FileNote:
    dump = prometheus.read(file.lines(), file.name)
    if not dump.samples:
        return FileNote(file.name, Kind.METRICS, False, "no sample in it could be read")
    evidence.metrics.append(dump)
    return FileNote(file.name, Kind.METRICS, dump.engine is not None, dump.engine or "of no known engine")


def _trace(file: EvidenceFile, evidence: Evidence) -> FileNote:
    rank = trace.read(file)
    if not rank.compute:
        return FileNote(file.name, Kind.TRACE, False, rank.problem or "no kernels and no batches in it")
    evidence.traces.append(rank)
    which = f"rank {rank.rank}" if rank.rank is not None else "rank unknown"
    of = f" of {rank.world_size}" if rank.world_size else ""
    return FileNote(file.name, Kind.TRACE, True, "; ".join(part for part in (which + of, rank.problem) if part))


def _json(file: EvidenceFile, evidence: Evidence) -> FileNote:
    text = file.text(MAX_JSON_CHARS)
    try:
        tree = json.loads(text)
    except ValueError as error:
        rows = _json_lines(text)
        if rows is None:
            where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            return FileNote(file.name, "broken JSON", False, f"it cannot be parsed{where}")
        tree = rows
    return _json_tree(tree, text, file, evidence)


def _json_lines(text: str) -> list[Any] | None:
    """JSON Lines, the last one perhaps cut short."""
    rows: list[Any] = []
    lines = [line for line in text.splitlines() if line.strip()]
    for position, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            return rows if rows and position == len(lines) - 1 else None
    return rows or None


def _json_tree(tree: Any, text: str, file: EvidenceFile, evidence: Evidence) -> FileNote:
    if server_info.is_server_info(tree):
        info = server_info.read(tree, file.name, text)
        evidence.server_infos.append(info)
        return FileNote(
            file.name, "/server_info reply", True, " ".join(part for part in (info.engine, info.version) if part)
        )
    if account.is_account(tree):
        evidence.accounts.append(account.read(tree, file.name))
        return FileNote(file.name, "fullbore account", True, f"{len(tree['stages'])} stages")
    if isinstance(tree, list) and tree and all(isinstance(word, str) for word in tree):
        found_launches = launch.read([(1, shlex.join(tree))], file.name)
        evidence.launches += found_launches
        if found_launches:
            return FileNote(file.name, Kind.LAUNCH, True, found_launches[0].engine)
    rows = bench.rows_of(tree)
    if rows:
        return _bench_rows(rows, text, file, evidence)
    lines = log.lines_of(tree) if isinstance(tree, list) else []
    if lines:
        understood = evidence.logs.read(lines, file.name)
        return FileNote(file.name, "engine log as JSON", understood > 0, f"{understood} lines used")
    if isinstance(tree, dict) and tree:
        found = notes.read(tree, file.name, text)
        evidence.notes |= found
        for reading in found.values():
            evidence.masker.learn(f"{reading.name}={reading.value}")
        return FileNote(file.name, "notes", True, f"{len(found)} facts")
    return FileNote(file.name, "JSON of no known kind", False, "neither bench results nor notes nor a server's reply")


def _bench_rows(rows: list[dict[str, Any]], text: str, file: EvidenceFile, evidence: Evidence) -> FileNote:
    found = bench.read(rows, file.name, text)
    evidence.bench += found
    pairs = zip(rows, found, strict=True)
    accounts = [one for raw, row in pairs if (one := fullbore_bench.account_of(raw, row)) is not None]
    evidence.accounts += accounts
    evidence.bench_gpus = evidence.bench_gpus or fullbore_bench.gpus_of(rows, found, file.name)
    server = fullbore_bench.server_of(rows, found[0].source)
    evidence.server_infos += [server] if server is not None else []
    told = f", {len(accounts)} with each stage's time by cause" if accounts else ""
    return FileNote(file.name, "bench results", True, _measurements(len(rows)) + told)


def _measurements(count: int) -> str:
    return f"{count} measurement{'' if count == 1 else 's'}"


def _unknown(file: EvidenceFile, evidence: Evidence) -> FileNote:
    """Perhaps a benchmark's output, or notes that somebody wrote as plain text."""
    if measured := _bench_text(file, evidence):
        return FileNote(file.name, "bench results", True, measured)
    found = notes.read_lines(file.head.splitlines(), file.name)
    if not found:
        return _useless(file, evidence)
    evidence.notes |= {name: reading for name, reading in found.items() if name not in evidence.notes}
    return FileNote(file.name, "notes", True, f"{len(found)} facts")


def _recording(file: EvidenceFile, evidence: Evidence) -> FileNote:
    kind = recognise(file.head, file.is_binary, file.is_empty)
    try:
        found = recording.read(file, is_json=kind is Kind.TIMELINE)
    except FullboreError as error:
        return FileNote(file.name, kind, False, str(error))
    evidence.accounts.append(found)
    return FileNote(file.name, kind, True, f"{len(found.stages)} stages, {found.window_s:.3g} s")


def _useless(file: EvidenceFile, evidence: Evidence) -> FileNote:
    kind = recognise(file.head, file.is_binary, file.is_empty)
    remark = "unpack it first" if kind is Kind.ARCHIVE else "not used"
    return FileNote(file.name, kind, False, remark)


_READERS: dict[Kind, Callable[[EvidenceFile, Evidence], FileNote]] = {
    Kind.NVIDIA_SMI_CSV: _gpus(nvidia_smi.read, Kind.NVIDIA_SMI_CSV),
    Kind.NVIDIA_SMI_TABLE: _gpus(smi_table.read, Kind.NVIDIA_SMI_TABLE),
    Kind.DMON: _gpus(dmon.read, Kind.DMON),
    Kind.LAUNCH: _launch,
    Kind.LOG: _log,
    Kind.METRICS: _metrics,
    Kind.TRACE: _trace,
    Kind.RECORDING: _recording,
    Kind.TIMELINE: _recording,
    Kind.JSON: _json,
    Kind.ARCHIVE: _useless,
    Kind.BINARY: _useless,
    Kind.EMPTY: _useless,
    Kind.UNKNOWN: _unknown,
}

"""How many requests are served at once, and in how many micro-batches they travel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fullbore.explain.evidence import Evidence
from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.evidence.notes import numbers_in
from fullbore.explain.facts import Fact, Reading, show
from fullbore.explain.settings import Settings

_COUNT_KEY = re.compile(
    r"concurren|in_flight|inflight|(?:open|active|parallel|running|simultaneous)_(?:chats?|streams?|requests?|clients?|users?"
    r"|sessions?|sequences?)|^(?:clients|users|streams|sessions|chats)$|num_(?:clients|users|streams)|max_concurrency",
    re.I,
)
_NOT_A_COUNT = re.compile(r"tok_s|_ms|_s$|seconds|latency|throughput|ttft|tps|gain|speed|rate", re.I)
_COUNTED_WORD = r"(?:clients?|users?|requests?|streams?|chats?|sessions?|sequences?|prompts?|conversations?)"
_COUNT_IN_TEXT = re.compile(
    rf"((?:\b\d+(?:\s*,\s*|\s*(?:and|or|to|/)\s*))*\b\d+)\s+(?:\w+\s+)?{_COUNTED_WORD}\b(?!\s*(?:/|per)\s*s)", re.I
)
_LOAD_KEY = re.compile(r"load|traffic|workload|smi|bench|trace|clients|usage|test|setup", re.I)
_MATCHES = 0.15  # two throughputs closer than this are the same run


@dataclass
class Load:
    """What was going on when the rest of the evidence was taken."""

    in_flight: Fact | None = None  # requests being served at once
    at_most: Fact | None = None  # a limit on it, where it is not known itself
    clients: Fact | None = None  # requests that clients keep open
    waiting: Fact | None = None
    micro_batch: Fact | None = None  # requests in one micro-batch
    input_tokens: Fact | None = None  # of one request
    output_tokens: Fact | None = None
    prefill_side: Fact | None = None  # this engine only prefills, another one decodes
    row: BenchRow | None = None  # the measurement that goes with it

    @property
    def known(self) -> int | None:
        return round(self.in_flight.number) if self.in_flight is not None else None

    @property
    def most(self) -> int | None:
        """What is in flight, or the most that can be."""
        if self.known is not None:
            return self.known
        return round(self.at_most.number) if self.at_most is not None else None

    @property
    def is_prefill_bound(self) -> bool:
        """Nearly all work is reading prompts."""
        if self.prefill_side is not None:
            return True
        if self.output_tokens is None:
            return False
        output = self.output_tokens.number
        return output <= 2 or (self.input_tokens is not None and self.input_tokens.number >= 50 * output)

    @property
    def slots(self) -> float | None:
        """Micro-batches that the requests are divided into."""
        if self.known is None or self.micro_batch is None or self.micro_batch.number < 1:
            return None
        return self.known / self.micro_batch.number


def read_load(evidence: Evidence, settings: Settings, num_stages: int | None) -> Load:
    load = Load()
    load.at_most = settings.count("max_running")
    load.micro_batch = _micro_batch(evidence)
    load.waiting = _waiting(evidence)
    load.input_tokens = _token_count(evidence, "input", r"^(?:input|prompt)_(?:tokens|len)|^isl$")
    load.output_tokens = _token_count(evidence, "output", r"^output_(?:tokens|len)|^osl$|^max_tokens$")
    load.prefill_side = _prefill_side(settings)
    noted = _noted_counts(evidence.notes)
    load.row = _row_of_the_rest(evidence, noted, num_stages)
    load.clients = _of_one_replica(_clients(load, noted), settings.replicas)
    load.in_flight = _served(evidence) or _served_of_clients(load)
    if load.in_flight is None and num_stages == 1:
        load.in_flight = load.micro_batch  # without a pipeline all that run are one batch
    if load.row is None and load.in_flight is not None:
        load.row = next((row for row in evidence.bench if row.concurrency == load.known), None)
    return load


def _served(evidence: Evidence) -> Fact | None:
    """Requests in flight as the engine itself counts them."""
    vllm = evidence.logs.vllm
    running = vllm.running.median if vllm.running else float(vllm.last_running)
    if running >= 1 and (vllm.source or vllm.stalled_at):
        return Fact(f"Running: {show(running)} reqs in the engine's log", running, vllm.source or vllm.stalled_at)
    account = evidence.account
    if account is not None and account.running is not None and account.running >= 1:
        return Fact(f"{show(account.running)} requests running (recording)", account.running, account.source)
    if account is not None and account.concurrency is not None:
        return None  # gauges are of other moments than the bench's level
    for dump in reversed(evidence.metrics):
        found = dump.total("vllm:num_requests_running", "fullbore_requests_running")
        if found is not None and found.value >= 1:
            return found
    return None


def _served_of_clients(load: Load) -> Fact | None:
    """From the clients' side: what they keep open, less what waits, at most what the engine admits."""
    if load.clients is None:
        return None
    count = load.clients.number
    limit = load.at_most.number if load.at_most is not None else None
    if load.waiting is not None and load.waiting.number > 0:
        served = count - load.waiting.number
        return Fact(
            f"{show(served)} in flight: {load.clients.text}, less {load.waiting.text}", served, load.clients.source
        )
    if limit is not None and count > limit:
        return Fact(f"{show(limit)} in flight: {load.clients.text}, at most {load.at_most}", limit, load.clients.source)
    return load.clients


def _token_count(evidence: Evidence, side: str, pattern: str) -> Fact | None:
    for path, note in evidence.notes.items():
        numbers = numbers_in(note.value)
        if re.search(pattern, path) and len(numbers) == 1:
            return Fact(f"{path}: {note.value}", numbers[0], note.source)
    for row in evidence.bench:
        count = row.input_tokens if side == "input" else row.output_tokens
        if count is not None:
            return Fact(f"{show(count)} {side} tokens per request", count, row.source)
    return None


def _prefill_side(settings: Settings) -> Fact | None:
    mode = settings.reading("disaggregation")
    return mode.fact(f"{mode.name} {mode.value}") if mode is not None and str(mode.value) == "prefill" else None


def _micro_batch(evidence: Evidence) -> Fact | None:
    """SGLang's #running-req: requests of one micro-batch."""
    account = evidence.account
    if account is not None and account.micro_batch is not None and account.micro_batch >= 1:
        text = f"{show(account.micro_batch)} requests in a micro-batch (recording)"
        return Fact(text, account.micro_batch, account.source)
    ranks = [rank for rank in evidence.logs.sglang.ranks.values() if rank.decode_running]
    if ranks:
        rank = min(ranks, key=lambda r: r.rank)
        size = rank.decode_running.quantile(0.75)  # the end of a burst decodes with fewer
        if size >= 1:
            text = (
                f"#running-req: {show(size)} in one micro-batch ({rank.decode_running.count} decode lines of "
                f"PP{rank.rank})"
            )
            return Fact(text, size, rank.decode_at)
    for dump in reversed(evidence.metrics):
        found = dump.total("sglang:num_running_reqs")
        if found is not None and found.value >= 1:
            return found
    return None


def _waiting(evidence: Evidence) -> Fact | None:
    vllm, sglang = evidence.logs.vllm, evidence.logs.sglang
    account = evidence.account
    if account is not None and account.waiting is not None:
        return Fact(f"{show(account.waiting)} requests waiting (recording)", account.waiting, account.source)
    if account is not None and account.concurrency is not None:
        return None
    if vllm.waiting:
        return Fact(f"Waiting: {show(vllm.waiting.maximum)} reqs at most", vllm.waiting.maximum, vllm.source)
    ranks = [rank for rank in sglang.ranks.values() if rank.queue]
    if ranks:
        rank = min(ranks, key=lambda r: r.rank)
        return Fact(f"#queue-req: {show(rank.queue.median)}", rank.queue.median, rank.prefill_at or rank.decode_at)
    for dump in reversed(evidence.metrics):
        found = dump.total("vllm:num_requests_waiting", "sglang:num_queue_reqs", "fullbore_requests_waiting")
        if found is not None:
            return found
    return None


def _noted_counts(notes: dict[str, Reading]) -> list[Fact]:
    """Counts of requests in flight that a user wrote down, as numbers or in sentences about the load."""
    facts = []
    for path, note in notes.items():
        is_count = _COUNT_KEY.search(path) and not _NOT_A_COUNT.search(path)
        if is_count and isinstance(note.value, int | float):
            facts += [Fact(f"{path}: {show(n)}", n, note.source) for n in numbers_in(note.value) if n >= 1]
    for path, note in notes.items():
        if isinstance(note.value, str) and _LOAD_KEY.search(path):
            for match in _COUNT_IN_TEXT.finditer(note.value):
                facts += [Fact(f'{path}: "{match[0]}"', n, note.source) for n in numbers_in(match[1]) if n >= 1]
            if (named := re.search(r"concurrency\s+(?:of\s+)?(\d+)", note.value)) is not None:
                facts.append(Fact(f'{path}: "{named[0]}"', float(named[1]), note.source))
    return facts


def own_rows(evidence: Evidence, num_stages: int | None) -> list[BenchRow]:
    """Bench rows of this deployment, without those of layouts it is compared with."""
    rows = evidence.bench
    same = [row for row in rows if row.pp is not None and row.pp == num_stages]
    if same:
        rows = same
    most = max((row.gpus or 0 for row in rows), default=0)
    return [row for row in rows if row.gpus is None or row.gpus == most]


def _row_of_the_rest(evidence: Evidence, noted: list[Fact], num_stages: int | None) -> BenchRow | None:
    """The bench row during which logs and samples were taken: the noted one, the one with the log's throughput, or
    the one with the most requests."""
    rows = [row for row in own_rows(evidence, num_stages) if row.concurrency]
    if not rows:
        return None
    for fact in noted:
        for row in rows:
            if row.concurrency == fact.value:
                return row
    logged = logged_tok_s(evidence)
    if logged is not None:
        close = [row for row in rows if row.output_tok_s and abs(row.output_tok_s / logged.number - 1) < _MATCHES]
        if len(close) == 1:
            return close[0]
    return max(rows, key=lambda row: row.concurrency or 0)


def _clients(load: Load, noted: list[Fact]) -> Fact | None:
    waiting = load.waiting.number if load.waiting is not None else 0
    enough = [fact for fact in noted if fact.number > waiting]
    if enough:
        return enough[0]
    if load.row is not None and load.row.concurrency:
        return Fact(f"{load.row.concurrency} clients in the bench", float(load.row.concurrency), load.row.source)
    return None


def _of_one_replica(clients: Fact | None, replicas: int) -> Fact | None:
    """Clients are divided over all copies of the pipeline; everything else is looked at for one of them."""
    if clients is None or replicas < 2:
        return clients
    count = max(clients.number / replicas, 1.0)
    return Fact(f"{clients.text}, over {replicas} replicas", count, clients.source)


def logged_tok_s(evidence: Evidence) -> Fact | None:
    """Generation throughput of all requests as the engine prints it."""
    vllm = evidence.logs.vllm
    if vllm.gen_tok_s and vllm.gen_tok_s.median > 0:
        return Fact(f"generation throughput {show(vllm.gen_tok_s.median)} tokens/s", vllm.gen_tok_s.median, vllm.source)
    ranks = [rank for rank in evidence.logs.sglang.ranks.values() if rank.gen_tok_s]
    if ranks:
        rank = min(ranks, key=lambda r: r.rank)
        if rank.gen_tok_s.median > 0:
            text = f"gen throughput {show(rank.gen_tok_s.median)} token/s"
            return Fact(text, rank.gen_tok_s.median, rank.decode_at)
    return None

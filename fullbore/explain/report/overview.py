"""What the evidence says at a glance, before any verdict: the deployment, its load, its speed, its GPUs."""

from __future__ import annotations

from fullbore.explain.evidence.account import Account
from fullbore.explain.evidence.bench import BenchRow
from fullbore.explain.evidence.gpu import Gpu
from fullbore.explain.facts import Fact, show
from fullbore.explain.situation import Situation

_MOST_GPUS = 16
_MOST_ROWS = 12
_SHOWN = (
    *("num_micro_batches", "micro_batch_cap", "max_running", "depth", "chunk", "eager", "partition", "speculative"),
    "split_mode",
)


def overview(s: Situation) -> list[Fact]:
    """Facts in the order in which a reader wants them."""
    known = [s.engine_fact, s.version, s.pp, s.settings.fact("tp_size"), s.model_fact, s.card_fact]
    known += [s.load.in_flight or s.load.at_most, s.load.micro_batch, s.load.waiting]
    known += [_device(s)]
    found = [fact for fact in known if fact is not None]
    return _unique(found + _settings(s) + _rows(s) + _accounts(s) + _gpus(s))


def _device(s: Situation) -> Fact | None:
    account = s.evidence.account
    if s.device is None or s.engine != "fullbore":
        return None
    return Fact(f"stages on {s.device}", s.device, account.source if account is not None else None)


def _accounts(s: Situation) -> list[Fact]:
    """Those that belong to no row of a bench."""
    others = [account for account in s.evidence.accounts if account.kind != "bench"]
    return [Fact(f"{account.kind}: {told(account)}", None, account.source) for account in others]


def _settings(s: Situation) -> list[Fact]:
    return [fact for name in _SHOWN if (fact := s.settings.fact(name)) is not None]


def _rows(s: Situation) -> list[Fact]:
    facts = []
    for row in s.evidence.bench[:_MOST_ROWS]:
        parts = [f"concurrency {row.concurrency}" if row.concurrency else "", row.layout]
        parts += [
            f"{name} {show(value)}" for name, value in row.varied.items() if name not in ("layout", "pp", "tp", "gpus")
        ]
        values = [
            (row.output_tok_s, "output tokens/s"),
            (row.input_tok_s, "input tokens/s"),
            (row.ttft_ms, "ms TTFT"),
            (row.itl_ms, "ms between tokens"),
            (row.latency_ms, "ms latency"),
        ]
        parts += [f"{show(value)} {unit}" for value, unit in values if value is not None]
        parts.append(_stages_of(row, s))
        facts.append(Fact(", ".join(part for part in parts if part), None, row.source))
    return facts


def _stages_of(row: BenchRow, s: Situation) -> str:
    """What fullbore's stages did meanwhile."""
    for account in s.evidence.accounts:
        if account.kind == "bench" and account.source == row.source and account.concurrency == row.concurrency:
            return told(account)
    return ""


def told(account: Account) -> str:
    """An account in a few words."""
    working = account.share("compute") + account.share("host")
    cause = account.largest()
    largest = f", idle mostly for {cause} ({account.share(cause):.0%})" if account.share(cause) >= 0.005 else ""
    return f"stages work {working:.0%} of the time{largest}"


def _gpus(s: Situation) -> list[Fact]:
    return [_gpu(gpu) for gpu in s.evidence.gpus[:_MOST_GPUS]]


def _gpu(gpu: Gpu) -> Fact:
    state = gpu.load if gpu.has_load else gpu.idle
    parts = [f"{state.utilisation_percent.mean:.0f} % utilised" if state.utilisation_percent else ""]
    if state.power_w:
        of = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w else ""
        parts.append(f"{state.power_w.mean:.0f}{of} W")
    parts.append(f"{state.sm_clock_mhz.median:.0f} MHz" if state.sm_clock_mhz else "")
    if state.link_gen and state.link_width:
        parts.append(f"PCIe gen {state.link_gen.maximum:.0f} x{state.link_width.maximum:.0f}")
    if gpu.memory_used_mib:
        of = f" of {gpu.memory_total_mib:,.0f}" if gpu.memory_total_mib else ""
        parts.append(f"{gpu.memory_used_mib:,.0f}{of} MiB")
    when = "under load" if gpu.has_load else "idle"
    name = f" ({gpu.name})" if gpu.name else ""
    return Fact(f"{gpu.label}{name} {when}: {', '.join(part for part in parts if part)}", None, gpu.where)


def _unique(facts: list[Fact]) -> list[Fact]:
    return list({fact.text: fact for fact in facts}.values())

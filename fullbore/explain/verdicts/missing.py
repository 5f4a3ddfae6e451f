"""What would make the answer surer: run this, send that."""

from __future__ import annotations

from typing import NamedTuple

from fullbore.explain.situation import Situation


class Missing(NamedTuple):
    """What is not in the evidence, and how to get it."""

    what: str
    how: str


_SMI_COLUMNS = (
    *("timestamp", "index", "name", "utilization.gpu", "power.draw", "power.limit", "memory.used", "memory.total"),
    *("clocks.sm", "pcie.link.gen.current", "pcie.link.width.current"),
)
_SMI = (
    f"nvidia-smi --query-gpu={','.join(_SMI_COLUMNS)} --format=csv -l 1 > nvidia-smi.csv   (20 s, while requests are "
    "served)"
)


def missing_evidence(s: Situation, *, is_running: bool = True) -> list[Missing]:
    """Most telling first; nothing about load for an engine that does not start."""
    if not is_running:
        return [item for item in (_launch(s),) if item]
    return [
        item
        for item in (
            _traces(s),
            _change(s),
            _load(s),
            _recording(s),
            _samples(s),
            _log(s),
            _metrics(s),
            _server_info(s),
            _bench(s),
            _launch(s),
        )
        if item
    ]


def _traces(s: Situation) -> Missing | None:
    timeline = s.timeline
    if timeline is None or timeline.is_complete:
        return None
    have = ", ".join(str(stage) for stage in sorted(timeline.ranks))
    absent = ", ".join(str(rank) for rank in timeline.missing_ranks)
    return Missing(
        f"traces of rank {absent} are missing (there are those of stage {have}, of {timeline.num_stages}): without "
        "them no verdict per stage is given",
        "profile again and keep the trace of every rank; a merged SGLang profile holds only PP0",
    )


def _change(s: Situation) -> Missing | None:
    if s.speed.was_faster is None:
        return None
    return Missing(
        f"what changed since it was faster ({s.speed.was_faster.text}): clocks, power, versions, settings, load",
        "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE under load; the logs, versions and command lines of both times",
    )


def _load(s: Situation) -> Missing | None:
    if s.load.known is not None:
        return None
    return Missing(
        "concurrency: how many requests were running (in flight) when this was measured",
        'note it in notes.json as {"concurrent_requests": N}, or run fullbore bench --url URL --concurrency 1,P,4P '
        "--json bench.json",
    )


def _samples(s: Situation) -> Missing | None:
    if any(gpu.has_load for gpu in s.gpus) or s.is_cpu:
        return None
    if s.evidence.account is not None and not s.evidence.gpus and s.device is None:
        return None  # the account says what stages wait for; nothing says that there are GPUs
    why = "all samples are of idle GPUs, none under load" if s.evidence.gpus else "no GPU samples under load"
    return Missing(f"{why}: what the GPUs do while serving requests", _SMI)


def _recording(s: Situation) -> Missing | None:
    account = s.evidence.account
    if s.engine != "fullbore" or (account is not None and account.kind == "recording"):
        return None
    return Missing(
        "a recording under the same load: with each step's time the fix is simulated, and its gain is a number",
        "fullbore record --url URL --seconds 10 -o run.fbr   (while fullbore bench runs)",
    )


def _log(s: Situation) -> Missing | None:
    logs = s.evidence.logs
    if logs.sglang.ranks or logs.vllm.source or logs.llama.decode_ms or s.evidence.accounts:
        return None
    what = {
        "sglang": " (`#running-req`, `cuda graph` and `gen throughput` of every PP rank)",
        "vllm": " (`Running`, `Waiting`, KV usage)",
    }
    return Missing(
        f"the engine's log while requests are served{what.get(s.engine or '', '')}",
        "the server log of all ranks, a minute of traffic and the start-up lines",
    )


def _metrics(s: Situation) -> Missing | None:
    if (
        len(s.evidence.metrics) >= 2
        or s.evidence.account is not None
        or s.engine not in ("sglang", "vllm", "fullbore", None)
    ):
        return None
    flag = " (SGLang: start with --enable-metrics)" if s.engine == "sglang" else ""
    return Missing(
        f"two dumps of /metrics under traffic{flag}",
        "curl -s http://HOST:PORT/metrics > metrics-1.prom; sleep 30; curl -s http://HOST:PORT/metrics > "
        "metrics-2.prom",
    )


def _server_info(s: Situation) -> Missing | None:
    if s.engine != "sglang" or s.evidence.server_infos:
        return None
    return Missing(
        "the resolved settings (pp_max_micro_batch_size is in internal_states)",
        "curl -s http://HOST:PORT/server_info > server_info.json",
    )


def _bench(s: Situation) -> Missing | None:
    if any(row.concurrency for row in s.evidence.bench):
        return None
    return Missing(
        "tokens/s and time between tokens at known concurrency",
        "fullbore bench --url URL --concurrency 1,8,32 --json bench.json",
    )


def _launch(s: Situation) -> Missing | None:
    if s.evidence.launches or s.evidence.server_infos:
        return None
    return Missing("the command line that started the engine", "ps -ef | grep -E 'sglang|vllm' > launch.txt")

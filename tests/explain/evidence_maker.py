"""Makes evidence of deployments that never existed: the formats are those of the engines, the numbers are given."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Intervals = Sequence[tuple[float, float]]


class EvidenceMaker:
    """Writes files into a folder; every method adds one kind of evidence and returns the maker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str) -> EvidenceMaker:
        (self.folder / name).write_text(text)
        return self

    def launch(self, command: str) -> EvidenceMaker:
        return self.write("launch.txt", command + "\n")

    def notes(self, **facts: Any) -> EvidenceMaker:
        return self.write("notes.json", json.dumps(facts, indent=1))

    def bench(self, *rows: dict[str, Any]) -> EvidenceMaker:
        return self.write("bench.json", json.dumps(list(rows), indent=1))

    def smi(
        self,
        card: str,
        utilisation: Sequence[float],
        *,
        power: Sequence[float] | float = 300.0,
        limit: float | None = 400.0,
        clock: Sequence[float] | float = 1410.0,
        memory: Sequence[float] | float = 70_000.0,
        link: Sequence[tuple[int, int]] | tuple[int, int] = (4, 16),
        samples: int = 6,
        name: str = "nvidia-smi.csv",
        cards: Sequence[str] | None = None,
    ) -> EvidenceMaker:
        """One row per GPU and second; single values hold for all GPUs."""
        lines = [
            "timestamp, index, name, utilization.gpu [%], power.draw [W], power.limit [W], memory.used [MiB], "
            "memory.total [MiB], clocks.current.sm [MHz], pcie.link.gen.current, pcie.link.width.current"
        ]

        def of(values: Any, n: int) -> Any:
            is_each = isinstance(values, list) or (isinstance(values, tuple) and not isinstance(values[0], int))
            return values[n] if is_each else values

        for second in range(samples):
            for n, busy in enumerate(utilisation):
                wobble = (second * 7 + n * 3) % 3 - 1 if busy else 0
                gen, width = of(link, n)
                shown = f"{limit:.2f} W" if limit is not None else "[N/A]"
                lines.append(
                    f"2026/03/01 10:00:{second:02d}.{n:03d}, {n}, {cards[n] if cards else card}, "
                    f"{busy + wobble:.0f} %, "
                    f"{of(power, n):.2f} W, {shown}, {of(memory, n):.0f} MiB, 81920 MiB, {of(clock, n):.0f} MHz, "
                    f"{gen}, {width}"
                )
        return self.write(name, "\n".join(lines) + "\n")

    def sglang_decode(
        self,
        stages: int,
        running: int,
        *,
        steps: int = 12,
        tok_s: float = 100.0,
        queue: int = 0,
        usage: float = 0.2,
        graph: str = "cuda graph: True",
        comma: str = ",",
        labels: str = "",
    ) -> EvidenceMaker:
        """The same decode lines on every rank."""
        lines = []
        for step in range(steps):
            for stage in range(stages):
                lines.append(
                    f"[2026-03-01 10:00:{step:02d} PP{stage}{labels}] Decode batch{comma} #running-req: {running}, "
                    f"#token: "
                    f"{1000 + step * running}, token usage: {usage:.2f}, {graph}, gen throughput (token/s): "
                    f"{tok_s:.2f}, "
                    f"#queue-req: {queue}"
                )
        return self.write("server.log", "\n".join(lines) + "\n")

    def vllm_stats(
        self,
        running: int,
        waiting: int = 0,
        *,
        tok_s: float = 100.0,
        prompt_tok_s: float = 50.0,
        kv: float = 5.0,
        lines: int = 8,
        stalled: int = 0,
        extra: str = "",
    ) -> EvidenceMaker:
        text = []
        for n in range(lines + stalled):
            is_stalled = n >= lines
            text.append(
                f"(APIServer pid=1) INFO 03-01 10:{n // 6:02d}:{n % 6}0 [loggers.py:127] Engine 000: Avg prompt "
                f"throughput: "
                f"{0.0 if is_stalled else prompt_tok_s} tokens/s, Avg generation throughput: "
                f"{0.0 if is_stalled else tok_s} "
                f"tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {kv}%, Prefix "
                f"cache hit "
                f"rate: 0.0%"
            )
        return self.write("server.log", "\n".join(text) + "\n" + extra)

    def vllm_metrics(
        self, name: str, *, running: int, tokens: int, waiting: int = 0, prompt: int = 1000
    ) -> EvidenceMaker:
        return self.write(
            name,
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {prompt}.0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {tokens}.0\n',
        )

    def trace(
        self,
        rank: int,
        world: int,
        compute_us: Intervals,
        *,
        wait_us: Intervals = (),
        exchange_us: Intervals = (),
        launches: int = 0,
        batch_size: int | None = None,
        kind: str = "DECODE",
    ) -> EvidenceMaker:
        """One rank; `wait_us` are NCCL receives that spin, `exchange_us` all-reduces of tensor ranks."""
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "ts": 0, "args": {}}]
        for begin, end in compute_us:
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "gemm_kernel",
                    "pid": rank,
                    "tid": 7,
                    "ts": begin,
                    "dur": end - begin,
                }
            )
            if batch_size is not None:
                events.append(
                    {
                        "ph": "X",
                        "cat": "user_annotation",
                        "name": f"step[{kind} bs={batch_size}]",
                        "ts": begin,
                        "dur": end - begin,
                    }
                )
        waits = [("SendRecv", interval) for interval in wait_us]
        waits += [("AllReduce_Sum_bf16_RING_LL", interval) for interval in exchange_us]
        for name, (begin, end) in waits:
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": f"ncclDevKernel_{name}(x)",
                    "pid": rank,
                    "tid": 26,
                    "ts": begin,
                    "dur": end - begin,
                }
            )
        for n in range(launches):
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": float(n), "dur": 4.0})
        tree = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
            "traceEvents": events,
        }
        (self.folder / f"rank{rank}.trace.json.gz").write_bytes(gzip.compress(json.dumps(tree).encode()))
        return self


def pipeline_intervals(
    stage_us: Sequence[float], micro_batches: int, rounds: int, *, hop_us: float = 5.0, return_us: float = 20.0
) -> list[list[tuple[float, float]]]:
    """Work intervals of each stage when `micro_batches` go round and round a FIFO pipeline."""
    stages = len(stage_us)
    free = [0.0] * stages
    ready = [0.0] * micro_batches
    work: list[list[tuple[float, float]]] = [[] for _ in stage_us]
    for _ in range(rounds):
        for m in range(micro_batches):
            arrival = ready[m]
            for stage in range(stages):
                begin = max(arrival, free[stage])
                end = begin + stage_us[stage]
                work[stage].append((begin, end))
                free[stage] = end
                arrival = end + hop_us
            ready[m] = arrival - hop_us + return_us
    return work

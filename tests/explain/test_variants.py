"""Deployments that no rule has seen: other engines, stages, cards and numbers, evidence missing, and negatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from evidence_maker import EvidenceMaker, Intervals, pipeline_intervals

from fullbore.explain.run import explain


class Variant(NamedTuple):
    """`expected`: accepted primary verdicts. `mentions`: texts that some string of the answer contains."""

    name: str
    build: Callable[[EvidenceMaker], object]
    expected: tuple[str, ...]
    mentions: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


SGLANG_PP4 = "python3 -m sglang.launch_server --model-path /models/m --pp-size 4 --tp-size 1"
VLLM_PP4 = "vllm serve /models/m --pipeline-parallel-size 4 --tensor-parallel-size 1"
H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"


def uneven_logs(maker: EvidenceMaker) -> None:
    """Two ranks form different decode batches half way; each log goes on."""
    for rank in (0, 1):
        lines = []
        for n in range(20):
            running = 8 if n < 12 or rank == 0 else 7 - n % 3
            lines.append(
                f"[2026-03-01 10:00:{n:02d} PP{rank}] Decode batch. #running-req: {running}, #token: {100 + n}, "
                f"token usage: 0.1, "
                f"gen throughput (token/s): 50.0, #queue-req: 0"
            )
        maker.write(f"PP{rank}.log", "\n".join(lines) + "\n")


def prefill_logs(maker: EvidenceMaker, ranks: int, counts: list[int], *, lost: tuple[int, int] | None = None) -> None:
    """Prefill lines of each rank, `counts[r]` of them; `lost`: (rank, line) that is not in the log."""
    for rank in range(ranks):
        lines = []
        for n in range(counts[rank]):
            if lost == (rank, n):
                continue
            lines.append(
                f"[2026-03-01 10:00:{n:02d} PP{rank}] Prefill batch, #new-seq: {1 + n % 3}, #new-token: "
                f"{1024 + 64 * (n % 7)}, "
                f"#cached-token: {n * 16}, token usage: 0.1, #running-req: 0, #queue-req: {n % 2}, cuda graph: False"
            )
        maker.write(f"PP{rank}.log", "\n".join(lines) + "\n")


def traces(
    maker: EvidenceMaker, stage_us: list[float], micro_batches: int, batch_size: int | None = 4, **more: float
) -> None:
    for rank, intervals in enumerate(pipeline_intervals(stage_us, micro_batches, 30, **more)):
        maker.trace(rank, len(stage_us), intervals, batch_size=batch_size)


def dense_then_sparse(maker: EvidenceMaker) -> None:
    """Kernels of 4 µs every 12 µs: launched one by one."""
    for rank in range(2):
        kernels = []
        for step in range(10):
            begin = step * 3000.0 + rank * 1500.0
            kernels += [(begin + n * 12.0, begin + n * 12.0 + 4.0) for n in range(120)]
        maker.trace(rank, 2, kernels, launches=1200, batch_size=1)


def tensor_steps(begins_us: list[float], compute_us: float, exchange_us: float) -> tuple[Intervals, Intervals]:
    """(computing, exchanging) of steps with 32 layers each, an exchange after every half of one."""
    compute, exchanges = [], []
    for begin in begins_us:
        now = begin
        for _ in range(64):
            compute.append((now, now + compute_us))
            exchanges.append((now + compute_us, now + compute_us + exchange_us))
            now += compute_us + exchange_us
    return compute, exchanges


def tensor_traces(maker: EvidenceMaker, times_us: list[tuple[float, float]]) -> None:
    """Ranks of one stage: each computes and exchanges for so long, twice per layer."""
    for rank, (compute_us, exchange_us) in enumerate(times_us):
        begins = [n * (64 * (compute_us + exchange_us) + 500.0) for n in range(12)]
        compute, exchanges = tensor_steps(begins, compute_us, exchange_us)
        maker.trace(rank, len(times_us), compute, exchange_us=exchanges, batch_size=1)


def stages_of_tensor_ranks(maker: EvidenceMaker) -> None:
    """Two stages of two tensor ranks each; one micro-batch of eight goes to and fro."""
    for rank in range(4):
        begins = [n * 10_000.0 + (rank // 2) * 5_000.0 for n in range(20)]
        compute, exchanges = tensor_steps(begins, 60.0, 15.0)
        received = [(begin - 4_500.0, begin - 10.0) for begin in begins]
        maker.trace(rank, 4, compute, wait_us=received, exchange_us=exchanges, batch_size=8)


VARIANTS = [
    # ------------------------------------------------------------------------------------------------ few-requests
    Variant(
        "four cards, one ollama chat",
        lambda m: m.launch("OLLAMA_NUM_PARALLEL=1 ollama serve").smi(
            "NVIDIA GeForce RTX 3090", [25, 26, 24, 25], power=130.0, limit=350.0, clock=1700.0, memory=18_000.0
        ),
        ("few-requests", "pp-latency-expected"),
        ("25%", "OLLAMA_NUM_PARALLEL"),
    ),
    Variant(
        "unequal cards, one stream: shares differ, the sum is one",
        lambda m: m.launch("llama-server -m /m/70b-q4_k_m.gguf -ngl 999 -np 1").smi(
            "",
            [81, 18],
            cards=["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 2080 Ti"],
            power=200.0,
            limit=350.0,
            memory=9_000.0,
        ),
        ("few-requests", "pp-latency-expected"),
        absent=("imbalance", "packed-slot"),
    ),
    Variant(
        "two requests on eight vLLM stages",
        lambda m: (
            m.launch("vllm serve /models/m --pipeline-parallel-size 8").vllm_stats(2).smi(A100, [25] * 8, power=140.0)
        ),
        ("few-requests",),
        ("2/8",),
        ("packed-slot", "launch-bound"),
    ),
    Variant(
        "one request, receives spin",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 1, tok_s=30.0)
            .notes(concurrent_requests=1)
            .smi(H100, [99, 98, 99, 99], power=160.0, limit=700.0, clock=1980.0)
        ),
        ("few-requests", "pp-latency-expected"),
        absent=("at-roofline", "spin-deadlock", "packed-slot", "imbalance"),
    ),
    Variant(
        "exllama over two cards, one user",
        lambda m: (
            m.launch("python -m exllamav2.server -m /m/70B-4.5bpw")
            .notes(users=1, gpus=2)
            .smi("NVIDIA GeForce RTX 3090", [50, 48], power=190.0, limit=350.0, clock=1700.0)
        ),
        ("few-requests", "pp-latency-expected"),
    ),
    Variant(
        "requests come one after the other, though the client has sixteen",
        lambda m: m.launch("vllm serve /models/Yi-9B --pipeline-parallel-size 2").vllm_stats(1, tok_s=44.0),
        ("few-requests", "pp-latency-expected"),
    ),
    # ------------------------------------------------------------------------------------------------- packed-slot
    Variant(
        "SGLang, old log format, tensor ranks in the labels",
        lambda m: (
            m.launch("python3 -m sglang.launch_server --model-path /m --pp-size 4 --tp-size 2")
            .sglang_decode(4, 12, comma=".", labels=" TP0", graph="cuda graph: True")
            .notes(clients=12)
        ),
        ("packed-slot",),
        ("pp-max-micro-batch-size 3", "1 of 4"),
        ("few-requests",),
    ),
    Variant(
        "vLLM, sixteen running, one stage at a time, flat throughput",
        lambda m: (
            m.launch(VLLM_PP4 + " --max-num-seqs 16")
            .vllm_stats(16, 16, tok_s=400.0)
            .bench(
                {"concurrency": 16, "output_tok_s": 400.0, "itl_ms_mean": 40.0},
                {"concurrency": 64, "output_tok_s": 402.0},
            )
            .smi(H100, [25, 24, 26, 25], power=250.0, limit=700.0, clock=1980.0)
        ),
        ("packed-slot",),
        ("--max-num-seqs",),
        ("few-requests", "kv-limited", "imbalance"),
    ),
    Variant(
        "traces of eight ranks, one micro-batch of sixteen",
        lambda m: traces(m, [900.0] * 8, 1, 16),
        ("packed-slot",),
        ("1 of 8",),
    ),
    Variant(
        "traces of four ranks, two micro-batches of four",
        lambda m: traces(m.notes(concurrent_requests=8), [900.0] * 4, 2, 4),
        ("packed-slot",),
        ("2 of 4",),
    ),
    Variant(
        "SGLang metrics alone, with the number of clients noted",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 3 --enable-metrics")
            .write(
                "metrics.prom", 'sglang:num_running_reqs{pp_rank="0"} 12.0\nsglang:num_running_reqs{pp_rank="1"} 12.0\n'
            )
            .notes(clients=12)
        ),
        ("packed-slot",),
        ("pp-max-micro-batch-size 4",),
    ),
    Variant(
        "a bench shows that smaller micro-batches are faster",
        lambda m: m.launch(SGLANG_PP4).bench(
            {"concurrency": 16, "output_tok_s": 300, "pp_max_micro_batch_size": 16},
            {"concurrency": 16, "output_tok_s": 520, "pp_max_micro_batch_size": 4},
        ),
        ("packed-slot",),
        ("1.73",),
    ),
    Variant(
        "fullbore's own account",
        lambda m: m.write(
            "account.json",
            '{"window_s": 10.0, "stages": [{"stage": 0, "seconds": {"compute": 2.4, "host": 0.1, "packed": 7.5}}, '
            '{"stage": 1, "seconds": {"compute": 2.5, "packed": 7.5}}, {"stage": 2, "seconds": {"compute": 2.5, '
            '"packed": 7.5}}, '
            '{"stage": 3, "seconds": {"compute": 2.5, "packed": 7.5}}]}',
        ).notes(concurrent_requests=8),
        ("packed-slot",),
        ("--pp-max-micro-batch-size auto",),
    ),
    # -------------------------------------------------------------------------------------------------- ring-order
    Variant(
        "two stages, speculation, no depth",
        lambda m: (
            m.launch(
                "SGLANG_ENABLE_PP_SPEC=1 python3 -m sglang.launch_server --model-path /m --pp-size 2 --tp-size 2 "
                "--speculative-algorithm EAGLE"
            )
            .sglang_decode(2, 24, queue=40)
            .notes(stage_ms=[202, 202], step_period_ms=[455, 452])
        ),
        ("ring-order",),
        ("404", "--pp-async-batch-depth 1"),
        ("imbalance", "few-requests", "packed-slot"),
    ),
    Variant(
        "four stages at three quarters, only samples and flags",
        lambda m: (
            m.launch(SGLANG_PP4 + " --speculative-algorithm NEXTN")
            .sglang_decode(4, 16, queue=30)
            .smi(H100, [75, 74, 76, 75], power=480.0, limit=700.0, clock=1980.0)
        ),
        ("ring-order",),
        ("75%",),
        ("at-roofline", "packed-slot"),
    ),
    # --------------------------------------------------------------------------------------------------- imbalance
    Variant(
        "ninety-four layers on eight stages, the rest on the last",
        lambda m: (
            m.launch("python3 -m sglang.launch_server --model-path /m/Qwen3-235B-A22B --pp-size 8")
            .sglang_decode(8, 16)
            .notes(num_hidden_layers=94, clients=128, layers_per_stage=[11, 11, 11, 11, 11, 11, 11, 17])
            .smi(H100, [62, 63, 64, 63, 62, 64, 63, 98], power=[400.0] * 7 + [610.0], limit=700.0, clock=1980.0)
        ),
        ("imbalance",),
        ("17", "SGLANG_PP_LAYER_PARTITION=12,12,12,12,12,12,11,11"),
        ("ring-order", "packed-slot", "few-requests"),
    ),
    Variant(
        "vLLM prints an uneven split",
        lambda m: (
            m.launch(VLLM_PP4)
            .vllm_stats(
                64, tok_s=900.0, extra="INFO 03-01 10:00:00 Hidden layers were unevenly partitioned: [10,10,10,30]\n"
            )
            .smi(A100, [34, 33, 35, 97], power=[200.0, 200.0, 200.0, 380.0])
        ),
        ("imbalance",),
        ("30", "VLLM_PP_LAYER_PARTITION=15,15,15,15"),
    ),
    Variant(
        "traces with one stage twice as slow",
        lambda m: traces(m.notes(concurrent_requests=32), [500.0, 500.0, 1000.0, 500.0], 8, 4),
        ("imbalance",),
        ("stage 2",),
        ("packed-slot", "few-requests", "ring-order"),
    ),
    Variant(
        "two kinds of card, the same number of layers",
        lambda m: (
            m.launch("vllm serve /m --pipeline-parallel-size 2")
            .vllm_stats(32, tok_s=500.0)
            .notes(num_hidden_layers=48)
            .smi(
                "",
                [99, 55],
                cards=["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"],
                power=[330.0, 300.0],
                limit=350.0,
                clock=1700.0,
            )
        ),
        ("imbalance",),
        ("VLLM_PP_LAYER_PARTITION=",),
        ("clock-throttle",),
    ),
    Variant(
        "stage times noted, requests waiting",
        lambda m: m.launch(VLLM_PP4).vllm_stats(64, 12).notes(stage_ms=[10, 10, 10, 19], num_hidden_layers=40),
        ("imbalance",),
        ("stage 3",),
    ),
    Variant(
        "the engine's own occupancy by rank",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 3")
            .sglang_decode(3, 20)
            .notes(clients=60)
            .write(
                "m.prom",
                "".join(f'sglang:fwd_occupancy{{pp_rank="{n}"}} {v}\n' for n, v in enumerate((0.55, 0.97, 0.56))),
            )
        ),
        ("imbalance",),
        ("stage 1",),
    ),
    # ------------------------------------------------------------------------------------------------ launch-bound
    Variant(
        "vLLM eager, one request, far from the memory roofline",
        lambda m: (
            m.launch("vllm serve /models/Llama-3.1-8B-Instruct-bf16 --pipeline-parallel-size 2 --enforce-eager")
            .bench({"concurrency": 1, "output_tok_s": 31.0, "itl_ms_mean": 32.0})
            .smi(A100, [30, 31], power=120.0)
        ),
        ("launch-bound",),
        ("--enforce-eager",),
        ("not-idle-time", "slow-link", "at-roofline"),
    ),
    Variant(
        "SGLang decode lines without graphs",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 4, graph="cuda graph: False", tok_s=60.0)
            .notes(clients=16, model="Qwen3-32B bf16")
            .bench({"concurrency": 1, "output_tok_s": 10.0, "itl_ms_mean": 98.0})
            .smi(H100, [40, 41, 40, 39], power=200.0, limit=700.0, clock=1980.0)
        ),
        ("launch-bound",),
        ("cuda graph: False",),
        ("packed-slot",),
    ),
    Variant(
        "kernels with gaps between them",
        lambda m: dense_then_sparse(m.launch("sglang serve --pp-size 2 --disable-cuda-graph --model-path /m")),
        ("launch-bound",),
    ),
    Variant(
        "eager against graphs in a bench",
        lambda m: m.launch(VLLM_PP4).bench(
            {"concurrency": 4, "output_tok_s": 90.0, "enforce_eager": True},
            {"concurrency": 4, "output_tok_s": 210.0, "enforce_eager": False},
        ),
        ("launch-bound",),
        ("2.33",),
    ),
    # ------------------------------------------------------------------------------------------- chunks-serialised
    Variant(
        "llama.cpp: smaller micro-batches of a long prompt are slower",
        lambda m: (
            m.launch("llama-server -m /m/70b.gguf -ngl 999 -b 4096 -ub 512")
            .notes(gpus=2, input_tokens=16384, output_tokens=1)
            .bench(
                {"concurrency": 1, "input_tok_s": 900.0, "ubatch": 4096},
                {"concurrency": 1, "input_tok_s": 700.0, "ubatch": 512},
            )
        ),
        ("chunks-serialised",),
    ),
    Variant(
        "long prompts, one stage at a time",
        lambda m: (
            m.launch(VLLM_PP4 + " --max-num-batched-tokens 8192 --async-scheduling")
            .notes(input_tokens=100_000, output_tokens=2, concurrent_requests=6)
            .smi(H100, [26, 25, 24, 25], power=300.0, limit=700.0, clock=1980.0)
        ),
        ("chunks-serialised", "packed-slot"),
        ("--no-async-scheduling",),
    ),
    # --------------------------------------------------------------------------------------- control-plane-latency
    Variant(
        "sixteen stages agree on every bootstrap",
        lambda m: (
            m.launch(
                "python3 -m sglang.launch_server --model-path /m --pp-size 16 --tp-size 1 --disaggregation-mode prefill"
            )
            .write(
                "server.log",
                "".join(
                    f"[2026-03-01 10:00:{n:02d} PP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: "
                    f"0, token usage: 0.05, "
                    f"#running-req: 0, #queue-req: 0, #bootstrap-req: 3, #inflight-req: 1, input throughput "
                    f"(token/s): 4000.0\n"
                    for n in range(0, 50, 4)
                ),
            )
            .bench({"concurrency": 1, "ttft_ms_mean": 26_000.0}, {"concurrency": 16, "ttft_ms_mean": 29_300.0})
            .smi("NVIDIA H200", [8, 9, 7, 8] * 4, power=150.0, limit=700.0, clock=1980.0)
        ),
        ("control-plane-latency",),
        ("TTFT", "29.3"),
        ("packed-slot", "few-requests", "not-idle-time"),
    ),
    Variant(
        "the way back takes longer than the work",
        lambda m: traces(m.notes(concurrent_requests=8).launch(VLLM_PP4), [500.0] * 4, 1, 8, return_us=6000.0),
        ("control-plane-latency",),
        absent=("few-requests", "imbalance"),
    ),
    Variant(
        "metadata is sent to every rank in turn",
        lambda m: (
            m.launch("python -m gllm.entrypoints.api_server --pp 4 --model-path /m")
            .notes(pp_size=4, metadata_send_ms_per_rank=25, concurrent_requests=16)
            .bench({"concurrency": 16, "output_tok_s": 110.0, "itl_ms_mean": 145.0})
        ),
        ("control-plane-latency",),
        ("100",),
    ),
    # --------------------------------------------------------------------------------------------------- slow-link
    Variant(
        "tensor ranks over plain Ethernet",
        lambda m: (
            m.launch("vllm serve /models/Llama-3.1-70B-FP8 --tensor-parallel-size 2 --pipeline-parallel-size 1")
            .vllm_stats(1, tok_s=4.0, extra="node1:12:34 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n")
            .notes(network="1 GbE", num_hidden_layers=80, hidden_size=8192)
        ),
        ("slow-link",),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("few-requests",),
    ),
    Variant(
        "hidden states on their way most of the round",
        lambda m: traces(m, [400.0] * 3, 1, 1, hop_us=900.0),
        ("slow-link",),
        ("0.9 ms",),
    ),
    Variant(
        "mining risers, every layer divided",
        lambda m: (
            m.launch("llama-server -m /m/llama-70b-Q4_K_M.gguf -ngl 999 --split-mode row -np 1")
            .bench({"concurrency": 1, "output_tok_s": 8.0, "itl_ms_mean": 125.0})
            .smi("Tesla P40", [30, 31, 29, 30], power=80.0, limit=250.0, clock=1531.0, memory=12_000.0, link=(1, 1))
        ),
        ("slow-link",),
        ("x1",),
        ("few-requests", "packed-slot", "clock-throttle"),
    ),
    # ----------------------------------------------------------------------------------------------- spin-deadlock
    Variant(
        "tokens frozen in two dumps, cards hot only by name",
        lambda m: (
            m.launch(SGLANG_PP4)
            .write(
                "a.prom",
                'sglang:num_running_reqs{pp_rank="0"} 6.0\nsglang:realtime_tokens_total{mode="decode",pp_rank="0"} 5000\n',  # noqa: E501
            )
            .write(
                "b.prom",
                'sglang:num_running_reqs{pp_rank="0"} 6.0\nsglang:realtime_tokens_total{mode="decode",pp_rank="0"} 5000\n',  # noqa: E501
            )
            .smi(H100, [100] * 4, power=130.0, limit=700.0, clock=1980.0)
        ),
        ("spin-deadlock",),
        ("130 W",),
        ("packed-slot", "few-requests", "at-roofline"),
    ),
    Variant(
        "the log's throughput falls to nothing",
        lambda m: m.launch(VLLM_PP4).vllm_stats(5, stalled=4),
        ("spin-deadlock",),
        ("0.0 tok",),
    ),
    Variant(
        "a peer was killed and the others wait",
        lambda m: m.launch(VLLM_PP4).vllm_stats(
            5,
            stalled=2,
            extra="ERROR 03-01 10:09:00 Worker proc VllmWorker-3 died unexpectedly, exit code: -9\n"
            "[rank0]:[E301] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=RECV) ran for "
            "600010 milliseconds\n",
        ),
        ("spin-deadlock",),
        ("died",),
    ),
    # -------------------------------------------------------------------------------------------- stage-divergence
    Variant(
        "two ranks decode different batches",
        lambda m: uneven_logs(m.launch("sglang serve --pp-size 2 --model-path /m")),
        ("stage-divergence",),
        ("batch 13",),
    ),
    # -------------------------------------------------------------------------------------------------- kv-limited
    Variant(
        "vLLM preempts",
        lambda m: m.launch(VLLM_PP4 + " --max-num-seqs 256").vllm_stats(
            37, 90, kv=99.2, extra="WARNING 03-01 10:09:00 Sequence group 7 is preempted by PreemptionMode.RECOMPUTE\n"
        ),
        ("kv-limited",),
        ("--gpu-memory-utilization",),
        ("few-requests", "packed-slot"),
    ),
    Variant(
        "SGLang retracts",
        lambda m: m.launch(SGLANG_PP4).sglang_decode(4, 9, queue=25, usage=0.98).notes(clients=61),
        ("kv-limited",),
        ("--mem-fraction-static",),
    ),
    Variant(
        "eight even stages refused as if each held the model",
        lambda m: (
            m.launch("vllm serve /m --pipeline-parallel-size 8 --max-model-len 202752")
            .notes(num_hidden_layers=92)
            .write(
                "server.log",
                "".join(
                    f"(Worker_PP{n} pid=1) INFO 01-28 10:00:00 [gpu_worker.py:1] Available KV cache memory: 28.57 GiB\n"
                    for n in range(8)
                )
                + "ERROR 01-28 10:00:01 ValueError: To serve at least one request with the models's max seq len (202752), (71.16 GiB KV cache "  # noqa: E501
                "is needed, which is larger than the available KV cache memory (28.57 GiB). Based on the available "
                "memory, the estimated "
                "maximum model length is 81392.\n",
            )
        ),
        ("kv-limited",),
        ("81392",),
        ("few-requests", "insufficient-evidence"),
    ),
    Variant(
        "out of memory on one of four even stages",
        lambda m: m.launch("python3 -m sglang.launch_server --model-path /m/Qwen3-32B --pp-size 4").write(
            "server.log",
            "[2026-03-01 10:00:00 PP1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        ),
        ("kv-limited",),
        absent=("imbalance",),
    ),
    Variant(
        "out of memory on the last stage, where older releases put the remainder",
        lambda m: m.launch("python3 -m sglang.launch_server --model-path /m/Qwen3-235B-A22B --pp-size 8").write(
            "server.log",
            "[2026-03-01 10:00:00 PP7] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        ),
        ("imbalance", "kv-limited"),
        ("17 of 94", "SGLANG_PP_LAYER_PARTITION=12,12,12,12,12,12,11,11"),
    ),
    # ----------------------------------------------------------------------------------------------- not-idle-time
    Variant(
        "one GPU's speed is noted, two are far slower",
        lambda m: (
            m.launch("python run.py  # AutoModelForCausalLM device_map='auto'")
            .notes(one_gpu_tokens_per_s=60, gpus=2)
            .bench({"concurrency": 1, "output_tok_s": 8.0, "itl_ms_mean": 125.0})
        ),
        ("not-idle-time",),
        ("7.5",),
        ("few-requests", "pp-latency-expected"),
    ),
    Variant(
        "layers left on the CPU",
        lambda m: (
            m.launch("llama-server -m /m/70b.gguf -ngl 20 -np 1")
            .write(
                "server.log",
                "load_tensors: offloaded 20/81 layers to GPU\nload_tensors: CUDA0 model buffer size = 9000.00 MiB\n"
                "eval time = 51200.00 ms / 128 runs ( 400.00 ms per token, 2.50 tokens per second)\n",
            )
            .notes(gpus=2)
        ),
        ("not-idle-time",),
        ("20/81",),
    ),
    # ---------------------------------------------------------------------------------------------- clock-throttle
    Variant(
        "one card of four is hot",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 16)
            .notes(clients=64)
            .smi(A100, [60, 61, 99, 60], power=[250.0, 250.0, 180.0, 250.0], clock=[1410.0, 1410.0, 510.0, 1410.0])
        ),
        ("clock-throttle",),
        ("510 MHz", "GPU 2"),
    ),
    Variant(
        "a power limit far below the rating",
        lambda m: (
            m.launch("vllm serve /m --pipeline-parallel-size 2")
            .vllm_stats(16)
            .smi("NVIDIA GeForce RTX 4090", [98, 97], power=149.0, limit=150.0, clock=1200.0, memory=20_000.0)
        ),
        ("clock-throttle",),
        ("-pl 450",),
    ),
    # ------------------------------------------------------------------------------------------------- at-roofline
    Variant(
        "one card reads its weights as fast as it can",
        lambda m: (
            m.launch("vllm serve /models/Qwen2.5-32B-Instruct-AWQ --max-num-seqs 1")
            .bench({"concurrency": 1, "output_tok_s": 40.0, "itl_ms_mean": 25.0})
            .smi("NVIDIA GeForce RTX 4090", [97], power=330.0, limit=450.0, clock=2600.0)
        ),
        ("at-roofline",),
        absent=("few-requests", "launch-bound"),
    ),
    Variant(
        "four full stages",
        lambda m: (
            m.launch(VLLM_PP4)
            .vllm_stats(96, tok_s=3000.0)
            .smi(H100, [97, 96, 97, 95], power=610.0, limit=700.0, clock=1980.0)
        ),
        ("at-roofline",),
        ("no bubble",),
        ("ring-order", "packed-slot", "imbalance", "insufficient-evidence"),
    ),
    Variant(
        "traces of a full pipeline",
        lambda m: traces(m.notes(concurrent_requests=32), [900.0] * 4, 8, 4),
        ("at-roofline",),
    ),
    # ----------------------------------------------------------------------------------------- pp-latency-expected
    Variant(
        "one request, two GPUs as fast as one",
        lambda m: m.bench(
            {"concurrency": 1, "e2e_s": 11.51, "gpus": 1}, {"concurrency": 1, "e2e_s": 11.3, "gpus": 2}
        ).notes(model="Llama 7B"),
        ("pp-latency-expected",),
        absent=("insufficient-evidence", "not-idle-time"),
    ),
    Variant(
        "tensor ranks halve the time per token, stages do not",
        lambda m: m.bench(
            {"concurrency": 1, "tpot_ms": 162.4, "layout": "tp2 pp1"},
            {"concurrency": 1, "tpot_ms": 331.0, "layout": "tp1 pp2"},
        ).notes(gpu="GB10", gpus=2),
        ("pp-latency-expected",),
        ("tp=2",),
    ),
    # ------------------------------------------------------------------------------- tensor ranks, GPUs in use
    Variant(
        "traces of four tensor ranks that exchange half of the time",
        lambda m: tensor_traces(m, [(60.0, 70.0)] * 4),
        ("slow-link",),
        ("54%", "64 exchanges"),
        ("launch-bound", "packed-slot", "control-plane-latency"),
    ),
    Variant(
        "traces of tensor ranks on fast links",
        lambda m: tensor_traces(m.notes(concurrent_requests=1), [(60.0, 12.0)] * 4),
        ("insufficient-evidence", "at-roofline"),
        absent=("slow-link", "launch-bound", "packed-slot"),
    ),
    Variant(
        "tensor ranks wait for a slow one of them: no slow link",
        lambda m: tensor_traces(m.notes(concurrent_requests=1), [(60.0, 70.0), (60.0, 70.0), (120.0, 10.0)]),
        ("insufficient-evidence",),
        absent=("slow-link",),
    ),
    Variant(
        "stages of two tensor ranks, one micro-batch",
        lambda m: stages_of_tensor_ranks(
            m.launch("python3 -m sglang.launch_server --model-path /m --pp-size 2 --tp-size 2").notes(clients=8)
        ),
        ("packed-slot",),
        absent=("slow-link", "launch-bound", "few-requests"),
    ),
    Variant(
        "four of the machine's eight cards, in an order of their own",
        lambda m: (
            m.launch(f"CUDA_VISIBLE_DEVICES=7,6,1,0 {SGLANG_PP4}")
            .sglang_decode(4, 8)
            .notes(clients=32)
            .smi(H100, [98, 55, 0, 0, 0, 0, 56, 54], power=[600, 330, 70, 70, 70, 70, 330, 330], limit=700.0)
        ),
        ("imbalance",),
        ("stage 3", "GPU 0"),
    ),
    Variant(
        "four of the machine's eight cards, not said which",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 8)
            .notes(clients=32)
            .smi(H100, [0, 0, 98, 55, 56, 54, 0, 0], power=[70, 70, 600, 330, 330, 330, 70, 70], limit=700.0)
        ),
        ("imbalance",),
        ("stage 0", "GPU 2"),
    ),
    Variant(
        "two copies of a pipeline, four clients each",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 2 --dp-size 2")
            .sglang_decode(2, 4, tok_s=200.0)
            .notes(clients=8)
            .smi(H100, [49, 50, 51, 50], power=330.0, limit=700.0)
        ),
        ("packed-slot",),
        ("over 2 replicas",),
    ),
    Variant(
        "attention divided over data-parallel ranks is no copy",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 2 --tp-size 2 --dp-size 2 --enable-dp-attention")
            .sglang_decode(2, 4, tok_s=200.0)
            .notes(clients=8)
            .smi(H100, [95, 96, 95, 97], power=600.0, limit=700.0)
        ),
        ("at-roofline",),
        absent=("packed-slot",),
    ),
    # ------------------------------------------------------------------------------------- after public reports
    Variant(
        "one card, rows, layers: layers are as fast as one card",
        lambda m: (
            m.launch("llama-bench -m mistral-7b.Q5_K_M.gguf -ngl 99 -sm none,row,layer")
            .bench(
                {"concurrency": 1, "output_tok_s": 41.0, "split_mode": "none"},
                {"concurrency": 1, "output_tok_s": 28.0, "split_mode": "row"},
                {"concurrency": 1, "output_tok_s": 40.0, "split_mode": "layer"},
            )
            .notes(gpus=2, gpu="Quadro P6000")
        ),
        ("pp-latency-expected",),
        ("2 stages",),
        ("few-requests", "launch-bound"),
    ),
    Variant(
        "one request became thirty times slower with a release",
        lambda m: (
            m.launch("vllm serve /models/Llama-3.1-8B-Instruct --pipeline-parallel-size 2 --enforce-eager")
            .bench(
                {"concurrency": 1, "output_tok_s": 1.7, "version": "0.5.4"},
                {"concurrency": 1, "output_tok_s": 50.0, "version": "0.5.3"},
            )
            .smi(A100, [3, 4], power=60.0)
            .notes(num_hidden_layers=32)
        ),
        ("not-idle-time",),
        ("29.4",),
        ("launch-bound", "few-requests", "pp-latency-expected"),
    ),
    Variant(
        "one request runs and fills most of the cache, others wait",
        lambda m: m.launch("vllm serve /m -pp 2 --max-model-len 131072").vllm_stats(1, 14, tok_s=5.4, kv=76.5),
        ("kv-limited",),
        ("no room",),
        ("few-requests", "spin-deadlock"),
    ),
    Variant(
        "prompts are being read, the cache fills slowly: not short of it",
        lambda m: m.launch("vllm serve /m -pp 2").vllm_stats(34, 66, tok_s=80.0, prompt_tok_s=24_000.0, kv=65.0),
        ("insufficient-evidence",),
        absent=("kv-limited", "few-requests"),
    ),
    Variant(
        "preemptions between two dumps, the log sees the cache below full",
        lambda m: (
            m.launch("vllm serve /m -pp 4")
            .vllm_stats(259, 535, kv=82.0)
            .write("metrics-1.prom", "vllm:num_preemptions_total 100.0\nvllm:num_requests_running 259.0\n")
            .write("metrics-2.prom", "vllm:num_preemptions_total 420.0\nvllm:num_requests_running 259.0\n")
        ),
        ("kv-limited",),
    ),
    Variant(
        "out of memory after an hour, one stage much fuller",
        lambda m: (
            m.launch("vllm serve /m -pp 3")
            .vllm_stats(30, extra="ERROR 02-07 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112 MiB\n")
            .smi(A100, [50, 51, 49], memory=[63_000, 63_000, 79_900], power=200.0)
            .notes(num_hidden_layers=61)
        ),
        ("imbalance",),
        ("VLLM_PP_LAYER_PARTITION=",),
        ("few-requests",),
    ),
    Variant(
        "rows over a network of 100 Mbit/s",
        lambda m: (
            m.launch("llama-cli --split-mode row -m 70b.gguf -ngl 99 --rpc 10.0.0.2:50052")
            .bench({"concurrency": 1, "output_tok_s": 1.2})
            .notes(network="100 Mbit/s Ethernet", gpus=4, num_hidden_layers=61, hidden_size=7168)
        ),
        ("slow-link",),
        absent=("not-idle-time", "few-requests"),
    ),
    Variant(
        "two machines three times slower than one",
        lambda m: (
            m.write("start.txt", "exo\n")
            .bench(
                {"concurrency": 1, "output_tok_s": 3.1, "machines": 2},
                {"concurrency": 1, "output_tok_s": 9.0, "machines": 1},
            )
            .notes(network="Wi-Fi 300 Mbit/s", hidden_size=8192)
        ),
        ("not-idle-time", "slow-link"),
    ),
    Variant(
        "power capped far below the board's rating",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 8)
            .notes(clients=32)
            .smi("NVIDIA GB300", [97, 96, 97, 98], power=498.0, limit=500.0, clock=870.0)
        ),
        ("clock-throttle",),
        absent=("at-roofline",),
    ),
    Variant(
        "llama.cpp finds no room in its cache",
        lambda m: m.launch("llama-server -m m.gguf -ngl 99 -c 4096 -np 8").write(
            "server.log",
            "slot update_slots: id  3 | task 77 | failed to find free space in the KV cache, retrying with smaller "
            "batch size, i = 0, n_batch = 512, ret = 1\n" * 5,
        ),
        ("kv-limited",),
    ),
    Variant(
        "batches larger than any graph",
        lambda m: (
            m.launch("sglang serve --model-path /models/Llama-3.1-70B --pp-size 2 --cuda-graph-max-bs 8")
            .sglang_decode(2, 32, graph="cuda graph: False", tok_s=700.0)
            .bench({"concurrency": 64, "output_tok_s": 700.0, "itl_ms_mean": 91.0})
            .smi(H100, [60, 61], power=300.0, limit=700.0)
        ),
        ("launch-bound",),
        ("16-bit weights assumed",),
        ("packed-slot",),
    ),
    Variant(
        "one prompt of many chunks, one stage at a time",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 4 --chunked-prefill-size 2048")
            .smi(H100, [26, 25, 26, 24], power=250.0, limit=700.0)
            .notes(input_tokens=64_000, output_tokens=1, concurrent_requests=1)
        ),
        ("chunks-serialised",),
        absent=("few-requests",),
    ),
    Variant(
        "smaller chunks are faster: they do follow each other",
        lambda m: (
            m.launch("vllm serve /m -pp 4")
            .bench(
                {"concurrency": 1, "chunk": 8192, "input_tok_s": 14_000.0},
                {"concurrency": 1, "chunk": 2048, "input_tok_s": 18_000.0},
            )
            .notes(input_tokens=128_000, output_tokens=1)
        ),
        ("insufficient-evidence",),
        absent=("chunks-serialised", "few-requests"),
    ),
    # --------------------------------------------------------------------------------------- insufficient-evidence
    Variant(
        "a command line alone",
        lambda m: m.launch(SGLANG_PP4),
        ("insufficient-evidence",),
        ("concurrency", "nvidia-smi"),
    ),
    Variant(
        "two traces of four",
        lambda m: [m.trace(rank, 4, pipeline_intervals([900.0] * 4, 1, 20)[rank]) for rank in (0, 2)],
        ("insufficient-evidence",),
        ("rank 1, 3",),
        ("packed-slot", "imbalance", "few-requests"),
    ),
    Variant(
        "busy cards, unknown load",
        lambda m: m.launch(VLLM_PP4).smi(A100, [40, 42, 39, 41], power=150.0),
        ("insufficient-evidence",),
        ("concurrency",),
    ),
    Variant(
        "throughput with and without stages, load unknown",
        lambda m: m.launch(VLLM_PP4).bench(
            {"output_tok_s": 800.0, "ttft_ms_mean": 100.0, "pp": 1},
            {"output_tok_s": 810.0, "ttft_ms_mean": 90.0, "pp": 4},
        ),
        ("insufficient-evidence",),
    ),
    # --------------------------------------------------------------------------------------------------- negatives
    Variant(
        "a lone long prefill moves prompt tokens: no hang",
        lambda m: (
            m.launch(VLLM_PP4)
            .vllm_metrics("1.prom", running=1, tokens=500, prompt=1000)
            .vllm_metrics("2.prom", running=1, tokens=500, prompt=9000)
        ),
        ("few-requests",),
        absent=("spin-deadlock",),
    ),
    Variant(
        "later ranks print later: no divergence",
        lambda m: prefill_logs(m.launch(SGLANG_PP4), 4, [20, 20, 19, 18]),
        ("insufficient-evidence",),
        absent=("stage-divergence",),
    ),
    Variant(
        "a line is missing from one log: no divergence",
        lambda m: prefill_logs(m.launch(SGLANG_PP4), 4, [20, 20, 20, 20], lost=(2, 9)),
        ("insufficient-evidence",),
        absent=("stage-divergence",),
    ),
    Variant(
        "idle after work, health checks go on: no hang",
        lambda m: (
            m.launch(SGLANG_PP4)
            .sglang_decode(4, 4)
            .write("health.log", '[2026-03-01 12:00:00] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n')
            .notes(clients=16)
        ),
        ("insufficient-evidence",),
        absent=("spin-deadlock", "packed-slot"),
    ),
    Variant(
        "a card at its rated power chooses its clock",
        lambda m: (
            m.launch("vllm serve /m --pipeline-parallel-size 2")
            .vllm_stats(32, tok_s=400.0)
            .smi("NVIDIA L4", [99, 98], power=71.5, limit=72.0, clock=1000.0, memory=20_000.0)
        ),
        ("at-roofline",),
        absent=("clock-throttle",),
    ),
    Variant(
        "slow link, but a pipeline that hardly uses it",
        lambda m: (
            m.launch("llama-server -m /m/llama-70b-Q4_K_M.gguf -ngl 999 --split-mode layer -np 1")
            .bench({"concurrency": 1, "output_tok_s": 17.0, "itl_ms_mean": 59.0})
            .smi(
                "NVIDIA GeForce RTX 3090",
                [49, 50],
                power=200.0,
                limit=350.0,
                clock=1700.0,
                memory=20_000.0,
                link=[(3, 16), (1, 4)],
            )
        ),
        ("few-requests", "pp-latency-expected"),
        ("link:",),
        ("slow-link",),
    ),
    Variant(
        "waiting requests but a cache with room",
        lambda m: (
            m.launch(VLLM_PP4 + " --max-num-seqs 8")
            .vllm_stats(8, 40, kv=12.0)
            .smi(H100, [25, 25, 24, 26], power=250.0, limit=700.0, clock=1980.0)
        ),
        ("packed-slot",),
        absent=("kv-limited",),
    ),
    Variant(
        "eight requests in eight slots on eight stages",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 8 --pp-max-micro-batch-size 1")
            .sglang_decode(8, 1)
            .notes(clients=8)
            .smi(H100, [88, 90, 91, 89, 90, 91, 90, 89], power=500.0, limit=700.0, clock=1980.0)
        ),
        ("at-roofline", "insufficient-evidence"),
        absent=("packed-slot", "few-requests", "ring-order"),
    ),
    # ------------------------------------------------------------------------------------------------ more of each
    Variant(
        "sixteen stages, the rest of 61 layers on the last",
        lambda m: (
            m.launch("vllm serve /models/DeepSeek-V3 --pipeline-parallel-size 16")
            .vllm_stats(200, tok_s=2000.0)
            .smi(
                H100,
                [21] * 15 + [98],
                power=[200.0] * 15 + [600.0],
                limit=700.0,
                clock=1980.0,
                memory=[20_000.0] * 15 + [78_000.0],
            )
        ),
        ("imbalance",),
        ("16 of 61", "last stage"),
        ("packed-slot", "few-requests"),
    ),
    Variant(
        "traces of batches of one",
        lambda m: traces(m, [900.0] * 4, 1, 1),
        ("few-requests",),
        ("1/4",),
        ("packed-slot",),
    ),
    Variant(
        "two unequal machines in series",
        lambda m: m.bench(
            {"concurrency": 1, "output_tok_s": 40.0, "gpus": 1, "machine": "fast"},
            {"concurrency": 1, "output_tok_s": 20.0, "gpus": 1, "machine": "slow"},
            {"concurrency": 1, "output_tok_s": 24.0, "gpus": 2, "machine": "both"},
        ),
        ("pp-latency-expected",),
        absent=("not-idle-time", "slow-link"),
    ),
    Variant(
        "prefill: stages far ahead of tensor ranks on slow slots",
        lambda m: m.notes(gpu="RTX 3090", gpus=2, input_tokens=16384, output_tokens=1).bench(
            {"concurrency": 1, "input_tok_s": 379.0, "layout": "tp2"},
            {"concurrency": 1, "input_tok_s": 1046.0, "layout": "pp2"},
        ),
        ("slow-link",),
        ("2.76",),
    ),
    Variant(
        "tensor ranks without graphs against stages with: something else differs",
        lambda m: m.notes(gpu="RTX 3090", gpus=2).bench(
            {"concurrency": 1, "output_tok_s": 28.0, "layout": "tp2", "cuda_graph": False},
            {"concurrency": 1, "output_tok_s": 112.6, "layout": "pp2", "cuda_graph": True},
        ),
        ("insufficient-evidence",),
        absent=("slow-link", "not-idle-time"),
    ),
    Variant(
        "twice the network, the same speed",
        lambda m: (
            m.launch("vllm serve /models/Llama-3-70B --pipeline-parallel-size 2")
            .notes(concurrent_requests=1)
            .bench(
                {"concurrency": 1, "output_tok_s": 20.0, "link_gbps": 400},
                {"concurrency": 1, "output_tok_s": 20.1, "link_gbps": 800},
            )
        ),
        ("few-requests", "pp-latency-expected"),
        ("no difference",),
        ("slow-link",),
    ),
    Variant(
        "two dumps three seconds apart are too close to call it a hang",
        lambda m: (
            m.launch(VLLM_PP4)
            .vllm_metrics("1.prom", running=6, tokens=500)
            .vllm_metrics("2.prom", running=6, tokens=500)
            .notes(metrics="3 s apart")
        ),
        ("insufficient-evidence",),
        absent=("spin-deadlock",),
    ),
    Variant(
        "an uneven split on equal cards, seen only in the settings",
        lambda m: m.launch("VLLM_PP_LAYER_PARTITION=10,10,10,30 " + VLLM_PP4).vllm_stats(64, 20),
        ("imbalance",),
        ("VLLM_PP_LAYER_PARTITION=15,15,15,15",),
    ),
    Variant(
        "all slots filled, graphs on, and still idle",
        lambda m: (
            m.launch("sglang serve --model-path /m --pp-size 8")
            .sglang_decode(8, 4)
            .notes(clients=32)
            .smi(H100, [30, 31, 29, 30, 30, 31, 30, 29], power=220.0, limit=700.0, clock=1980.0)
        ),
        ("control-plane-latency", "insufficient-evidence"),
        absent=("packed-slot", "few-requests", "imbalance", "ring-order", "launch-bound"),
    ),
    Variant(
        "a mixture of experts on one small machine",
        lambda m: (
            m.launch("vllm serve openai/gpt-oss-120b --max-num-seqs 1")
            .bench({"concurrency": 1, "output_tok_s": 52.0, "itl_ms_mean": 19.2})
            .smi("NVIDIA GB10", [95], power=46.0, limit=None, clock=2400.0, link=(1, 1))
        ),
        ("at-roofline",),
        absent=("clock-throttle", "slow-link", "few-requests"),
    ),
    Variant(
        "speculation with depth one at three quarters",
        lambda m: (
            m.launch(SGLANG_PP4 + " --speculative-algorithm EAGLE --pp-async-batch-depth 1")
            .sglang_decode(4, 16, queue=30)
            .smi(H100, [75, 74, 76, 75], power=480.0, limit=700.0, clock=1980.0)
        ),
        ("insufficient-evidence",),
        absent=("ring-order",),
    ),
    Variant(
        "tensor ranks alone are no pipeline",
        lambda m: (
            m.launch("vllm serve /models/Llama-3.1-70B-FP8 --tensor-parallel-size 4")
            .vllm_stats(1, tok_s=70.0)
            .smi(H100, [90, 91, 90, 92], power=450.0, limit=700.0, clock=1980.0)
        ),
        ("at-roofline", "insufficient-evidence"),
        absent=("few-requests", "packed-slot", "slow-link"),
    ),
    Variant(
        "an idle card's clock is low: no throttling",
        lambda m: m.launch(VLLM_PP4).smi(H100, [0, 0, 0, 0], power=70.0, limit=700.0, clock=345.0),
        ("insufficient-evidence",),
        ("under load",),
        ("clock-throttle",),
    ),
    Variant(
        "one request at a time because the server admits no more",
        lambda m: m.launch(VLLM_PP4 + " --max-num-seqs 1").vllm_stats(1, 15, tok_s=30.0),
        ("few-requests",),
        ("--max-num-seqs 16",),
        ("packed-slot", "kv-limited"),
    ),
    Variant(
        "half of two stages at work, and nobody says how many requests there were",
        lambda m: m.write(
            "ps.txt", "root 7 99 0.4 9 4 ? Sl Nov01 9:00 python3 -m sglang.launch_server --tp 1 --pp-size 2\n"
        ).smi(A100, [46, 52], power=180.0),
        ("insufficient-evidence",),
        ("one micro-batch travels at a time", "How many were running tells"),
    ),
    Variant(
        "eager, and the time between tokens follows from requests running and tokens/s",
        lambda m: (
            m.launch("vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1 --pipeline-parallel-size 4 --enforce-eager")
            .vllm_stats(16, tok_s=120.0)
            .smi("NVIDIA L40S", [31, 30, 29, 33], power=98.0, limit=350.0, clock=2520.0)
        ),
        ("launch-bound",),
        ("133.3 ms between a request's tokens",),
    ),
    Variant(
        "as many requests admitted as the fix would admit: another fix",
        lambda m: (
            m.launch(VLLM_PP4 + " --max-num-seqs 256")
            .vllm_stats(16, tok_s=160.0)
            .smi(H100, [25, 26, 24, 25], power=250.0, limit=700.0, clock=1980.0)
        ),
        ("packed-slot",),
        ("vllm#42187",),
        absent=("few-requests",),
    ),
    Variant(
        "the cards' names alone say how many stages there are",
        lambda m: m.launch("./llama-server -m /models/Mystery-70B-Q4_K_M.gguf -ngl 99 -np 1").notes(
            gpu="2x RTX 3090 + RTX 3060", concurrent_requests=1
        ),
        ("few-requests", "pp-latency-expected"),
        ("3 stages",),
    ),
    Variant(
        "a hot GB10 is not the GB10 that needs its power cut",
        lambda m: m.launch("vllm serve /models/m --pipeline-parallel-size 2").write(
            "smi.csv",
            "index, name, utilization.gpu [%], power.draw [W], clocks.sm [MHz], temperature.gpu, "
            "clocks_event_reasons.hw_thermal_slowdown\n"
            + "".join(f"{n}, NVIDIA GB10, 95 %, 30.00 W, 900 MHz, 97, Active\n" for n in (0, 1) * 3),
        ),
        ("clock-throttle",),
        ("airflow",),
    ),
    Variant(
        "tensor ranks over a slow network, and weights that do not fit as 16 bit",
        lambda m: (
            m.launch("vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4")
            .vllm_stats(1, tok_s=9.2, extra="node0:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n")
            .notes(network="1 GbE between 4 nodes", gpu="RTX 4090, one per node", nodes=4)
        ),
        ("slow-link",),
        ("pipeline stages instead of tensor ranks",),
        ("at-roofline", "few-requests"),
    ),
    Variant(
        "a long context's cache is read as well",
        lambda m: (
            m.launch("vllm serve meta-llama/Llama-3.3-70B-Instruct-FP8 --max-model-len 131072")
            .smi("NVIDIA H200", [97], power=500.0, limit=700.0, clock=1900.0)
            .bench({"concurrency": 1, "output_tok_s": 29.0, "itl_ms_mean": 34.5, "input_tokens": 120_000})
        ),
        ("at-roofline",),
        ("39.3 GB of KV cache (120,000 tokens)",),
    ),
    Variant(
        "frozen, and cards at work: perhaps one long prompt",
        lambda m: (
            m.launch(VLLM_PP4)
            .vllm_metrics("1.prom", running=1, tokens=500)
            .vllm_metrics("2.prom", running=1, tokens=500)
            .smi(H100, [97, 98, 96, 97], power=620.0, limit=700.0, clock=1980.0)
        ),
        ("insufficient-evidence",),
        absent=("spin-deadlock",),
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant(variant: Variant, tmp_path: Path) -> None:
    variant.build(EvidenceMaker(tmp_path / "evidence"))
    answer = explain([tmp_path / "evidence"]).answer
    reported = [verdict["id"] for verdict in answer["verdicts"]]
    assert answer["primary"] in variant.expected, answer["verdicts"][0]["summary"]
    assert not set(reported) & set(variant.absent)
    text = str(answer)
    for mention in variant.mentions:
        assert mention in text, mention

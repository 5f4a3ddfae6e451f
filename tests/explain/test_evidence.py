"""Each kind of evidence: recognised by content, read with its places, whatever columns, versions and locales it has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from evidence_maker import EvidenceMaker

from fullbore.explain.evidence import Evidence, read_evidence


def read(folder: Path) -> Evidence:
    return read_evidence([folder])


def kind_of(folder: Path, name: str, content: str | bytes) -> str:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return str(read(folder).files[0].kind)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("index, utilization.gpu [%], power.draw [W]\n0, 5 %, 50.00 W\n", "nvidia-smi --query-gpu samples"),
        (
            "# gpu    pwr     sm   pclk\n# Idx      W      %    MHz\n    0     70     55   1410\n",
            "nvidia-smi dmon samples",
        ),
        ("python3 -m sglang.launch_server --pp-size 2\n", "launch command"),
        ("root  12  0.0 ? Sl 10:00 0:01 /usr/bin/python /usr/bin/vllm serve m -pp 2\n", "launch command"),
        ("[2026-12-01 05:17:52 PP0] Decode batch, #running-req: 8, #token: 1\n", "engine log"),
        (
            "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 1 reqs",
            "engine log",
        ),
        ("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n", "Prometheus metrics"),
        ('[{"concurrency": 1, "output_tok_s": 3}]', "bench results"),
        (
            '{"request_throughput": 1, "output_throughput": 30.0, "mean_ttft_ms": 100, "max_concurrency": 4}',
            "bench results",
        ),
        ('{"anything": "a user says"}', "notes"),
        ('{"pp_size": 2, "internal_states": [{}], "model_path": "m"}', "/server_info reply"),
        ('{"traceEvents": [{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2}]}', "profiler trace"),
        ('{"window_s": 1, "stages": [{"stage": 0, "seconds": {"compute": 1}}]}', "fullbore account"),
        ("just some words\n", "text of no known kind"),
        ("", "empty file"),
        (bytes(range(256)) * 4, "binary data"),
    ],
)
def test_recognised_by_content(content: str | bytes, kind: str, tmp_path: Path) -> None:
    assert kind_of(tmp_path, "file.whatever", content) == kind


def test_compressed_and_utf16_files_are_read(tmp_path: Path) -> None:
    csv = "index, name, utilization.gpu [%]\n0, NVIDIA A100, 50 %\n"
    (tmp_path / "a").write_bytes(gzip.compress(csv.encode()))
    (tmp_path / "b").write_bytes(csv.encode("utf-16"))
    (tmp_path / "c").write_bytes(csv.encode("utf-8-sig"))
    assert [len(read_evidence([tmp_path / name]).gpus) for name in "abc"] == [1, 1, 1]


def test_smi_columns_in_any_order_semicolons_commas_and_missing_values(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(
        "power.draw [W];index;utilization.gpu [%];clocks.sm [MHz];power.limit [W]\n"
        "83,64 W;1;48 %;[N/A];[N/A]\n"
        "power.draw [W];index;utilization.gpu [%];clocks.sm [MHz];power.limit [W]\n"
        "85,64 W;1;52 %;1410 MHz;[Not Supported]\n"
    )
    (gpu,) = read(tmp_path).gpus
    assert gpu.index == 1
    assert gpu.load.power_w.mean == pytest.approx(84.64)
    assert gpu.load.utilisation_percent.mean == 50
    assert gpu.load.sm_clock_mhz.count == 1
    assert gpu.power_limit_w is None


def test_idle_and_loaded_moments_are_kept_apart(tmp_path: Path) -> None:
    rows = ["index, utilization.gpu [%], power.draw [W], pcie.link.gen.current, pcie.link.width.current"]
    rows += ["0, 0 %, 20 W, 1, 16", "1, 0 %, 21 W, 1, 16", "0, 80 %, 200 W, 4, 16", "1, 1 %, 60 W, 4, 16"]
    (tmp_path / "smi.csv").write_text("\n".join(rows))
    first, second = read(tmp_path).gpus
    assert (first.idle.power_w.mean, first.load.power_w.mean) == (20, 200)
    assert second.load.utilisation_percent.mean == 1, "under load with its neighbour, not idle"
    assert second.load.link_gen.maximum == 4
    assert first.first_load is not None
    assert first.first_load.line == 4


def test_throttle_reasons_by_name_and_by_bits(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(
        "index, utilization.gpu [%], clocks_event_reasons.sw_thermal_slowdown, clocks_throttle_reasons.active\n"
        "0, 90 %, Active, 0x0000000000000004\n"
    )
    assert set(read(tmp_path).gpus[0].throttle_reasons) == {"sw_thermal_slowdown", "sw_power_cap"}


def test_plain_nvidia_smi_table(tmp_path: Path) -> None:
    (tmp_path / "smi.txt").write_text(
        "| NVIDIA-SMI 580.65    Driver Version: 580.65    CUDA Version: 13.0 |\n"
        "|   0  NVIDIA GeForce RTX 3090        On  |   00000000:01:00.0 Off |                  N/A |\n"
        "| 30%   45C    P2            150W /  350W |   22342MiB /  24576MiB |     28%      Default |\n"
    )
    (gpu,) = read(tmp_path).gpus
    assert (gpu.name, gpu.power_limit_w, gpu.memory_used_mib) == ("NVIDIA GeForce RTX 3090", 350, 22342)
    assert gpu.load.utilisation_percent.mean == 28


def test_dmon(tmp_path: Path) -> None:
    (tmp_path / "dmon.txt").write_text(
        "#Date       Time        gpu    pwr  gtemp     sm   pclk\n#YYYYMMDD   HH:MM:SS    Idx      W      C      % "
        "   MHz\n"
        " 20260301   10:00:00      0    200     60     90   1410\n 20260301   10:00:00      1      -     61      - "
        "  1400\n"
    )
    first, second = read(tmp_path).gpus
    assert first.load.power_w.mean == 200
    assert not second.load.power_w
    assert second.load.sm_clock_mhz.mean == 1400


@pytest.mark.parametrize(
    ("command", "engine", "flags"),
    [
        ("python3 -m sglang.launch_server --model-path m \\\n  --pp-size 8 --disable-cuda-graph", "sglang", {"pp_size": "8", "disable_cuda_graph": True}),  # noqa: E501
        ("sglang serve --model-path=m --pp-size=2", "sglang", {"pp_size": "2"}),
        ("docker run -e HF_HOME=/x img vllm serve org/m -pp 4 -tp 2", "vllm", {"pp": "4", "tp": "2", "model": "org/m"}),
        ('python -c "import vllm; vllm.LLM(model=\'m\', pipeline_parallel_size=4, enforce_eager=True)"', "vllm", {"pipeline_parallel_size": "4", "enforce_eager": "True"}),  # noqa: E501
        ('["vllm", "serve", "m", "--pipeline-parallel-size", "4"]', "vllm", {"pipeline_parallel_size": "4"}),
        ("command:\n  - vllm\n  - serve\n  - m\n  - --pipeline-parallel-size\n  - '4'", "vllm", {"pipeline_parallel_size": "4"}),  # noqa: E501
        ("llama-server -m x.gguf -ngl 99 -np 2 --split-mode row", "llama.cpp", {"np": "2", "split_mode": "row"}),
        ("fullbore serve SmolLM2 --pp-size 3", "fullbore", {"pp_size": "3", "model": "SmolLM2"}),
        ("trtllm-serve m --pp_size 4 --tp_size 1", "tensorrt-llm", {"pp_size": "4"}),
    ],
)  # fmt: skip
def test_launch_commands(command: str, engine: str, flags: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "launch.txt").write_text(command + "\n")
    launch = read(tmp_path).launches[0]
    assert launch.engine == engine
    assert {name: launch.flags[name].value for name in flags} == flags


def test_environment_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "#!/bin/sh\nexport SGLANG_PP_LAYER_PARTITION=8,8\nA=1 NCCL_DEBUG=INFO sglang serve --pp-size 2\n"
    )
    env = read(tmp_path).launches[0].env
    assert env["SGLANG_PP_LAYER_PARTITION"].value == "8,8"
    assert env["NCCL_DEBUG"].value == "INFO"


def test_sglang_lines_of_all_versions(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[2025-05-05 12:00:00 PP1 TP0] Decode batch. #running-req: 4, #token: 376, token usage: 0.05, gen "
        "throughput (token/s): 20.43, #queue-req: 3, \n"
        "[2025-05-05 12:00:00 PP1 TP1] Decode batch. #running-req: 4, #token: 376, token usage: 0.05, gen "
        "throughput (token/s): 20.43, #queue-req: 3, \n"
        "[2026-05-05 12:00:01 PP1] Decode batch, #running-req: 5, #full token: 376, full token usage: 0.07, cuda "
        "graph: False, gen throughput (token/s): 30.43, #queue-req: 0\n"
        "[2026-05-05 12:00:02 PP0] Prefill batch, #new-seq: 8, #new-token: 128, #cached-token: 5, token usage: "
        "0.02, #running-req: 0, #queue-req: 1, cuda graph: False, input throughput (token/s): 41.31\n"
    )
    ranks = read(tmp_path).logs.sglang.ranks
    assert ranks[1].decode_running.count == 2, "tensor ranks print the same"
    assert (ranks[1].decode_running.maximum, ranks[1].gen_tok_s.maximum, ranks[1].token_usage.maximum) == (
        5,
        30.43,
        0.07,
    )
    assert ranks[1].graph_off == 1
    burst = ranks[0].burst_into_empty_slot
    assert burst is not None
    assert (burst.value, burst.source.line) == (8, 4)


def test_a_restart_begins_a_new_history(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "[2026-05-05 12:00:01 PP0] Decode batch, #running-req: 5, #token: 3\n"
        "[2026-05-05 12:05:01 PP0] Load weight end. elapsed=1 s, mem usage=26.71 GB.\n"
        "[2026-05-05 12:06:01 PP0] Decode batch, #running-req: 2, #token: 3\n"
    )
    rank = read(tmp_path).logs.sglang.ranks[0]
    assert rank.decode_running.maximum == 2
    assert rank.weights_gb is not None
    assert rank.weights_gb.value == 26.71


def test_vllm_lines(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).vllm_stats(
        8,
        3,
        extra="(EngineCore pid=1) INFO 03-01 10:00:00 [core.py:1] Initializing a V1 LLM engine (v0.15.1) with "
        "config: model='/m', "
        "pipeline_parallel_size=2, enforce_eager=True, quantization=None\n"
        "(Worker_PP1 pid=2) INFO 03-01 10:00:00 [x.py:1] Available KV cache memory: 10.42 GiB\n"
        "(Worker_PP0 pid=2) INFO 03-01 10:00:00 [x.py:1] Available KV cache memory: 3.18 GiB\n"
        "INFO 03-01 10:00:00 GPU KV cache size: 512,304 tokens\n",
    )
    vllm = read(tmp_path).logs.vllm
    assert (vllm.running.median, vllm.waiting.maximum, vllm.gen_tok_s.median) == (8, 3, 100)
    assert vllm.version is not None
    assert vllm.version.value == "0.15.1"
    assert {stage: reading.value for stage, reading in vllm.kv_available_gib.items()} == {0: 3.18, 1: 10.42}
    assert vllm.settings["enforce_eager"].value is True
    assert vllm.kv_tokens is not None
    assert vllm.kv_tokens.value == 512304


def test_llama_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "load_tensors: offloaded 20/81 layers to GPU\nslot print_timing: id 0\n"
        "prompt eval time =     500.00 ms /   100 tokens (    5.00 ms per token,   200.00 tokens per second)\n"
        "       eval time =   51200.00 ms /   128 tokens (  400.00 ms per token,     2.50 tokens per second)\n"
    )
    llama = read(tmp_path).logs.llama
    assert llama.offloaded is not None
    assert llama.offloaded.value == (20, 81)
    assert llama.decode_ms.median == 400
    assert llama.prompt_tokens.median == 100


def test_bench_formats(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text(
        '{"max_concurrency": 8, "output_throughput": 95.6, "mean_ttft_ms": 1385.0, "mean_itl_ms": 83.7}\n'
        '{"max_concurrency": 1, "output_throughput": 24.7, "mean_ttft_ms": 400.0, "mean_tp'
    )
    (row,) = read(tmp_path).bench
    assert (row.concurrency, row.output_tok_s, row.ttft_ms, row.itl_ms) == (8, 95.6, 1385.0, 83.7)
    (tmp_path / "bench.jsonl").write_text(
        json.dumps({"results": [{"concurrency": 1, "ttft_s": 0.4, "tok_s": 10, "layout": "TP=2 PP=4", "chunk": 4096}]})
    )
    (row,) = read(tmp_path).bench
    assert (row.ttft_ms, row.tp, row.pp, row.gpus) == (400.0, 2, 4, 8)
    assert row.varied == {"layout": "TP=2 PP=4", "chunk": 4096}


def test_trace_separates_computing_from_waiting(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).trace(3, 4, [(0, 100), (500, 600)], wait_us=[(100, 500)], batch_size=8)
    (rank,) = read(tmp_path).traces
    assert (rank.rank, rank.world_size, rank.compute_us, rank.point_to_point_kernels) == (3, 4, 200, 1)
    assert rank.batch_sizes.median == 8


def test_trace_cut_short_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    maker = EvidenceMaker(tmp_path).trace(0, 2, [(n * 1000.0, n * 1000.0 + 400) for n in range(3000)])
    path = maker.folder / "rank0.trace.json.gz"
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    evidence = read(tmp_path)
    (rank,) = evidence.traces
    assert 1000 < len(rank.compute) < 3000
    assert "ends before" in evidence.files[0].remark


def test_metrics_sums_and_means(tmp_path: Path) -> None:
    (tmp_path / "m.prom").write_text(
        'sglang:num_running_reqs{pp_rank="0",tp_rank="0"} 16.0\nsglang:num_running_reqs{pp_rank="1",tp_rank="0"} 16.0\n'
        'sglang:time_to_first_token_seconds_sum{a="b"} 30.0\nsglang:time_to_first_token_seconds_count{a="b"} 10.0\n'
        'sglang:time_to_first_token_seconds_bucket{le="1.0"} 3\nbroken line {\n'
    )
    (dump,) = read(tmp_path).metrics
    running = dump.total("sglang:num_running_reqs")
    assert running is not None
    assert running.value == 16, "ranks report the same requests"
    mean = dump.mean("sglang:time_to_first_token_seconds")
    assert mean is not None
    assert mean.value == 3.0


def test_folders_are_walked_and_hidden_files_left(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "notes.json").write_text('{"x": 1}')
    (tmp_path / ".hidden").write_text('{"x": 1}')
    assert [note.name for note in read(tmp_path).files] == ["a/b/notes.json"]


def test_missing_path_is_a_problem_not_an_error(tmp_path: Path) -> None:
    assert read_evidence([tmp_path / "nowhere"]).problems == [f"{tmp_path / 'nowhere'}: no such file or folder"]


def test_smi_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "smi.csv").write_text(
        "2026/03/01 10:00:00.441, 0, NVIDIA H100 80GB HBM3, 93 %, 578.38 W, 700.00 W, 68013 MiB, 81559 MiB, 1980 MHz\n"
        "2026/03/01 10:00:00.444, 1, NVIDIA H100 80GB HBM3, 96 %, 595.83 W, 700.00 W, 68012 MiB, 81559 MiB, 1980 MHz\n"
    )
    first, second = read(tmp_path).gpus
    assert (first.name, first.index, second.index) == ("NVIDIA H100 80GB HBM3", 0, 1)
    assert (second.load.power_w.mean, second.power_limit_w, second.load.sm_clock_mhz.mean) == (595.83, 700, 1980)


def test_lines_behind_a_container_prefix(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "worker-3  | 2026-03-01T09:59:59Z [2026-03-01 10:00:05 PP3 TP0] Decode batch, #running-req: 4, #token: 3\n"
    )
    assert list(read(tmp_path).logs.sglang.ranks) == [3]


def test_notes_as_text(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("GPUs: 4\n- Concurrent requests: 12\nmodel = Llama 70B FP8\n")
    found = read(tmp_path).notes
    assert {name: reading.value for name, reading in found.items()} == {
        "gpus": 4,
        "concurrent_requests": 12,
        "model": "Llama 70B FP8",
    }


def test_kv_memory_of_tensor_ranks_counts_the_tightest(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "".join(
            f"(Worker_PP{stage}_TP{rank} pid=1) INFO 03-01 10:00:00 [w.py:1] Available KV cache memory: {free} GiB\n"
            for stage, rank, free in ((0, 0, 3.5), (0, 1, 3.2), (1, 0, 9.0))
        )
    )
    available = read(tmp_path).logs.vllm.kv_available_gib
    assert {stage: reading.value for stage, reading in available.items()} == {0: 3.2, 1: 9.0}


SERVING_RESULT = """============ Serving Benchmark Result ============
Backend:                                 sglang
Max request concurrency:                 16
Successful requests:                     64
Input token throughput (tok/s):          7,963.28
Output token throughput (tok/s):         310.5
Mean E2E Latency (ms):                   2220.65
Mean TTFT (ms):                          190.1
Mean ITL (ms):                           51.5
"""
EVALSCOPE_RESULT = """Benchmarking summary:
+-----------------------------------+----------+
| Key                               |    Value |
+===================================+==========+
| Number of concurrency             |  16      |
+-----------------------------------+----------+
| Output token throughput (tok/s)   |  310.5   |
| Average time to first token (s)   |  0.1901  |
| Average time per output token (s) |  0.0515  |
"""
MARKDOWN_RESULT = """My measurements:

| concurrency | tok/s | TTFT (ms) | ITL (ms) |
|---|---|---|---|
| 16 | 310.5 | 190.1 | 51.5 |
"""
CSV_RESULT = "concurrency,output_tok_s,ttft_ms_mean,itl_ms_mean\n16,310.5,190.1,51.5\n"
LLAMA_BENCH = """ggml_cuda_init: found 2 CUDA devices:
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
| model           |     size |  params | backend | ngl |    sm |  test |          t/s |
| --------------- | -------: | ------: | ------- | --: | ----: | ----: | -----------: |
| llama 8B Q4_K_M | 4.9 GiB  |  8.03 B | CUDA    |  99 |  none | tg128 | 90.1 ± 0.2   |
| llama 8B Q4_K_M | 4.9 GiB  |  8.03 B | CUDA    |  99 | layer | pp512 | 4010.0 ± 9.2 |
| llama 8B Q4_K_M | 4.9 GiB  |  8.03 B | CUDA    |  99 | layer | tg128 | 88.7 ± 0.2   |

build: ff252ea4 (3978)
"""


@pytest.mark.parametrize("text", [SERVING_RESULT, EVALSCOPE_RESULT, MARKDOWN_RESULT, CSV_RESULT])
def test_results_as_text(text: str, tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).write("result.txt", text)
    (row,) = read(tmp_path).bench
    assert (row.concurrency, row.output_tok_s, row.ttft_ms) == (16, 310.5, pytest.approx(190.1))
    assert row.itl_ms == pytest.approx(51.5)
    assert row.source.line is not None


def test_several_summaries_in_one_text(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).write("result.txt", SERVING_RESULT + "\n" + SERVING_RESULT.replace(" 16\n", " 1\n"))
    assert [row.concurrency for row in read(tmp_path).bench] == [16, 1]


def test_llama_bench_table(tmp_path: Path) -> None:
    EvidenceMaker(tmp_path).write("bench.log", LLAMA_BENCH).notes(gpus=2)
    one, reading, both = read(tmp_path).bench
    assert (one.output_tok_s, one.gpus, one.concurrency) == (90.1, 1, 1)
    assert (reading.input_tok_s, reading.input_tokens, reading.output_tok_s) == (4010.0, 512, None)
    assert (both.output_tok_s, both.gpus, both.pp, both.tp) == (88.7, 2, 2, 1)


def test_llama_bench_json(tmp_path: Path) -> None:
    rows = [
        {"n_prompt": 512, "n_gen": 0, "avg_ts": 4010.0, "split_mode": "layer", "n_gpu_layers": 99},
        {"n_prompt": 0, "n_gen": 128, "avg_ts": 88.7, "split_mode": "layer", "n_gpu_layers": 99},
    ]
    EvidenceMaker(tmp_path).bench(*rows).notes(gpus=2)
    reading, generating = read(tmp_path).bench
    assert (reading.input_tok_s, generating.output_tok_s, generating.pp) == (4010.0, 88.7, 2)

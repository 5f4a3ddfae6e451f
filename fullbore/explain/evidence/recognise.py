"""What a file is, told from its content alone."""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    NVIDIA_SMI_CSV = "nvidia-smi --query-gpu samples"
    NVIDIA_SMI_TABLE = "nvidia-smi table"
    DMON = "nvidia-smi dmon samples"
    LAUNCH = "launch command"
    LOG = "engine log"
    METRICS = "Prometheus metrics"
    TRACE = "profiler trace"
    RECORDING = "fullbore recording"
    TIMELINE = "fullbore timeline"
    JSON = "JSON"
    ARCHIVE = "archive"
    BINARY = "binary data"
    EMPTY = "empty file"
    UNKNOWN = "text of no known kind"


# How engines are started. The first group is what the command line has to contain.
ENGINE_COMMANDS: dict[str, re.Pattern[str]] = {
    "sglang": re.compile(r"sglang\.launch_server|\bsglang\s+serve\b|sglang_router|sglang\.bench_one_batch"),
    "vllm": re.compile(r"\bvllm\s+serve\b|vllm\.entrypoints|vllm\s+bench\s+(?:throughput|latency)|\bvllm\.LLM\("),
    "fullbore": re.compile(r"\bfullbore\s+(?:serve|generate)\b"),
    "ollama": re.compile(r"\bollama\s+(?:serve|run|start)\b|\bOLLAMA_\w+="),
    "llama.cpp": re.compile(r"\bllama-(?:server|cli|bench|batched-bench)\b|\bllama_cpp\.server\b|\bkoboldcpp\b"),
    "tensorrt-llm": re.compile(r"\btrtllm-(?:serve|bench|build)\b|tensorrt_llm|\btrtllm\b"),
    "transformers": re.compile(r"\bdevice_map\s*=|\baccelerate\s+launch\b|AutoModelForCausalLM"),
    "exllama": re.compile(r"\bexllama(?:v[23])?\b|\btabbyAPI\b|\btabbyapi\b"),
    "lmdeploy": re.compile(r"\blmdeploy\s+serve\b"),
    "gllm": re.compile(r"\bgllm\.entrypoints|\bgllm\b.*--pp\b"),
    "mpi": re.compile(r"\bmpirun\b|\btorchrun\b|\bsrun\b"),
}

_CSV_HEADER = re.compile(r"utilization\.gpu|power\.draw|clocks\.(?:current\.)?sm|memory\.used|pcie\.link\.", re.I)
_SMI_TABLE = re.compile(r"\|\s*NVIDIA-SMI\s+[\d.]+|\d+W\s*/\s*\d+W\s*\|.*MiB\s*/")
_DMON_HEADER = re.compile(r"^#\s*(?:Date\s+Time\s+)?gpu\s+.*\b(?:pwr|sm|pclk)\b", re.M)
_PROMETHEUS = re.compile(
    r"^# (?:TYPE|HELP) \w|^[a-zA-Z]\w*[_:]\w+(?:\{[^}\n]*\})?\s+[-+]?(?:\d[\d.eE+-]*|NaN|Inf)\s*$", re.M
)
_LOG_LINE = re.compile(
    r"(?:Prefill|Decode) batch[.,]|Avg (?:prompt|generation) throughput|server_args=ServerArgs|server_args=\{"
    r"|Initializing an? (?:V\d )?LLM engine|\bNCCL (?:INFO|WARN)\b|llama_print_timings|llama_perf_|print_timing"
    r"|eval time =|\bupdate_slots:|\bslot +\w+: +id "
    r"|load_tensors:|llm_load_tensors|ggml_cuda_init|llama_model_loader|KV cache is (?:allocated|needed)"
    r"|Available KV cache memory|GPU KV cache size|Load weight (?:begin|end)|Watchdog caught|shm_broadcast"
    r"|fullbore\.\w+:|msg=\"inference compute\"|\[TensorRT-LLM\]|server is fired up"
)
_TIMESTAMPED = re.compile(
    r"^\W{0,2}\d{2,4}[-/]\d{2}[-/T]|^\[?\d{4}-\d\d-\d\d[ T]|^\(?\w*\W*(?:INFO|WARNING|ERROR)\b", re.M
)
_LAUNCH_LINES_MAX = 400


def recognise(head: str, is_binary: bool, is_empty: bool) -> Kind:
    """Names the kind from the first 64 KiB of a file."""
    if is_empty:
        return Kind.EMPTY
    if head.startswith("fullbore") and "\x1f" in head[8:14]:
        return Kind.RECORDING
    if is_binary:
        return Kind.ARCHIVE if head[:4] == "PK\x03\x04" or "ustar" in head[250:270] else Kind.BINARY
    if head.lstrip()[:1] in ("{", "["):
        kind = _recognise_json(head.lstrip())
        if kind is not None:
            return kind
    return _recognise_text(head)


def _recognise_json(head: str) -> Kind | None:
    if re.search(r"\"traceEvents\"\s*:", head) or re.match(r"\[\s*\{[^{}]*\"ph\"\s*:", head):
        return Kind.TRACE
    if re.search(r"\"stage_fields\"\s*:", head) and re.search(r"\"recording\"\s*:|\"driver_fields\"\s*:", head):
        return Kind.TIMELINE
    # "[2026-12-01 05:16:49 PP0] Decode batch" also begins with a bracket
    return Kind.JSON if re.match(r"\{\s*(?:\"|\}|$)|\[\s*(?:[{\[\]\"]|-?\d+(?:\.\d+)?\s*[,\]]|$)", head) else None


def _recognise_text(head: str) -> Kind:
    start = "\n".join(head.splitlines()[:40])
    for line in head.splitlines()[:20]:
        if _CSV_HEADER.search(line) and re.search(r"[,;\t]", line) and not re.search(r"nvidia-smi\s+-", line):
            return Kind.NVIDIA_SMI_CSV
    if re.match(r"[^\n]*(?:\d+ %\s*[,;][^\n]*\d W\b|\d W\s*[,;][^\n]*\d+ %)", start):
        return Kind.NVIDIA_SMI_CSV  # --format=csv,noheader
    if _SMI_TABLE.search(start):
        return Kind.NVIDIA_SMI_TABLE
    if _DMON_HEADER.search(start):
        return Kind.DMON
    if _LOG_LINE.search(head):
        return Kind.LOG
    if len(_PROMETHEUS.findall(head)) >= 1 and not _TIMESTAMPED.search(start):
        return Kind.METRICS
    one_line = re.sub(r"[\"']?\s*\n\s*-\s+[\"']?", " ", head)  # a YAML list of words is a command line too
    if any(pattern.search(one_line) for pattern in ENGINE_COMMANDS.values()) and head.count("\n") <= _LAUNCH_LINES_MAX:
        return Kind.LAUNCH
    if _TIMESTAMPED.search(start):
        return Kind.LOG
    return Kind.UNKNOWN

"""Fixes as exact flags for the engine at hand."""

from __future__ import annotations

from math import ceil

from fullbore.explain.facts import show
from fullbore.explain.situation import Situation


def spread_over_micro_batches(s: Situation, in_flight: int) -> list[str]:
    """So that requests travel in as many micro-batches as there are stages."""
    stages = s.P or 1
    size = max(ceil(in_flight / stages), 1)
    if s.engine == "sglang":
        live = f'{{"server_args": {{"pp_max_micro_batch_size": {size}}}}}'
        return [
            f"--pp-max-micro-batch-size {size}   (⌈{in_flight} / {stages}⌉: at most so many requests in one "
            "micro-batch)",
            "on the running server, for requests that come from then on: curl -X POST "
            f"http://HOST:PORT/set_internal_state -H 'Content-Type: application/json' -d '{live}'",
        ]
    if s.engine == "vllm":
        limit, now = max(stages * in_flight, 2 * stages), s.load.at_most
        newer = "a release with the pipelined model runner (vllm#42187), which spreads decodes over pp_size steps"
        if now is not None and now.number >= limit:
            return [newer, f"more requests at once, up to the {show(now.number)} that {now.text} admits"]
        return [
            f"--max-num-seqs {limit}   (it limits all running requests, not one micro-batch: {in_flight} fit into "
            f"one, and the other {stages - 1} stages stay empty; with more running, they are divided over {stages} "
            "batches)",
            newer,
        ]
    if s.engine == "fullbore":
        return ["--num-micro-batches auto --pp-max-micro-batch-size auto   (fullbore then spreads requests by itself)"]
    return [f"limit a micro-batch to {size} requests, so that {in_flight} requests form {stages} micro-batches"]


def more_requests(s: Situation, in_flight: int) -> list[str]:
    """So that at least one request per stage is in flight."""
    stages = s.P or 1
    lines = []
    limit = s.load.at_most
    raised = {
        "sglang": f"--max-running-requests {4 * stages} --pp-max-micro-batch-size 4",
        "vllm": f"--max-num-seqs {4 * stages}",
        "llama.cpp": f"-np {2 * stages}",
        "ollama": f"OLLAMA_NUM_PARALLEL={2 * stages}",
        "fullbore": f"--max-running-requests {4 * stages}",
    }
    if limit is not None and limit.number < stages and s.engine in raised:
        lines.append(f"{raised[s.engine]}   (now {limit.text}: fewer than the {stages} stages)")
    lines.append(
        f"send at least {stages} requests at once (one per stage; {2 * stages} or more hide their differences); with "
        f"{in_flight} in flight no scheduling can keep more than {in_flight} of {stages} stages busy"
    )
    return lines


def faster_lone_request(s: Situation) -> list[str]:
    """What does shorten a lone request. A pipeline does not."""
    ranks = (s.P or 1) * s.tp
    flags = {
        "sglang": f"--tp-size {ranks} --pp-size 1",
        "vllm": f"--tensor-parallel-size {ranks} --pipeline-parallel-size 1",
        "llama.cpp": "--split-mode row (or tensor)",
        "tensorrt-llm": f"--tp_size {ranks} --pp_size 1",
    }
    choice = flags.get(s.engine or "", f"tensor parallelism (tp={ranks}, pp=1)")
    return [f"for one request's latency: {choice}, where the links are fast; every card then works on every layer"]


def use_graphs(s: Situation) -> list[str]:
    if s.engine == "sglang":
        return [
            "remove --disable-cuda-graph (the log must then say `cuda graph: True` on decode lines)",
            "--cuda-graph-max-bs N, with N at least the largest micro-batch, if some decode lines still say False",
        ]
    if s.engine == "vllm":
        return ["remove --enforce-eager (CUDA graphs are then captured at start-up, which costs memory and a minute)"]
    if s.engine in ("llama.cpp", "ollama"):
        return [
            "a build with GGML_CUDA_GRAPHS=ON of a release after llama.cpp#13814, which keeps graphs with several GPUs"
        ]
    if s.engine == "fullbore":
        return ["remove --disable-cuda-graph"]
    return ["run decode steps as CUDA graphs (or compile them): one launch per step instead of one per kernel"]


def partition(s: Situation, layers: list[int]) -> list[str]:
    """A given number of layers on each stage."""
    listed = ",".join(str(n) for n in layers)
    if s.engine == "sglang":
        return [f"SGLANG_PP_LAYER_PARTITION={listed}"]
    if s.engine == "vllm":
        return [f"VLLM_PP_LAYER_PARTITION={listed}"]
    if s.engine == "fullbore":
        return [f"--pp-layer-partition {listed}   (or leave it out: fullbore then divides by cost)"]
    if s.engine == "llama.cpp":
        return [f"--tensor-split {listed}"]
    return [f"layers per stage {listed}"]


def more_kv(s: Situation) -> list[str]:
    if s.engine == "sglang":
        return [
            "--mem-fraction-static closer to 0.9 (as far as start-up allows)",
            "--kv-cache-dtype fp8_e5m2 (twice the tokens)",
            "--max-running-requests lower, if requests are retracted again and again",
        ]
    if s.engine == "vllm":
        return [
            "--gpu-memory-utilization 0.95 (as far as start-up allows)",
            "--kv-cache-dtype fp8 (twice the tokens)",
            "--max-num-seqs lower, if requests are preempted again and again; --max-model-len lower, if one request "
            "is too long",
        ]
    if s.engine == "fullbore":
        return ["--mem-fraction-static higher, or --max-total-tokens"]
    if s.engine in ("llama.cpp", "ollama"):
        return ["-c lower, or -ctk q8_0 -ctv q8_0 (half the cache)"]
    return ["give the KV cache more memory, or quantise it"]


def balance_kv(s: Situation) -> str:
    """The KV cache is as large as the smallest stage's."""
    name = {"sglang": "SGLANG_PP_LAYER_PARTITION", "vllm": "VLLM_PP_LAYER_PARTITION"}.get(
        s.engine or "", "the layer partition"
    )
    return f"move layers away from the stage with the least free memory ({name}): the smallest stage sets the capacity"


def hidden_size(s: Situation) -> tuple[int, str]:
    """(width of a hidden state, where it is from); 8,192 where nothing says."""
    noted = s.settings.number("hidden")
    if noted is not None:
        return int(noted.number), noted.text
    if s.model.hidden is not None:
        return s.model.hidden, f"hidden size {show(s.model.hidden)}"
    return 8192, "hidden size assumed 8,192"

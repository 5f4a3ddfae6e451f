"""Published measurements against the planner: which statements hold. `python tests/plan/measured_oracle.py` reports.

A row of measured.csv states something about one or two set-ups ("tp=1,pp=8,depth=0"): a value, a ratio, an order or a
bound. Each family of rows has a function here that predicts the row's metric for one set-up. What the planner does not
model (image models, one engine's own way to do a thing) is listed in UNMODELLED and reported apart.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from fullbore.plan.coarse import Grain
from fullbore.plan.engines import Engine, find_engine
from fullbore.plan.formula import prompt_s
from fullbore.plan.hardware import Hardware, parse_hardware
from fullbore.plan.hardware_file import hardware_from_toml
from fullbore.plan.layout import Layout, even_partition
from fullbore.plan.loads import Load
from fullbore.plan.model_table import find_model
from fullbore.plan.models import DecoderModel, from_config
from fullbore.plan.policies import make_scheduler
from fullbore.plan.policy_settings import Scheduling
from fullbore.plan.predict import predict, running_limit, simulate_workload
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy
from fullbore.plan.simulate import Simulation
from fullbore.plan.workload import Job, Workload

DATA = Path(__file__).parents[1] / "data" / "oracles"
EIGHT_PRO = "8x rtx-pro-6000"

OWN_CARDS = """
[device.3090-ti]
like = "3090"
bandwidth_bytes_s = 1008e9
tflops = { bf16 = 80, fp32 = 40 }
[device.3080]
like = "3090"
memory_bytes = 10e9
bandwidth_bytes_s = 760e9
tflops = { bf16 = 59.5, fp32 = 29.8 }
[device.gb10]  # DGX Spark
memory_bytes = 119e9
bandwidth_bytes_s = 273e9
tflops = { bf16 = 125, fp8 = 250, fp4 = 500 }
[device.gh200]
like = "h100"
memory_bytes = 102e9
bandwidth_bytes_s = 4000e9
[device.a100-pcie]
like = "a100"
link = "pcie4-peer"
[link.pcie4-peer]
bandwidth_bytes_s = 18e9
latency_s = 20e-6
all_reduce_latency_s = 18e-6
ring_step_latency_s = 4e-6
source = "PCIe 4.0 x16 with peer access"
"""


def own_cards(listed: str) -> Hardware:
    return hardware_from_toml(f'hardware = "{listed}"\n{OWN_CARDS}')


def llama(layers: int, hidden: int, heads: int, mlp: int, vocab: int = 32000, kv_heads: int | None = None) -> Any:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "dtype": "bfloat16",
    }


LLAMA_7B = llama(32, 4096, 32, 11008)
LLAMA_13B = llama(40, 5120, 40, 13824)
YI_9B = llama(48, 4096, 32, 11008, 64000, 4)
QWEN_1_5B = llama(28, 1536, 12, 8960, 151936, 2)
# "Qwen, 44 layers, AWQ" is not described further; a dense model that fits 48 GB and reaches its tokens/s.
QWEN_44 = llama(44, 4096, 32, 12288, 151936, 8)


@dataclass(frozen=True)
class Verdict:
    """One row: what is stated, what was predicted."""

    row: dict[str, str]
    predicted: float | None
    holds: bool
    why: str = ""


Row = dict[str, str]
Spec = dict[str, str]


def read(name: str) -> list[Row]:
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def spec_of(text: str) -> Spec:
    """`tp=1,pp=8,chunk=none` as a dict; words without a value are dropped."""
    return dict(part.split("=", 1) for part in re.sub(r" \(.*?\)", "", text).split(",") if "=" in part)


def number(row: Row, key: str, spec: Spec | None = None, default: float = 0.0) -> float:
    found = (spec or {}).get(key) or spec_of(row["workload"]).get(key)
    return float(found) if found else default


# ------------------------------------------------------------------------------------------------ ways to predict


@cache
def model_of(name: str, weights: str | None = None) -> DecoderModel:
    found = find_model(name, weights)
    assert found is not None
    return found


def deployed(
    model: DecoderModel,
    hardware: Hardware | str,
    layout: Layout,
    engine: Engine | str = "vllm",
    concurrency: int = 1,
    cache_bytes: float = 2.0,
    max_running: int | None = None,
    **demand: Any,
) -> Deployment:
    scenario = Scenario(
        model=model,
        hardware=parse_hardware(hardware) if isinstance(hardware, str) else hardware,
        engine=find_engine(engine) if isinstance(engine, str) else engine,
        demand=Demand(concurrency=(concurrency,), **demand),
        cache_bytes_per_element=cache_bytes,
        max_running=max_running,
    )
    if layout.partition is None:
        layout = replace(layout, partition=even_partition(model.num_layers, layout.pp))
    return deploy(scenario, layout, concurrency)


def decode_tok_s(deployment: Deployment, concurrency: int, context: int) -> float:
    """Tokens/s of decoding alone, all requests in one micro-batch."""
    load = Load(concurrency, sampled=concurrency, context_tokens=concurrency * context)
    return concurrency / (deployment.costs.traverse_s(load) + deployment.scenario.engine.driver_s)


def prefill_tok_s(deployment: Deployment, tokens: int, chunk: int, prompts: int = 1) -> float:
    """Prompt tokens/s of `prompts` prompts that come at once, chunks following each other through the stages."""
    return prompts * tokens / _prefill_s(deployment, tokens, chunk, prompts)


def _prefill_s(deployment: Deployment, tokens: int, chunk: int, prompts: int = 1) -> float:
    layout = replace(deployment.layout, chunk_tokens=chunk)
    result = simulate_workload(replace(deployment, layout=layout), Workload([Job(tokens, 1)] * prompts, prompts))
    return result.whole.end_s


def steady_tok_s(deployment: Deployment, concurrency: int) -> float:
    return predict(deployment, concurrency).output_tok_s


@cache
def offline_tok_s(engine: str, name: str, tp: int, pp: int, dep: int, isl: int, osl: int, requests: int) -> float:
    """NVIDIA's benchmark: all requests at once, FP4 weights, FP8 cache, mixture-of-experts with attention DP."""
    model = model_of(name, "nvfp4")
    ranks = max(tp, dep)
    layout = Layout(pp=pp, tp=ranks, depth=0, dp_attention=ranks > 1 and model.has_experts)
    deployment = deployed(model, EIGHT_PRO, layout, engine, requests, 1.0, 2048, input_tokens=isl, output_tokens=osl)
    limit = running_limit(deployment)
    q = 1
    while limit // (2 * q) >= 16 * pp:
        q *= 2
    grain = Grain(q, max(osl // 192, 1))
    number = round(requests / q)
    workload = Workload([Job(grain.length(isl), grain.length(osl))] * number, number)
    figures = simulate_workload(deployment, workload, grain).whole
    return figures.output_tokens_per_s * grain.requests * grain.tokens


# --------------------------------------------------------------------------------------------------- the families


def tensorrt(row: Row, spec: Spec) -> float:
    name = next(
        known
        for pattern, known in (
            ("Llama-3.3-70B", "llama-3.3-70b"),
            ("Scout", "llama-4-scout"),
            ("Qwen3-235B", "qwen3-235b-a22b"),
        )
        if pattern in row["model"]
    )
    engine = "trtllm-1.0" if row["version"] == "v1.0" else "trtllm"
    isl, osl, requests = (
        int(re.match(r"\d+", spec_of(row["workload"]).get(key, "0"))[0]) for key in ("isl", "osl", "n")
    )
    tp, pp, dep = (int(spec.get(key, 1)) for key in ("tp", "pp", "dep"))
    return offline_tok_s(engine, name, tp, pp, dep, isl or 1000, osl or 1000, requests or 3000)


def kimi_tp8(row: Row, spec: Spec) -> float:
    deployment = deployed(
        model_of("kimi-k2.6"), EIGHT_PRO, Layout(tp=8, chunk_tokens=8192), cache_bytes=1.0, input_tokens=8192
    )
    if row["metric"] == "kv_tokens":
        return deployment.memory.cache_tokens
    if row["metric"] == "prefill_tok_s":
        tokens = int(number(row, "tokens"))
        scenario = replace(deployment.scenario, demand=Demand(input_tokens=tokens, output_tokens=1))
        return tokens / sum(prompt_s(replace(deployment, scenario=scenario)))
    concurrency, context = int(number(row, "conc")), int(number(row, "ctx"))
    return decode_tok_s(deployment, concurrency, context + 300)  # what a 10 s window generates, on average


def seed(row: Row, spec: Spec) -> float:
    if spec["pp"] == "1":
        return decode_tok_s(deployed(model_of("kimi-k2.6"), EIGHT_PRO, Layout(tp=8)), 1, 1152)
    layout = Layout(pp=8, graphs=spec.get("graph") != "0", micro_batches=1)
    deployment = deployed(model_of("kimi-k2.6"), EIGHT_PRO, layout, "fullbore", 8)
    return steady_tok_s(deployment, int(number(row, "conc", spec, 8 if "c8" in row["id"] else 1)))


def h20_prefill(row: Row, spec: Spec) -> float:
    tokens = int(number(row, "isl", spec))
    chunk = int(number(row, "chunk", spec, 18432))
    pp = int(spec["pp"])
    hardware = parse_hardware(" / ".join(["8x h20"] * 4))
    layout = Layout(pp=pp, tp=4, chunk_tokens=chunk)
    model = model_of("qwen3-235b-a22b", "fp8")
    engine = replace(find_engine("sglang"), dynamic_chunks="dynamic" in row["workload"])
    deployment = deployed(model, hardware, layout, engine, input_tokens=tokens, output_tokens=1)
    prompts = 16 if "16 consecutive" in row["workload"] else 1
    seconds = _prefill_s(deployment, tokens, chunk, prompts)
    return seconds if row["metric"] == "ttft_s" else prompts * tokens / seconds


class _Fixed:
    """Every stage takes so long, whatever it is given."""

    def __init__(self, stage_s: list[float]) -> None:
        self.stage_s = stage_s

    def seconds(self, load: Load) -> list[float]:
        return self.stage_s


def exchange_first(row: Row, spec: Spec) -> float:
    """Period of a ring in which results are exchanged before launching."""
    from fullbore.plan.pipeline import Pipeline

    stages = int(spec["pp"])
    stage_s = float(spec["sum_stage_ms"]) / stages / 1e3
    settings = Scheduling(
        pp=stages,
        depth=0,
        micro_batches="auto",
        max_micro_batch=1,
        max_running=64,
        chunk_tokens=64,
        num_blocks=1 << 16,
        exchanges_first=True,
    )
    scheduler = make_scheduler(find_engine("sglang"), settings)
    pipeline = Pipeline(num_stages=stages, costs=_Fixed([stage_s] * stages), driver_s=0.004)
    figures = Simulation(pipeline, scheduler, Workload([Job(16, 40)] * 3 * stages, stages)).run().steady
    return (figures.end_s - figures.start_s) / figures.micro_batches * 1e3


def unpipelined_chunks(row: Row, spec: Spec) -> float:
    """vLLM: the next chunk waits until the one before has left the last stage; several prompts fill the gaps."""
    chunk = 131072 if spec["chunk"] == "none" else int(spec["chunk"])
    layout = Layout(pp=4, chunk_tokens=chunk)
    model = model_of("deepseek-r1", "nvfp4")
    deployment = deployed(model, "4x gb300", layout, "vllm", 8, 1.0, input_tokens=131072, output_tokens=1)
    return prefill_tok_s(deployment, 131072, chunk, 8) / 4


def llama13_latency(row: Row, spec: Spec) -> float:
    """Mean latency at 3 requests/s, or the most requests/s that can be sustained (lengths: 512 in, 256 out)."""
    layout = Layout(pp=int(spec["pp"]), tp=int(spec["tp"]))
    model = from_config(LLAMA_13B)
    engine = replace(find_engine("trtllm-1.0"), max_batch=32)
    deployment = deployed(
        model, "4x a100-40gb", layout, engine, 32, max_running=32, input_tokens=512, output_tokens=256
    )
    if row["metric"] == "max_req_s":
        return steady_tok_s(deployment, 32) / 256
    demand = replace(deployment.scenario.demand, rate_per_s=3.0)
    prediction = predict(replace(deployment, scenario=replace(deployment.scenario, demand=demand)), 1)
    return prediction.ttft_s + 255 * prediction.itl_s


def llama7_single(row: Row, spec: Spec) -> float:
    engine = replace(find_engine("trtllm"), driver_s=0.1e-3, step_s=0.1e-3)  # its C++ runtime of then
    layout = Layout(pp=int(spec["pp"]))
    deployment = deployed(from_config(LLAMA_7B), "2x a100", layout, engine, 1, input_tokens=1024, output_tokens=512)
    return 512 / steady_tok_s(deployment, 1)


def yi_makespan(row: Row, spec: Spec) -> float:
    concurrency = int(spec["conc"])
    deployment = deployed(from_config(YI_9B), "2x a100", Layout(pp=2), "vllm", 16)
    workload = Workload([Job(256, 128)] * 16, concurrency)
    return simulate_workload(deployment, workload).whole.end_s


def llama_cpp_prefill(row: Row, spec: Spec) -> float:
    """Layers 1.2 : 1; without pipelining a micro-batch enters when the one before has left."""
    tokens, chunk = int(number(row, "isl")), 256
    hardware = own_cards("1x 3090-ti + 1x 3080")
    model = from_config(LLAMA_7B, weights="int4")
    deployment = deployed(model, hardware, Layout(pp=2, partition=(17, 15), chunk_tokens=chunk), "vllm", 1)
    if spec["pipelined"] == "1":
        deployment = replace(deployment, scenario=replace(deployment.scenario, engine=find_engine("sglang")))
        return prefill_tok_s(deployment, tokens, chunk)
    chunks = tokens // chunk
    middle = (tokens - chunk) // 2
    load = Load(0, chunk, (middle + chunk) ** 2 - middle**2, 1, middle)
    return tokens / (chunks * deployment.costs.traverse_s(load))


STEP_S, SPECULATION_FIXED_S = 16.3e-3, 25e-3  # a plain step alone, and what each round takes on top, as reported
ACCEPTED_TOKENS = 0.93  # of two drafted, on average, as reported


def flash_next(row: Row, spec: Spec) -> float:
    """The model is not described: another mixture of experts, its times scaled to the reported step."""
    deployment = deployed(model_of("qwen3-235b-a22b", "int4"), own_cards("4x a100-pcie"), Layout(pp=4), "vllm", 8)
    concurrency = int(number(row, "conc", spec))
    if not spec.get("spec"):
        return steady_tok_s(deployment, concurrency)
    # In a round every request verifies three tokens and gets 1 + what was accepted.
    alone_s, plain_s, round_s = (
        deployment.costs.traverse_s(Load(tokens, sampled=tokens, context_tokens=tokens * 1152))
        for tokens in (1, concurrency, 3 * concurrency)
    )
    scale = STEP_S / alone_s
    if spec["spec"] == "0":
        return concurrency / (scale * plain_s)
    return concurrency * (1 + ACCEPTED_TOKENS) / (scale * round_s + SPECULATION_FIXED_S)


def link_speed(row: Row, spec: Spec) -> float:
    link = f"""
[link.net]
bandwidth_bytes_s = {float(spec["link_gbps"]) / 8 * 0.9e9}
latency_s = 40e-6
all_reduce_latency_s = 35e-6
ring_step_latency_s = 12e-6
source = "as given"
"""
    hardware = hardware_from_toml(f'hardware = "1x gh200 / 1x gh200"\nhost_link = "net"\n{OWN_CARDS}{link}')
    deployment = deployed(model_of("llama-3.1-70b"), hardware, Layout(pp=2), "vllm", 4)
    return steady_tok_s(deployment, 4)


def spark(row: Row, spec: Spec) -> float:
    layout = Layout(pp=int(spec["pp"]), tp=int(spec["tp"]))
    model = model_of("llama-3.1-70b", "fp8")
    hardware = own_cards("1x gb10 / 1x gb10")
    deployment = deployed(model, hardware, layout, "vllm", 1, input_tokens=512, output_tokens=128)
    return predict(deployment, 1).itl_s * 1e3


def l4(row: Row, spec: Spec) -> float:
    layout = Layout(pp=int(spec["pp"]), tp=int(spec["tp"]), graphs=False)
    model = model_of("llama-3.1-70b", "fp8")
    deployment = deployed(model, "8x l4", layout, "vllm", 256, 1.0, 256, input_tokens=224, output_tokens=175)
    return steady_tok_s(deployment, 256)


def two_3090(row: Row, spec: Spec) -> float:
    layout = Layout(pp=int(spec["pp"]), tp=int(spec["tp"]), graphs=spec.get("graph") != "0")
    model = from_config(QWEN_44, weights="int4")
    deployment = deployed(model, "2x 3090", layout, "vllm", 2, input_tokens=128, output_tokens=256)
    return steady_tok_s(deployment, int(spec.get("conc", 1)))


def td_pipe(row: Row, spec: Spec) -> float:
    """A bound: TD-Pipe cannot be faster than a pipeline without bubbles, which is what is compared here."""
    model = model_of("qwen3-32b")
    layout = Layout(tp=4) if spec.get("tp") == "4" else Layout(pp=4)
    engine = "vllm" if spec.get("policy") == "vllm" or spec.get("tp") == "4" else "fullbore"
    deployment = deployed(model, own_cards("4x a100-pcie"), layout, engine, 256, input_tokens=256, output_tokens=256)
    return steady_tok_s(deployment, 256)


FAMILIES: list[tuple[str, Callable[[Row, Spec], float]]] = [
    (r"^trt-", tensorrt),
    (r"^kimi26-tp8", kimi_tp8),
    (r"^seed-", seed),
    (r"^sgl-qwen235b", h20_prefill),
    (r"^A7-", exchange_first),
    (r"^A3-", unpipelined_chunks),
    (r"^A14-", llama13_latency),
    (r"^TRT1102", llama7_single),
    (r"^A18-", yi_makespan),
    (r"^LC4918", llama_cpp_prefill),
    (r"^E7-", flash_next),
    (r"^F1-", link_speed),
    (r"^F8-", spark),
    (r"^L4-", l4),
    (r"^3090-", two_3090),
    (r"^TDPipe", td_pipe),
]
UNMODELLED = {
    r"^A5-": "a broadcast that blocks vLLM's next step; how long, and at what concurrency, is not reported",
    r"^G11-": "llama.cpp's Vulkan backend: host synchronisation at every hop",
    r"^G13-": "exllamav2's tensor parallelism copies through the host",
    r"^G17-": "compares the kernels of two engines",
    r"^G20-": "a diffusion transformer, no decoding",
}


def check(row: Row) -> Verdict:
    """Whether the row's statement holds for the planner."""
    for pattern, why in UNMODELLED.items():
        if re.match(pattern, row["id"]):
            return Verdict(row, None, False, why)
    family = next((f for pattern, f in FAMILIES if re.match(pattern, row["id"])), None)
    if family is None:
        return Verdict(row, None, False, "no family")
    value = family(row, spec_of(row["a"]))
    if row["kind"] != "value":
        value /= family(row, spec_of(row["b"]))
    low = float(row["lo"]) if row["lo"] else float("-inf")
    high = float(row["hi"]) if row["hi"] else float("inf")
    return Verdict(row, value, low <= value <= high)


def share(verdicts: list[Verdict]) -> float:
    return sum(each.holds for each in verdicts) / max(len(verdicts), 1)


def statements(rows: list[Row], kinds: tuple[str, ...], use: tuple[str, ...] = ("planner",)) -> list[Row]:
    return [row for row in rows if row["kind"] in kinds and row["use"] in use]


def tensorrt_statements() -> list[Row]:
    """Every two layouts of NVIDIA's tables that ran the same load under the same version: ratio (12 %), and order."""
    loads: dict[tuple[str, ...], list[Row]] = {}
    for row in read("trtllm_rtxpro6000.csv"):
        loads.setdefault(tuple(row[key] for key in ("doc_version", "model", "isl", "osl")), []).append(row)
    rows = []
    for (version, model, isl, osl), layouts in loads.items():
        for small, large in combinations(sorted(layouts, key=lambda each: int(each["n_gpu"])), 2):
            ratio = float(large["total_out_tok_s"]) / float(small["total_out_tok_s"])
            names = [
                ",".join(f"{key}={each[key]}" for key in ("tp", "pp", "dep") if each[key]) for each in (large, small)
            ]
            row = {
                "model": model,
                "version": version,
                "workload": f"isl={isl},osl={osl},n={small['n_requests']}",
                "a": names[0],
                "b": names[1],
                "use": "planner",
            }
            name = f"trt-{version}-{model}-{isl}-{osl}-{names[0]}-over-{names[1]}"
            rows.append({**row, "id": name, "kind": "ratio", "lo": f"{0.88 * ratio:.4g}", "hi": f"{1.12 * ratio:.4g}"})
            rows.append({**row, "id": f"{name}-order", "kind": "order", "lo": "1", "hi": ""})
    return rows


def main() -> None:
    rows = read("measured.csv")
    groups = {
        "ratios, orders and bounds for a planner": statements(rows, ("ratio", "order", "bound")),
        "ratios and orders of NVIDIA's tables": tensorrt_statements(),
        "values for a planner": statements(rows, ("value",)),
        "absolute throughputs (30 %)": statements(rows, ("value",), ("anchor",)),
        "diagnostic ratios": statements(rows, ("ratio",), ("diagnose",)),
    }
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for title, group in groups.items():
        verdicts = [check(row) for row in group if re.search(wanted, row["id"])]
        if not verdicts:
            continue
        modelled = [each for each in verdicts if not each.why]
        print(
            f"{title}: {sum(v.holds for v in modelled)} of {len(modelled)} hold ({share(modelled):.0%}); "
            f"{len(verdicts) - len(modelled)} not modelled"
        )
        for verdict in verdicts:
            if not verdict.holds or wanted:
                predicted = verdict.why or f"predicted {verdict.predicted:.4g}"
                row = verdict.row
                print(f"   {'ok ' if verdict.holds else 'no '} {row['id']}: [{row['lo']}, {row['hi']}], {predicted}")


if __name__ == "__main__":
    main()

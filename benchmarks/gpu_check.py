"""Is the GPU path right, and what do CUDA graphs bring?

    benchmarks/gpu_check.sh [--model FOLDER_OR_ID] [--limit-s 420]

1. Logits of prompts and decode steps in every way that a stage can compute them (float32 and 16 bits, with and without
   CUDA graphs, FlashInfer's attention and torch's) against Hugging Face's whole model.
2. Tokens of the engine, P = 1 and P = 2 on one GPU (and on two where there are two), with and without graphs, in
   float32, against Hugging Face's `generate`; and that decode steps came from graphs, or did not.
3. Tokens/s with and without graphs, at 1, 8 and 32 requests.

Without --model it makes a random one of SmolLM2-135M's shape, so nothing has to be downloaded. Exit code 0: all agrees;
1: something does not, or time ran out; 2: there is no GPU. `--rehearse` goes through it all with a tiny model on the
CPU, which shows that this script works and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

PROMPT_LENGTHS = (9, 9, 60, 60, 200, 200, 600, 600)
NEW_TOKENS = 24
TIE = 1e-3  # two logits of the oracle closer than this: either token is right
LOGITS_TOLERANCE = 2e-3  # float32, largest error as a share of the logits' spread
HALF_TOLERANCE = 1.5  # 16 bits: our mean error as a multiple of Hugging Face's own
SPEED_REQUESTS = (1, 8, 32)


@dataclass
class Check:
    """What was found so far."""

    folder: Path
    devices: list[str]
    is_rehearsal: bool
    end_s: float
    failures: list[str] = field(default_factory=list)

    def say(self, is_right: bool, text: str) -> None:
        print(f"{'ok   ' if is_right else 'WRONG'} {text}", flush=True)
        if not is_right:
            self.failures.append(text)

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """Does it if there is time; whatever goes wrong, the other checks go on."""
        if time.monotonic() >= self.end_s:
            self.say(False, f"{what}: not run, --limit-s is over")
            return
        try:
            action()
        except Exception as error:
            self.say(False, f"{what}: {type(error).__name__}: {error}")
        gc.collect()
        if not self.is_rehearsal:
            torch.cuda.empty_cache()  # others want the GPU's memory too


# ---------------------------------------------------------------------------------------------------------- oracle


class Oracle:
    """Hugging Face's model: greedy continuations in float32, and logits of every position."""

    def __init__(self, folder: Path, device: str, vocab_size: int) -> None:
        from transformers import AutoModelForCausalLM

        self._load = lambda dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        generator = torch.Generator().manual_seed(7)
        self.prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        self.outputs: list[list[int]] = [[] for _ in self.prompts]
        self.gaps: list[list[float]] = [[] for _ in self.prompts]  # between the two best logits, for each token
        model = self._load(torch.float32)
        model.generation_config.eos_token_id = None  # all outputs are equally long
        with torch.inference_mode():
            for length in sorted(set(PROMPT_LENGTHS)):
                self._generate(model, [k for k, n in enumerate(PROMPT_LENGTHS) if n == length], device)
            self.exact = self._all_logits(model, device)

    def _generate(self, model: Any, chosen: list[int], device: str) -> None:
        prompts = torch.tensor([self.prompts[k] for k in chosen], device=device)
        result = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(result.logits, 1).topk(2).values
        for row, k in enumerate(chosen):
            self.outputs[k] = result.sequences[row, prompts.shape[1] :].tolist()
            self.gaps[k] = (best[row, :, 0] - best[row, :, 1]).tolist()

    def _all_logits(self, model: Any, device: str) -> list[torch.Tensor]:
        """For each prompt [new tokens + 1, vocab_size]: after the prompt and after each further token."""
        return [
            model(torch.tensor([prompt + output], device=device)).logits[0, len(prompt) - 1 :].float()
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        ]

    @torch.inference_mode()
    def error_of(self, dtype: torch.dtype, device: str) -> float:
        """Hugging Face's own mean error in 16 bits, as a share of the logits' spread."""
        return mean_error(self._all_logits(self._load(dtype), device), self.exact)

    def first_difference(self, k: int, token_ids: list[int]) -> int | None:
        """Where an output parts from the oracle's, unless it is at a tie."""
        pairs = list(zip(token_ids, self.outputs[k], strict=True))
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        return None if at is None or self.gaps[k][at] < TIE else at


def mean_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float(sum((a - b).abs().mean() / b.std() for a, b in zip(found, exact, strict=True)) / len(exact))


def largest_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.std()) for a, b in zip(found, exact, strict=True))


# ------------------------------------------------------------------------------------------------------- 1. logits


@torch.inference_mode()
def stage_logits(folder: Path, oracle: Oracle, device: str, dtype: str, graphs: bool) -> tuple[list[torch.Tensor], int]:
    """Our logits of all prompts, decoded together with the oracle's tokens; and how many steps came from a graph."""
    from fullbore.model.runner import StageRunner
    from fullbore.model.spec import ModelSpec
    from fullbore.scheduler.micro_batch import MicroBatch, Run, Sampling

    page_size, greedy = 16, Sampling(0.0, 1.0, 0, 0, 0, 0)
    layers = ModelSpec.from_folder(folder).num_layers
    runner = StageRunner.load(
        folder, 0, (layers,), device, dtype, page_size, graph_requests=len(PROMPT_LENGTHS) * graphs
    )
    blocks = -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // page_size)
    count = len(oracle.prompts)
    runner.allocate_kv(count * blocks)
    rows: list[list[torch.Tensor]] = [[] for _ in range(count)]
    graph_steps = 0

    def step(runs: list[Run]) -> None:
        nonlocal graph_steps
        logits = runner.forward(MicroBatch(0, runs, "slot-freed", 0.0), None)
        graph_steps += runner.used_graph
        for run, row in zip(runs, logits, strict=True):
            rows[run.request_id].append(row.clone())

    tables = [list(range(k, count * blocks, count)) for k in range(count)]
    for k, prompt in enumerate(oracle.prompts):
        step([Run(k, 0, 0, prompt, tables[k], greedy)])
    for i in range(NEW_TOKENS):
        runs = [
            Run(k, 0, len(prompt) + i, [oracle.outputs[k][i]], tables[k], greedy)
            for k, prompt in enumerate(oracle.prompts)
        ]
        split = i % count  # micro-batches of all sizes
        for part in (runs[:split], runs[split:]):
            if part:
                step(part)
    return [torch.stack(each) for each in rows], graph_steps


def check_logits(check: Check, oracle: Oracle, half: str) -> None:
    device = check.devices[0]
    theirs = oracle.error_of(getattr(torch, half), device)

    def compare(what: str, dtype: str, graphs: bool) -> None:
        logits, graph_steps = stage_logits(check.folder, oracle, device, dtype, graphs)
        if dtype == "float32":
            error = largest_error(logits, oracle.exact)
            is_right, text = error < LOGITS_TOLERANCE, f"largest error {error:.1e} of the spread"
        else:
            error = mean_error(logits, oracle.exact)
            is_right = error < HALF_TOLERANCE * theirs
            text = f"mean error {error:.1e} of the spread, Hugging Face's {theirs:.1e}"
        is_right = is_right and (graph_steps > 0) == graphs
        check.say(is_right, f"{what}: {text}; {graph_steps} steps from a graph")

    for dtype in ("float32", half):
        for attention in ("torch",) if dtype == "float32" or not has_flashinfer() else ("torch", "FlashInfer"):
            os.environ["FULLBORE_FLASHINFER"] = str(int(attention == "FlashInfer"))
            for graphs in (False, True):
                what = f"logits, {dtype}, {attention}'s attention, {'graphs' if graphs else 'eager'}"
                check.attempt(what, partial(compare, what, dtype, graphs))
    os.environ.pop("FULLBORE_FLASHINFER", None)


def has_flashinfer() -> bool:
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return True


# ------------------------------------------------------------------------------------------- 2. and 3. the engine


def generate(client: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Greedy outputs, and tokens/s from the first token to the last."""
    from fullbore.engine.messages import AddRequest, Outputs

    ids = [client.next_request_id() for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        client.add(AddRequest(request_id, prompt, count, 0.0, 1.0, 0, 0, ignore_eos=True))
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    first_s = 0.0
    while sum(map(len, tokens.values())) < len(prompts) * count:
        for message in client.receive(60.0):
            assert isinstance(message, Outputs), message
            first_s = first_s or time.monotonic()
            for output in message.outputs:
                if output.token_id is not None:
                    tokens[output.request_id].append(output.token_id)
    seconds = max(time.monotonic() - first_s, 1e-9)
    return [tokens[request_id] for request_id in ids], len(prompts) * (count - 1) / seconds


def start(check: Check, devices: list[str], dtype: str, graphs: bool) -> Any:
    from fullbore.config import EngineConfig
    from fullbore.engine.client import EngineClient

    return EngineClient.start(
        EngineConfig(
            model=str(check.folder),
            pp_size=len(devices),
            devices=tuple(devices),
            dtype=dtype,  # type: ignore[arg-type]
            disable_cuda_graph=not graphs,
            max_running_requests=max(SPEED_REQUESTS),
            max_total_tokens=40_000,
            context_length=1024,
            disable_radix_cache=True,
        )
    )


def layouts(check: Check) -> list[list[str]]:
    """One stage, two stages on one GPU, two stages on two GPUs if they are there."""
    first = check.devices[0]
    return [[first], [first, first]] + ([check.devices[:2]] if len(check.devices) > 1 else [])


def check_engine(check: Check, oracle: Oracle) -> None:
    def compare(what: str, devices: list[str], graphs: bool) -> None:
        with start(check, devices, "float32", graphs) as client:
            outputs, _ = generate(client, oracle.prompts, NEW_TOKENS)
            stats = client.stats()
        differences = ((k, oracle.first_difference(k, output)) for k, output in enumerate(outputs))
        wrong = [f"prompt {k} from token {at} on" for k, at in differences if at is not None]
        steps = [sum(counts) for counts in stats.steps_in_bucket]
        eager = [total - graphed for total, graphed in zip(steps, stats.graph_steps, strict=True)]
        uses_graphs = graphs and not check.is_rehearsal
        is_counted = all((graphed > 0) == uses_graphs for graphed in stats.graph_steps)
        text = f"steps per stage: {stats.graph_steps} from graphs, {eager} eager"
        check.say(not wrong and is_counted, f"{what}: {'; '.join(wrong) or 'as the oracle'}; {text}")

    for devices in layouts(check):
        for graphs in (False, True):
            what = f"tokens, P = {len(devices)} on {', '.join(devices)}, {'graphs' if graphs else 'eager'}"
            check.attempt(what, partial(compare, what, devices, graphs))


def measure_speed(check: Check, vocab_size: int) -> None:
    def measure(what: str, devices: list[str], graphs: bool) -> None:
        rates = []
        with start(check, devices, "auto", graphs) as client:
            for requests in SPEED_REQUESTS:
                prompts = [[(31 * k + 7 * i) % vocab_size for i in range(64)] for k in range(requests)]
                generate(client, prompts, 8)
                rates.append(generate(client, prompts, 8 if check.is_rehearsal else 128)[1])
        print(f"{what:34}" + "".join(f"{rate:>17.1f}" for rate in rates), flush=True)

    print(f"\n{'output tokens/s':34}" + "".join(f"{n:>8} requests" for n in SPEED_REQUESTS))
    for devices in layouts(check):
        for graphs in (False, True):
            what = f"P = {len(devices)} on {', '.join(devices)}, {'graphs' if graphs else 'eager'}"
            check.attempt(what, partial(measure, what, devices, graphs))


# ------------------------------------------------------------------------------------------------------------ main


def make_model(folder: Path, is_tiny: bool) -> Path:
    """A random Llama of SmolLM2-135M's shape, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49_152}
    if is_tiny:
        sizes = {"hidden_size": 576, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    torch.manual_seed(0)
    config = LlamaConfig(
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def find_gpus() -> list[str]:
    return [f"cuda:{k}" for k in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder or hub id; default: a random model")
    parser.add_argument("--limit-s", type=float, default=420.0, help="begin nothing new after so many seconds")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with a tiny model, to try this script")
    chosen = parser.parse_args()
    started_s = time.monotonic()
    devices = ["cpu"] if chosen.rehearse else find_gpus()
    if not devices:
        print("no CUDA device: torch sees none, so there is nothing to check; see `nvidia-smi`.", file=sys.stderr)
        return 2
    if chosen.rehearse:
        os.environ["FULLBORE_KERNELS"] = "0"  # torch's operations, as on a GPU
    else:
        names = {torch.cuda.get_device_name(device) for device in devices}
        attention = "FlashInfer" if has_flashinfer() else "torch (FlashInfer is not installed)"
        print(f"{len(devices)} × {', '.join(names)}; torch {torch.__version__}; attention: {attention}", flush=True)

    from fullbore.model.resolve import resolve_model
    from fullbore.model.spec import ModelSpec

    with tempfile.TemporaryDirectory(prefix="fullbore-gpu-check.") as temporary:
        if chosen.model:
            folder = resolve_model(chosen.model).path
        else:
            folder = make_model(Path(temporary) / "model", is_tiny=chosen.rehearse)
        spec = ModelSpec.from_folder(folder)
        half = spec.dtype if spec.dtype in ("bfloat16", "float16") else "bfloat16"
        check = Check(folder, devices, chosen.rehearse, started_s + chosen.limit_s)
        oracle = Oracle(folder, devices[0], spec.vocab_size)
        check_logits(check, oracle, half)
        check_engine(check, oracle)
        measure_speed(check, spec.vocab_size)
    print(f"\n{len(check.failures)} wrong, {time.monotonic() - started_s:.0f} s")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""fullbore beside its peers on this machine: same model, same prompts, same client, interleaved rounds.

    python benchmarks/peers.py [--concurrency 1,8,32] [--rounds 3] [--vllm PYTHON] [--llama-cpp PYTHON]
                               [--only NAME,...] [--json FILE] [--png FILE]

--vllm and --llama-cpp name the Python of an environment that has them (see README.md beside this file); without them
only fullbore is measured. All servers are started once and wait frozen (SIGSTOP) while another one is measured, so that
rounds can be interleaved although starting vLLM takes minutes. Every figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from fullbore.bench.prompts import Prompt, RandomPrompts
from fullbore.bench.sweep import Sweep, calibrate, run
from fullbore.bench.target import Target, find_target, new_client
from fullbore.config import DEFAULT_MODEL
from fullbore.model.resolve import resolve_model

START_TIMEOUT_S = 900.0
QUESTION, ANSWER = "The capital of France is", "Paris"


@dataclass
class Server:
    """One way to serve the model."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)

    def start(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("PORT", str(port)) for part in self.command]
        if self._answers():
            raise SystemExit(f"Something answers at {self.url} already; stop it first.")
        began_s = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | self.env, start_new_session=True
            )
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() - began_s > START_TIMEOUT_S:
                self.stop()
                raise SystemExit(f"{self.name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        self.start_s = time.monotonic() - began_s

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        """The server's processes: all of its session (stages of fullbore and vLLM's workers stay in it)."""
        assert self.process is not None
        found = subprocess.run(["pgrep", "-s", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]

    def stop(self) -> None:
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.signal(signal.SIGKILL)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


def servers(model: Path, gguf: Path, vllm: str | None, llama_cpp: str | None) -> list[Server]:
    fullbore = [
        str(Path(sys.executable).parent / "fullbore"),
        "serve",
        str(model),
        "--port",
        "PORT",
        "--max-total-tokens",
        "16384",
    ]
    found = [
        Server("fullbore PP2", [*fullbore, "--pp-size", "2"]),
        Server("fullbore P1 x2", [*fullbore, "--pp-size", "1", "--threads-per-stage", "2"]),
    ]
    if vllm:
        serve = [
            *(vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "PORT"),
            *("--max-model-len", "2048"),
            *("--dtype", "bfloat16" if _has_avx512() else "float32", "--max-num-seqs", "64"),
        ]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
        found.append(Server("vLLM PP2", [*serve, "--pipeline-parallel-size", "2"], env))
        found.append(Server("vLLM P1 x2", serve, env | {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}))
    if llama_cpp:
        code = LLAMA_CPP_SERVER.replace("GGUF", repr(str(gguf)))
        found.append(Server("llama.cpp x2", [llama_cpp, "-c", code.replace("NUMBER", "PORT")]))
    return found


LLAMA_CPP_SERVER = """
import time, xllamacpp as x
p = x.CommonParams()
p.model.path = GGUF
p.hostnames, p.port, p.n_parallel, p.n_ctx = ["127.0.0.1"], NUMBER, 32, 32 * 512
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
s = x.Server(p)
while True:
    time.sleep(1)
"""


def _has_avx512() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


async def measure(server: Server, concurrencies: tuple[int, ...], model: str, seed: int) -> None:
    """One round: output tokens/s at each concurrency, 64 tokens in and out."""
    target = await find_target(server.url, None, None, is_chat=False)
    sweep = Sweep(prompts=RandomPrompts(64, 64, seed=seed), concurrencies=concurrencies, warmup_requests=1, seed=seed)
    sweep = await calibrate(sweep, target)
    async for level in run(sweep, target, lambda ended, total, errors: None):
        if level.errors or level.concurrency is None:
            raise SystemExit(f"{server.name}: {level.errors} requests failed at concurrency {level.concurrency}.")
        server.tokens_per_s.setdefault(level.concurrency, []).append(level.output_tok_s)


async def check_sense(server: Server) -> str:
    """A greedy answer that shows that the weights were read right."""
    target = await find_target(server.url, None, None, is_chat=False)
    async with new_client(1, 120) as client:
        answer = await _complete(client, target, Prompt(QUESTION, output_tokens=8))
    if ANSWER not in answer:
        raise SystemExit(f"{server.name} continues {QUESTION!r} with {answer!r}: its figures would mean nothing.")
    return answer


async def _complete(client: httpx.AsyncClient, target: Target, prompt: Prompt) -> str:
    body = target.body(prompt) | {"stream": False}
    del body["stream_options"]
    response = await client.post(f"{target.url}/v1/completions", json=body)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def print_table(found: list[Server], concurrencies: tuple[int, ...]) -> None:
    """Medians, and how many times as fast the best of fullbore is."""
    medians = {server.name: {c: median(server.tokens_per_s[c]) for c in concurrencies} for server in found}
    print(f"\n{'output tokens/s':16} {'start':>7}" + "".join(f"{f'C={c}':>16}" for c in concurrencies))
    for server in found:
        reference = "fullbore PP2" if "PP2" in server.name else "fullbore P1 x2"
        cells = ""
        for c in concurrencies:
            ratio = medians[reference][c] / medians[server.name][c] if reference in medians else float("nan")
            cells += f"{medians[server.name][c]:>9.1f}" + (f" ({ratio:.2f}x)" if server.name != reference else " " * 7)
        print(f"{server.name:16} {server.start_s:>5.0f} s{cells}")
    print("In brackets: fullbore with the same division of the cores / this.")


def plot(found: list[Server], concurrencies: tuple[int, ...], file: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="clients", ylabel="output tokens/s", xscale="log", yscale="log")
    for server in found:
        medians = [median(server.tokens_per_s[c]) for c in concurrencies]
        axes.plot(concurrencies, medians, "o-" if "fullbore" in server.name else "o--", label=server.name)
    axes.set_xticks(concurrencies, [str(c) for c in concurrencies])
    axes.legend()
    figure.savefig(file, dpi=120)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through `finally`, so that no server is left


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--only", metavar="NAME,...", help="servers whose names contain one of these")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    chosen = parser.parse_args()
    if chosen.llama_cpp and not chosen.gguf:
        parser.error("--llama-cpp needs --gguf FILE")
    concurrencies = tuple(int(part) for part in chosen.concurrency.split(","))
    found = servers(resolve_model(chosen.model).path, chosen.gguf, chosen.vllm, chosen.llama_cpp)
    if chosen.only:
        found = [server for server in found if any(part in server.name for part in chosen.only.split(","))]
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        for number, server in enumerate(found):
            print(f"starting {server.name} ...", end=" ", flush=True)
            server.start(8300 + number, logs / f"{number}.log")
            answer = asyncio.run(check_sense(server))
            server.signal(signal.SIGSTOP)
            print(f"{server.start_s:.0f} s; {QUESTION!r} -> {answer!r}", flush=True)
        for number in range(chosen.rounds):
            for server in found:
                print(f"round {number + 1} of {chosen.rounds}: {server.name}", end=" ", flush=True)
                with server.awake():
                    asyncio.run(measure(server, concurrencies, chosen.model, seed=number))
                print(" ".join(f"C={c}: {rates[-1]:.1f}" for c, rates in server.tokens_per_s.items()), flush=True)
        print_table(found, concurrencies)
    finally:
        for server in found:
            server.stop()
    if chosen.json:
        figures = [{"name": s.name, "start_s": s.start_s, "output_tok_s": s.tokens_per_s} for s in found]
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if chosen.png:
        plot(found, concurrencies, chosen.png)


if __name__ == "__main__":
    main()

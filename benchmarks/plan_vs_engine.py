"""The planner against the engine on this machine: fitted at two concurrencies, it predicts the others.

    python benchmarks/plan_vs_engine.py [--model MODEL] [--pp-size 2] [--fit 1,8] [--predict 2,4,16,32] [--rounds 3]
                                        [--json FILE]

Runs closed loops of prompts and answers of fixed length on a real engine (SmolLM2-135M over two stages by default),
calibrates the planner's parameters with the first list, and compares its predictions with the second. The machine
should have nothing else to do; since others can only make a run slower, the fastest of the rounds counts for each
concurrency. The exit code is 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from fullbore.config import DEFAULT_MODEL, EngineConfig
from fullbore.engine.client import EngineClient
from fullbore.engine.messages import AddRequest, EngineInfo, Rejected
from fullbore.plan.calibrate import Measured, calibrate
from fullbore.plan.engines import find_engine
from fullbore.plan.fitting import calibration_text
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout
from fullbore.plan.model_table import find_model
from fullbore.plan.models import DecoderModel, from_config
from fullbore.plan.predict import predict
from fullbore.plan.report import table
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy

TOLERANCE = 0.15
GENERATIONS = 3  # answers of each client; the first only fills the pipeline
BYTES = {"float32": ("fp32", 4.0), "bfloat16": ("bf16", 2.0), "float16": ("bf16", 2.0)}


@dataclass
class Answer:
    """One request: when it was sent, and when its tokens came."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list)


def closed_loop(engine: EngineClient, clients: int, input_tokens: int, output_tokens: int) -> Measured:
    """So many clients, each of which sends its next prompt when the answer before is complete.

    Measured from the first complete answer until a client finds nothing left to send, as the simulator does.
    """
    total, sent = GENERATIONS * clients, 0
    answers: dict[int, Answer] = {}
    ends_s: list[float] = []

    def send() -> None:
        request_id = engine.next_request_id()
        prompt = [100 + (request_id * 7919 + position * 131) % 40000 for position in range(input_tokens)]
        answers[request_id] = Answer(time.monotonic())
        engine.add(AddRequest(request_id, prompt, output_tokens, 0.0, 1.0, 0, 0, ignore_eos=True))

    while sent < clients:
        send()
        sent += 1
    while len(ends_s) < total:
        for message in engine.receive(1.0):
            if isinstance(message, Rejected):
                sys.exit(f"the engine refused a request: {message.message}")
            now_s = time.monotonic()
            for token in message.outputs:
                answers[token.request_id].tokens_s.append(now_s)
                if token.finish_reason is not None:
                    ends_s.append(now_s)
                    if sent < total:
                        send()
                        sent += 1
    start_s, end_s = ends_s[0], ends_s[total - clients]
    steady = [answer for answer in answers.values() if start_s <= answer.sent_s < end_s]
    number = sum(start_s < at_s <= end_s for answer in answers.values() for at_s in answer.tokens_s)
    gaps_s = [after - before for answer in steady for before, after in pairwise(answer.tokens_s)]
    waits_s = [answer.tokens_s[0] - answer.sent_s for answer in steady]
    return Measured(clients, number / (end_s - start_s), sum(waits_s) / len(waits_s), sum(gaps_s) / len(gaps_s))


def measure(chosen: argparse.Namespace, concurrency: Sequence[int]) -> tuple[list[Measured], EngineInfo]:
    with EngineClient.start(EngineConfig(model=chosen.model, pp_size=chosen.pp_size)) as engine:
        closed_loop(engine, 2, chosen.input_tokens, 8)  # warm-up
        runs: dict[int, list[Measured]] = {number: [] for number in concurrency}
        for _ in range(chosen.rounds):
            for number in concurrency:
                runs[number].append(closed_loop(engine, number, chosen.input_tokens, chosen.output_tokens))
                speed = runs[number][-1].output_tok_s
                print(f"measured at concurrency {number}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)
        return [max(found, key=lambda each: each.output_tok_s or 0.0) for found in runs.values()], engine.info


def planned(chosen: argparse.Namespace, info: EngineInfo) -> Deployment:
    """The same engine, as the planner sees it."""
    name, element_bytes = BYTES[info.dtype]
    model = _model(chosen.model, info, name)
    kept_bytes = sum(stage.weight_bytes for stage in info.stages)
    if kept_bytes < 0.75 * model.weight_bytes:  # own kernels keep 16-bit weights and compute in float32
        model = _model(chosen.model, info, "bf16")
    partition = tuple(stage.layers[1] - stage.layers[0] for stage in info.stages)
    scenario = Scenario(
        model=model,
        hardware=parse_hardware(f"{chosen.pp_size}x cpu"),
        engine=find_engine("fullbore"),
        demand=Demand(input_tokens=chosen.input_tokens, output_tokens=chosen.output_tokens, concurrency=(32,)),
        cache_bytes_per_element=element_bytes,
    )
    return deploy(scenario, Layout(pp=chosen.pp_size, partition=partition, chunk_tokens=512, graphs=False), 32)


def _model(name: str, info: EngineInfo, weights: str) -> DecoderModel:
    config = Path(info.model_path) / "config.json"
    if config.is_file():
        return from_config(json.loads(config.read_text()), name, weights)
    found = find_model(name, weights)
    if found is None:
        sys.exit(f"the planner does not know {name}; give a folder with a config.json")
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--pp-size", type=int, default=2)
    arguments.add_argument("--fit", default="1,8")
    arguments.add_argument("--predict", default="2,4,16,32")
    arguments.add_argument("--input-tokens", type=int, default=64)
    arguments.add_argument("--output-tokens", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", metavar="FILE")
    chosen = arguments.parse_args()
    fitted_at, asked = ([int(part) for part in text.split(",")] for text in (chosen.fit, chosen.predict))

    measured, info = measure(chosen, sorted({*fitted_at, *asked}))
    deployment = planned(chosen, info)
    found = calibrate(deployment, [each for each in measured if each.concurrency in fitted_at])
    print(calibration_text(found), "\n")
    fitted = deployment.with_parameters(found.parameters)
    rows, results, worst = [], [], 0.0
    for each in measured:
        assert each.output_tok_s is not None
        prediction = predict(fitted, each.concurrency)
        error = prediction.output_tok_s / each.output_tok_s - 1
        is_fitted = each.concurrency in fitted_at
        worst = worst if is_fitted else max(worst, abs(error))
        rows.append(
            [
                str(each.concurrency),
                f"{each.output_tok_s:.1f}",
                f"{prediction.output_tok_s:.1f}",
                f"{error:+.1%}",
                "fitted" if is_fitted else "predicted",
            ]
        )
        results.append({**asdict(each), "predicted_tok_s": prediction.output_tok_s, "is_fitted": is_fitted})
    print(table(("C", "measured tokens/s", "planner", "off", ""), rows))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()

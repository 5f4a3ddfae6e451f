"""`fullbore plan`: reads what the user gives, asks the planner, prints."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullbore.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from fullbore.plan.fitting import Calibration
    from fullbore.plan.hardware import Hardware
    from fullbore.plan.layout import Layout
    from fullbore.plan.models import DecoderModel
    from fullbore.plan.predict import Prediction
    from fullbore.plan.scenario import Deployment, Scenario
    from fullbore.plan.search import OnProgress, SearchResult, Slo
    from fullbore.plan.uncertainty import Matrix

LAYOUT, DEMAND, OUTPUT = "Layout (one is evaluated if --pp or --tp is given, else all are compared)", "Demand", "Output"


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A known model's name, or a folder with a config.json.")
    ],
    hardware: Annotated[
        str,
        typer.Option(metavar="LIST|FILE", help="'8x rtx-pro-6000', '1x 4090 + 1x 3090', hosts by /; or a TOML file."),
    ],
    pp: Annotated[int | None, typer.Option("--pp", "--pp-size", help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", "--tp-size", help="Tensor-parallel ranks per stage.")] = None,
    replicas: Annotated[int, typer.Option(help="Independent copies that share the requests.")] = 1,
    partition: Annotated[
        str | None, typer.Option("--partition", "--pp-layer-partition", metavar="N,N,...", help="Layers per stage.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Decode in so many micro-batches; default: what the scheduler chooses.")
    ] = None,
    max_micro_batch: Annotated[
        int | None, typer.Option("--max-micro-batch", "--pp-max-micro-batch-size", min=1, help="Most requests in one.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", "--pp-async-batch-depth", min=0, help="In flight beyond the stages.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", "--chunked-prefill-size", min=1, help="Most prompt tokens per micro-batch.")
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="Replay recorded launches when decoding.")
    ] = True,
    dp_attention: Annotated[
        bool, typer.Option("--dp-attention", help="Ranks divide the experts only; each attends for its own requests.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="Weight format in place of the checkpoint's: bf16, fp8, int4, nvfp4, …")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="KV cache: fp32, bf16 or fp8.")] = "bf16",
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Clients that each wait.")] = "1,8,32,128",
    rate: Annotated[float | None, typer.Option(help="Requests per second at random times, instead.")] = None,
    input_tokens: Annotated[int, typer.Option(help="Prompt length.")] = 1024,
    output_tokens: Annotated[int, typer.Option(help="Answer length.")] = 256,
    prefix_hit_rate: Annotated[float, typer.Option(help="Share of each prompt that is in the prefix cache.")] = 0.0,
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="Requests at once; more wait.")] = None,
    slo_ttft: Annotated[
        float | None, typer.Option(metavar="S", help="Mean time to first token must not exceed.")
    ] = None,
    slo_itl: Annotated[
        float | None, typer.Option(metavar="S", help="Mean time between tokens must not exceed.")
    ] = None,
    as_: Annotated[str, typer.Option("--as", help="Whose scheduling: fullbore, sglang, vllm or trtllm.")] = "fullbore",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Fit to a bench.json or run.fbr of these --pp, --tp … on this hardware."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with charts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of predictions as JSON.")] = False,
) -> None:
    """Predict tokens/s, TTFT and ITL of MODEL on given hardware, for one layout or for all that fit."""
    from fullbore.plan.engines import find_engine
    from fullbore.plan.layout import Layout
    from fullbore.plan.scenario import Demand, Scenario
    from fullbore.plan.search import Slo

    demand = Demand(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        concurrency=_numbers("--concurrency", concurrency),
        rate_per_s=rate,
        prefix_hit_rate=prefix_hit_rate,
    )
    demand.validate()
    slo = Slo(ttft_s=slo_ttft, itl_s=slo_itl)
    slo.validate()
    scenario = Scenario(
        model=_read_model(model, weights),
        hardware=_read_hardware(hardware),
        engine=find_engine(as_),
        demand=demand,
        cache_bytes_per_element=_kv_bytes(kv_dtype),
        max_running=max_running_requests,
    )
    layout = Layout(
        pp=pp or 1,
        tp=tp or 1,
        replicas=replicas,
        partition=None if partition is None else _numbers("--partition", partition),
        micro_batches=micro_batches or "auto",
        max_micro_batch=max_micro_batch or "auto",
        depth="auto" if depth is None else depth,
        chunk_tokens=chunk,
        graphs=graphs,
        dp_attention=dp_attention,
    )
    if pp is None and tp is None and partition is None:
        if calibrate is not None:
            raise ConfigError("--calibrate needs the layout that was measured: give its --pp and --tp.")
        _compare(scenario, layout, slo, html, as_json)
        return
    for flag, value in (("--pp", pp), ("--tp", tp)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    _predict(scenario, layout, calibrate, html, as_json)


def _predict(scenario: Scenario, layout: Layout, calibrate: Path | None, html: Path | None, as_json: bool) -> None:
    """One layout."""
    from fullbore.plan.report import evaluation_text
    from fullbore.progress import WorkProgress

    with WorkProgress("", is_shown=not as_json) as progress:
        scenario, covariance = _calibrated(scenario, layout, calibrate, progress.update)
        rows = _evaluate(scenario, layout, covariance, progress.update)
    if html is not None and not isinstance(rows[0], dict):
        _write_page(html, scenario, rows, rows[-1], [])
    if as_json:
        _print_json(rows)
    elif isinstance(rows[0], dict):
        raise ConfigError(f"{scenario.model.name} does not fit as {layout.name}: {rows[0]['problem']}.")
    else:
        print(evaluation_text(scenario, rows))


def _compare(scenario: Scenario, layout: Layout, slo: Slo, html: Path | None, as_json: bool) -> None:
    """All layouts. `layout` has what they have in common."""
    from fullbore.plan.report import search_text
    from fullbore.plan.search import search
    from fullbore.progress import WorkProgress

    with WorkProgress("", is_shown=not as_json) as progress:
        result = search(scenario, layout, slo, progress.update)
    if html is not None:
        unfit = [f"does not fit: {each.layout.name}: {each.problem}" for each in result.unfit]
        _write_page(html, scenario, result.predictions, result.pick, unfit)
    if as_json:
        _print_json(_search_rows(result))
    else:
        print(search_text(scenario, result, slo))


# ------------------------------------------------------------------------------------------------ what is evaluated


def _evaluate(scenario: Scenario, layout: Layout, covariance: Matrix | None, on_progress: OnProgress) -> list[Any]:
    """Predictions; or, if the layout does not fit, one row for each concurrency that says so."""
    from fullbore.plan.predict import predict
    from fullbore.plan.scenario import deploy
    from fullbore.plan.uncertainty import Uncertainty

    concurrency = scenario.demand.concurrency if scenario.demand.rate_per_s is None else (1,)
    deployment = deploy(scenario, layout, max(concurrency))
    if deployment.problem:
        return [{**_unfit_row(deployment), "concurrency": each} for each in concurrency]
    uncertainty = Uncertainty(deployment, covariance)
    predictions = []
    for done, each in enumerate(concurrency):
        on_progress(done, len(concurrency), f"concurrency {each}")
        predictions.append(predict(deployment, each, uncertainty))
    return predictions


def _calibrated(
    scenario: Scenario, layout: Layout, file: Path | None, on_progress: OnProgress
) -> tuple[Scenario, Matrix | None]:
    """The scenario with parameters fitted to the file, and their remaining uncertainty."""
    if file is None:
        return scenario, None
    from fullbore.plan.fitting import calibration_text

    fit = _fit_to_recording if file.suffix == ".fbr" else _fit_to_bench
    found = fit(scenario, layout, file, on_progress)
    print(calibration_text(found), file=sys.stderr)
    return replace(scenario, parameters=found.parameters), found.covariance


def _fit_to_bench(scenario: Scenario, layout: Layout, file: Path, on_progress: OnProgress) -> Calibration:
    from fullbore.plan.calibrate import calibrate, read_bench

    try:
        measured = read_bench(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibrate {file} cannot be read ({error}).") from None
    deployment = _measured_deployment(scenario, layout, max(each.concurrency for each in measured))
    return calibrate(deployment, measured, lambda done, total: on_progress(done, total, "calibrating"))


def _fit_to_recording(scenario: Scenario, layout: Layout, file: Path, on_progress: OnProgress) -> Calibration:
    from fullbore.plan.calibrate_steps import calibrate_steps, stage_times
    from fullbore.telemetry.recording import read_timeline

    timeline = read_timeline(file)
    times = stage_times(timeline.recording)
    recorded = tuple(stage.layers[1] - stage.layers[0] for stage in timeline.stages)
    if layout.pp != timeline.recording.pp_size:
        raise ConfigError(
            f"--calibrate {file} was recorded over {timeline.recording.pp_size} stages; --pp is {layout.pp}."
        )
    layout = replace(layout, partition=recorded or layout.partition)
    deployment = _measured_deployment(scenario, layout, max(1, *(each.requests for each in times)))
    return calibrate_steps(deployment, times)


def _measured_deployment(scenario: Scenario, layout: Layout, concurrency: int) -> Deployment:
    from fullbore.plan.scenario import deploy

    deployment = deploy(scenario, layout, concurrency)
    if deployment.problem:
        raise ConfigError(f"--calibrate: {scenario.model.name} does not fit as {layout.name}: {deployment.problem}.")
    return deployment


def _unfit_row(deployment: Deployment) -> dict[str, Any]:
    layout = deployment.layout
    return {
        "pp": layout.pp,
        "tp": layout.tp,
        "replicas": layout.replicas,
        "dp_attention": layout.dp_attention,
        "partition": list(deployment.partition),
        "fits": False,
        "problem": deployment.problem,
        "missing_bytes": round(max(stage.missing_bytes for stage in deployment.memory.stages)),
        "cache_tokens": deployment.memory.cache_tokens,
    }


def _search_rows(result: SearchResult) -> list[dict[str, Any]]:
    from fullbore.plan.commands import commands

    front = {id(each) for each in result.pareto}
    rows = []
    predictions = list(result.predictions)
    if result.pick is not None and all(each is not result.pick for each in predictions):
        predictions.append(result.pick)
    for each in predictions:
        row = {**each.to_json(), "pareto": id(each) in front, "pick": each is result.pick}
        if each is result.pick:
            row |= {"meets_slo": result.is_slo_met, "commands": commands(each)}
        rows.append(row)
    return rows + [_unfit_row(each) for each in result.unfit]


# ------------------------------------------------------------------------------------------------------- reading


def _read_model(name: str, weights: str | None) -> DecoderModel:
    from fullbore.plan.model_table import find_model, unknown_model
    from fullbore.plan.models import from_config

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" or not path.is_file():
        if Path(name).is_dir():
            raise ModelError(f"{path} is missing; give a folder with a Hugging Face config.json.")
        found = find_model(name, weights)
        if found is None:
            raise unknown_model(name)
        return found
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object; give a Hugging Face config.json.")
    return from_config(config, path.resolve().parent.name, weights)


def _read_hardware(text: str) -> Hardware:
    from fullbore.plan.hardware import parse_hardware
    from fullbore.plan.hardware_file import hardware_from_toml

    if not text.endswith(".toml"):
        return parse_hardware(text)
    try:
        return hardware_from_toml(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hardware {text} cannot be read ({error}).") from None


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text} is not a list of whole numbers such as 1,8,32.") from None


def _kv_bytes(name: str) -> float:
    sizes = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
    if name not in sizes:
        raise ConfigError(f"--kv-dtype {name} is unknown; known are {', '.join(sizes)}.")
    return sizes[name]


# ------------------------------------------------------------------------------------------------------- printing


def _write_page(
    file: Path, scenario: Scenario, predictions: list[Prediction], pick: Prediction | None, remarks: list[str]
) -> None:
    from fullbore.plan.page import page

    try:
        file.write_text(page(scenario, predictions, pick, remarks), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file} cannot be written ({error.strerror}).") from None


def _print_json(rows: list[Any]) -> None:
    plain = [row if isinstance(row, dict) else row.to_json() for row in rows]
    print(json.dumps(plain, indent=1))

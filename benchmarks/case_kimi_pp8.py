"""Writes docs/case-kimi-pp8.md and its charts: `python benchmarks/case_kimi_pp8.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from fullbore.plan.chart import Series, chart
from fullbore.plan.engines import find_engine
from fullbore.plan.hardware import parse_hardware
from fullbore.plan.layout import Layout, even_partition
from fullbore.plan.loads import Load
from fullbore.plan.model_table import find_model
from fullbore.plan.predict import Prediction, predict
from fullbore.plan.report import table
from fullbore.plan.scenario import Demand, Deployment, Scenario, deploy

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = "case-kimi-pp8"
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EVEN = even_partition(61, 8)
BASE = Layout(pp=8, graphs=False, micro_batches=1, partition=EVEN)
REPORTED = {1: 24.7, 8: 95.6}
CHANGES: list[tuple[str, Layout]] = [
    ("as reported: eager, one micro-batch, even split", BASE),
    ("graphs", replace(BASE, graphs=True)),
    ("the 8 requests spread over 8 micro-batches", replace(BASE, micro_batches="auto")),
    ("better split", replace(BASE, partition=None)),
    ("graphs and spread", replace(BASE, graphs=True, micro_batches="auto")),
    ("graphs, spread, better split", replace(BASE, graphs=True, micro_batches="auto", partition=None)),
    ("depth 4, nothing else", replace(BASE, depth=4)),
]
LAYOUTS: list[Layout] = [
    Layout(pp=8),
    Layout(pp=4, tp=2),
    Layout(pp=2, tp=4),
    Layout(tp=8),
]
DEP8 = Layout(tp=8, dp_attention=True)


@cache
def deployed(layout: Layout, engine: str = "fullbore", concurrency: int = 8) -> Deployment:
    model = find_model("kimi-k2.6")
    assert model is not None
    scenario = Scenario(
        model=model,
        hardware=parse_hardware("8x rtx-pro-6000"),
        engine=find_engine(engine),
        demand=Demand(input_tokens=1024, output_tokens=256, concurrency=(concurrency,)),
    )
    return deploy(scenario, layout, concurrency)


@cache
def predicted(layout: Layout, concurrency: int, engine: str = "fullbore", split_for: int = 0) -> Prediction:
    return predict(deployed(layout, engine, split_for or concurrency), concurrency)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def figure(each: Prediction) -> str:
    return f"{each.output_tok_s:.1f}"


def with_range(each: Prediction) -> str:
    return f"{each.output_tok_s:.1f} ({each.range[0]:.0f}-{each.range[1]:.0f})"


def busy(each: Prediction) -> str:
    return f"{sum(each.stage_busy) / len(each.stage_busy):.0%}"


def changes_table() -> str:
    base = {concurrency: predicted(BASE, concurrency, split_for=8) for concurrency in (1, 8)}
    rows = []
    for name, layout in CHANGES:
        cells = [name]
        for concurrency in (1, 8):
            each = predicted(layout, concurrency, split_for=8)
            gain = each.output_tok_s / base[concurrency].output_tok_s
            cells += [with_range(each), f"{gain:.2f}x", busy(each)]
        rows.append(cells)
    return markdown(["change", "C=1 tokens/s", "gain", "busy", "C=8 tokens/s", "gain", "busy"], rows)


def layouts_table() -> str:
    rows = []
    for concurrency in CONCURRENCY:
        rows.append([str(concurrency), *(figure(predicted(layout, concurrency)) for layout in LAYOUTS)])
    return markdown(["C", *(layout.name for layout in LAYOUTS)], rows)


def depth_table() -> str:
    rows = []
    for depth in (0, 1, 2, 4, 8):
        layout = replace(BASE, depth=depth, micro_batches="auto", graphs=True)
        rows.append([str(depth), *(figure(predicted(layout, each, "sglang")) for each in (1, 8, 64, 128))])
    return markdown(["depth", "C=1", "C=8 (one burst)", "C=64", "C=128"], rows)


def spread_table() -> str:
    rows = []
    for number in (1, 2, 4, 8):
        layout = replace(BASE, graphs=True, micro_batches=number, partition=None)
        cells = [str(number)]
        for concurrency in (8, 64):
            each = predicted(layout, concurrency, split_for=8)
            cells += [figure(each), busy(each), f"{1e3 * each.itl_s:.0f}"]
        rows.append(cells)
    return markdown(["micro-batches", "C=8 tokens/s", "busy", "ITL ms", "C=64 tokens/s", "busy", "ITL ms"], rows)


def where_the_time_goes() -> str:
    rows = []
    for name, layout, size in (
        ("eager, C=1", BASE, 1),
        ("graphs, C=1", replace(BASE, graphs=True), 1),
        ("graphs, 8 in one", replace(BASE, graphs=True), 8),
    ):
        load = Load(size, sampled=size, context_tokens=size * 1152)
        parts: dict[str, float] = {}
        for stage in deployed(layout).costs.stages:
            for part, seconds in stage.breakdown(load).items():
                parts[part] = parts.get(part, 0.0) + 1e3 * seconds
        shown = ("weights", "experts", "cache", "kernels", "launches", "host", "head")
        rows.append([name, f"{sum(parts.values()):.1f}", *(f"{parts.get(part, 0.0):.1f}" for part in shown)])
    return markdown(
        ["ms through all stages", "sum", "weights", "experts", "cache", "kernels", "launches", "host", "head"], rows
    )


def charts() -> dict[str, str]:
    throughput = [
        Series(layout.name, [(each, predicted(layout, each).output_tok_s) for each in CONCURRENCY])
        for layout in LAYOUTS
    ]
    eager = Series(
        "PP8 as reported",
        [(each, predicted(BASE, each, split_for=8).output_tok_s) for each in CONCURRENCY],
        band=[predicted(BASE, each, split_for=8).range for each in CONCURRENCY],
    )
    reported = Series("reported", list(REPORTED.items()), is_line=False)
    users = [
        Series(
            layout.name,
            [
                (predicted(layout, each).tok_s_per_user, predicted(layout, each).tok_s_per_device)
                for each in CONCURRENCY
            ],
        )
        for layout in LAYOUTS
    ]
    shares = [
        Series(f"{number} micro-batches", [(100 * sum(each.stage_busy) / 8, each.output_tok_s)], is_line=False)
        for number in (1, 2, 4, 8, 16)
        for each in [
            predicted(replace(BASE, graphs=True, micro_batches=number, depth=8, partition=None), 64, split_for=64)
        ]
    ]
    return {
        "throughput": chart(
            "Kimi K2.6 on 8 RTX PRO 6000: output tokens/s", "concurrency", "tokens/s", [*throughput, eager, reported],
            log_x=True, log_y=True,
        ),
        "users": chart(
            "Tokens/s per user against per device", "per user", "per device", users, log_x=True, log_y=True
        ),
        "busy": chart(
            "Utilisation and throughput are two things (C=64)", "stages busy, %", "tokens/s", shares,
            log_x=False, log_y=False,
        ),
    }  # fmt: skip


def text() -> str:
    base1, base8 = (predicted(BASE, concurrency, split_for=8) for concurrency in (1, 8))
    best8 = predicted(CHANGES[5][1], 8, split_for=8)
    tp8 = predicted(LAYOUTS[3], 1)
    sglang8 = predicted(replace(BASE, micro_batches="auto", partition=None), 8, "sglang")
    tp8_parts = deployed(LAYOUTS[3]).costs.stages[0].breakdown(Load(1, sampled=1, context_tokens=1152))
    model = deployed(BASE).scenario.model
    roofline = 1792e9 / model.bytes_read(1)
    return f"""# The case that started this: Kimi K2.6 on eight RTX PRO 6000, and an idle pipeline

*Written by `python benchmarks/case_kimi_pp8.py`; every figure that is not called reported is the planner's, for 1,024
tokens in and 256 out, with its 90 % range in brackets.*

**Reported**: Kimi K2.6 (int4 experts, {model.weight_bytes / 1e9:.0f} GB) under SGLang on 8 RTX PRO 6000, `--pp-size 8
--tp-size 1 --disable-cuda-graph`: {REPORTED[1]} tokens/s for one request, {REPORTED[8]} for eight, the cards mostly
idle. Context length, and whether the eight requests travelled together, were not reported.

**In short.** One token reads {model.bytes_read(1) / 1e9:.1f} GB of weights, stage after stage, so one request can get
{roofline:.1f} tokens/s at most, however it is scheduled. It got {REPORTED[1] / roofline:.0%} of that because launching
kernels one by one from Python takes longer than running them. Eight requests in one micro-batch leave seven of eight
stages idle; spread over eight they fill the pipeline. Both together: {
        best8.output_tok_s:.0f} tokens/s at C=8 instead of
{base8.output_tok_s:.0f}. More depth changes nothing at C=1, and nothing while the requests are packed.

## Fitted and predicted

One parameter was fitted: the host's time to launch one kernel without graphs (21.5 us), to {REPORTED[1]} tokens/s at
C=1. The rest comes from the model's config, the card's data sheet and efficiencies measured on other models.

{
        markdown(
            ["", "reported", "planner", "off"],
            [
                ["C=1 (fitted)", f"{REPORTED[1]}", with_range(base1), f"{base1.output_tok_s / REPORTED[1] - 1:+.0%}"],
                [
                    "C=8, one micro-batch",
                    f"{REPORTED[8]}",
                    with_range(base8),
                    f"{base8.output_tok_s / REPORTED[8] - 1:+.0%}",
                ],
                [
                    "C=8, `--as sglang` (its slots pack the burst)",
                    f"{REPORTED[8]}",
                    with_range(sglang8),
                    f"{sglang8.output_tok_s / REPORTED[8] - 1:+.0%}",
                ],
            ],
        )
    }

The planner's figures include the prompts' prefill, which the report's decode figures may not; decoding alone it is
{1 / base1.itl_s:.1f} and {8 / base8.itl_s:.1f} tokens/s.

{where_the_time_goes()}

Launches overlap with running, so at C=8, where the cards have more to do, they cost much less than at C=1.

## What each single change brings

{changes_table()}

- **Graphs** help the lone request most, for which launching was the limit.
- **Spreading** does nothing for one request and most for eight: seven stages of eight were idle. Under SGLang nothing
  spreads a burst but the cap: `--pp-max-micro-batch-size 1` for eight requests.
- **A better split** (head and sampling weigh as much as some layers on the last stage; the first layer is dense) shows
  only in a pipeline that is full.
- **Depth** is for a full pipeline whose host is slow. It does nothing for C=1 and nothing for packed requests.

## Utilisation and throughput are two things

{spread_table()}

With many requests per micro-batch the experts are read again by each of them: four micro-batches that keep half of the
stages busy can be worth nearly as much as eight that keep all of them busy. The planner, like the scheduler, looks for
the least time per token, not for busy cards.

![tokens per second over utilisation]({FOLDER}/busy.svg)

## PP8 beside TP8 and what lies between

{layouts_table()}

![throughput over concurrency]({FOLDER}/throughput.svg)

![per user against per device]({FOLDER}/users.svg)

- For one request tensor parallelism wins ({tp8.output_tok_s:.0f} tokens/s; 91.5 was measured elsewhere, with fp8 cache
  and little context): all eight cards read at once. Of its {1e3 * sum(tp8_parts.values()):.1f} ms per token,
  {1e3 * tp8_parts["all-reduce"]:.1f} ms are two all-reduces per layer over PCIe, and
  {1e3 * tp8_parts["kernels"]:.1f} ms the start and end of kernels, which more cards do not make shorter.
- With many requests the same all-reduces, and the latent cache that every rank holds in full, hold TP8 back; layouts
  between the two overtake it.
- Data-parallel attention with divided experts (DEP8) does not fit: {deployed(DEP8).problem}.

## Depth (SGLang's slots, graphs, even split)

{depth_table()}

At C=8 the burst sits in one slot whatever the depth.

## Reproduce

```
fullbore plan kimi-k2.6 --hardware '8x rtx-pro-6000' --pp 8 --tp 1 --no-graphs --micro-batches 1 --concurrency 1,8
fullbore plan kimi-k2.6 --hardware '8x rtx-pro-6000' --pp 8 --concurrency 1,8
fullbore plan kimi-k2.6 --hardware '8x rtx-pro-6000' --pp 8 --no-graphs --as sglang --concurrency 1,8
fullbore plan kimi-k2.6 --hardware '8x rtx-pro-6000' --concurrency 1,8,32,128 --slo-itl 0.05
```
"""


def main() -> None:
    (DOCS / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, svg in charts().items():
        (DOCS / FOLDER / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
    (DOCS / "case-kimi-pp8.md").write_text(text(), encoding="utf-8")
    shown = [[each.name, *(figure(predicted(each, number)) for number in (1, 8, 64))] for each in LAYOUTS]
    print(table(("layout", "C=1", "C=8", "C=64"), shown))


if __name__ == "__main__":
    main()

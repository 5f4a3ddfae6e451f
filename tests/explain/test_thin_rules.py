"""Rules that need evidence of one kind: what they say with it, and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullbore.explain.run import explain

SGLANG = "python3 -m sglang.launch_server --model-path /m --pp-size 4 --speculative-algorithm EAGLE"


def answer(folder: Path, launch: str, **files: Any) -> dict[str, Any]:
    (folder / "launch.txt").write_text(launch)
    for name, content in files.items():
        is_text = isinstance(content, str)
        (folder / (name + (".prom" if is_text else ".json"))).write_text(content if is_text else json.dumps(content))
    return explain([folder]).answer


def test_the_period_tells_a_ring_with_uneven_stages(tmp_path: Path) -> None:
    notes = {"concurrent_requests": 32, "stage_times_ms": [10.0, 10.0, 10.0, 12.0], "step_period_ms": 14.2}
    found = answer(tmp_path, SGLANG, notes=notes)
    assert found["primary"] == "ring-order"
    assert any("--pp-async-batch-depth 1" in line for line in found["verdicts"][0]["fix"])
    assert found["verdicts"][0]["gain"]["high"] == pytest.approx(14.2 / 12, rel=0.01)


def test_a_period_that_the_slowest_stage_explains_is_no_ring(tmp_path: Path) -> None:
    notes = {"concurrent_requests": 32, "stage_times_ms": [10.0, 10.0, 10.0, 14.0], "step_period_ms": 14.6}
    assert answer(tmp_path, SGLANG, notes=notes)["primary"] != "ring-order"


SMI = "index, name, utilization.gpu [%], power.draw [W]\n" + "".join(
    f"{gpu}, NVIDIA H100 80GB HBM3, {percent} %, 120.00 W\n" for percent in (9, 8, 10) for gpu in range(4)
)


@pytest.mark.parametrize(("queue_s", "is_control"), [(0.1, True), (38.0, False)])
def test_a_late_first_token_after_a_queue_is_no_control_plane(tmp_path: Path, queue_s: float, is_control: bool) -> None:
    rows = [{"concurrency": c, "ttft_ms_mean": 5000.0, "itl_ms_mean": 30.0, "output_tok_s": 30.0 * c} for c in (1, 8)]
    (tmp_path / "nvidia-smi.csv").write_text(SMI)
    metrics = f"vllm:request_queue_time_seconds_sum {queue_s}\nvllm:request_queue_time_seconds_count 10\n"
    found = answer(tmp_path, "vllm serve m --pipeline-parallel-size 4", bench=rows, metrics=metrics)
    reported = [verdict["id"] for verdict in found["verdicts"]] + [
        fact["value"] for fact in found["not_the_bottleneck"]
    ]
    assert ("control-plane-latency" in reported) == is_control

"""What `fullbore bench` measured of real servers whose stages sleep, set up well and badly: the verdict on each."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullbore.explain.report.html import page
from fullbore.explain.report.text import WIDTH, print_answer
from fullbore.explain.run import Explanation, explain

FILES = Path(__file__).parent.parent / "data" / "fullbore-bench"
VERDICTS = {
    "healthy-sweep": ("at-roofline", "more requests at once"),
    "packed": ("packed-slot", "--num-micro-batches auto"),
    "slow-stage": ("imbalance", "--pp-layer-partition 4,4"),
    "few-requests": ("few-requests", "send at least 4 requests at once"),
    "slow-link": ("slow-link", "--pp-async-batch-depth auto"),
    "small-cache": ("kv-limited", "--max-total-tokens 6880"),
}


def as_text(explanation: Explanation) -> str:
    stream = io.StringIO()
    print_answer(explanation.answer, Console(file=stream, width=WIDTH))
    return stream.getvalue()


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_evidence_and_fix(name: str) -> None:
    verdict, fix = VERDICTS[name]
    answer = explain([FILES / f"{name}.json"]).answer
    primary = answer["verdicts"][0]
    assert [one["id"] for one in answer["verdicts"]] == [verdict]
    assert primary["confidence"] in ("near certain", "very likely")
    assert any(fix in line for line in primary["fix"])
    assert primary["evidence"][0]["file"] == f"{name}.json"
    assert primary["evidence"][0]["line"] >= 1


@pytest.mark.parametrize("name", VERDICTS)
def test_every_form_is_readable(name: str) -> None:
    """No raw tables, 80 columns, and no GPU samples asked of stages on CPUs."""
    explanation = explain([FILES / f"{name}.json"])
    text = as_text(explanation)
    for whole in (text, json.dumps(explanation.answer, ensure_ascii=False)):
        assert "nvidia-smi" not in whole
        assert "{'" not in whole
    assert "{'" not in page(explanation.situation, explanation.answer)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "stages on cpu" in text


def test_a_sweep_says_what_each_level_did() -> None:
    facts = [fact["text"] for fact in explain([FILES / "healthy-sweep.json"]).answer["facts"]]
    levels = [text for text in facts if text.startswith("concurrency")]
    assert len(levels) == 3
    assert "idle mostly for few-requests" in levels[0]
    assert all("stages work" in text for text in levels)


def test_all_evidence_of_one_server_together() -> None:
    """A bench, an account, and counters: one verdict."""
    paths = [FILES / name for name in ("packed.json", "packed-account.json", "packed.prom")]
    for given in (paths, paths[1:], paths[2:], paths[::-1]):
        answer = explain(given).answer
        assert [one["id"] for one in answer["verdicts"]] == ["packed-slot"]
        assert not any(item["what"].startswith("no GPU samples") for item in answer["missing"])


def test_an_account_of_no_requests_does_not_outweigh_a_bench(tmp_path: Path) -> None:
    idle = {"window_s": 10.0, "stages": [{"stage": n, "seconds": {"no-requests": 10.0}} for n in range(4)]}
    (tmp_path / "account.json").write_text(json.dumps(idle))
    (tmp_path / "bench.json").write_bytes((FILES / "packed.json").read_bytes())
    assert explain([tmp_path]).answer["primary"] == "packed-slot"
    assert explain([tmp_path / "account.json"]).answer["primary"] == "insufficient-evidence"


def test_two_servers_that_differ_in_a_setting_are_an_experiment(tmp_path: Path) -> None:
    before = json.loads((FILES / "packed.json").read_text())
    after = json.loads(json.dumps(before))
    after[0]["server"]["num_micro_batches"], after[0]["output_tok_s"] = "auto", 177.0
    (tmp_path / "before.json").write_text(json.dumps(before))
    (tmp_path / "after.json").write_text(json.dumps(after))
    verdict = explain([tmp_path]).answer["verdicts"][0]
    assert verdict["id"] == "packed-slot"
    assert verdict["gain"]["low"] == pytest.approx(177.0 / before[0]["output_tok_s"])


def test_a_bench_without_settings_still_says_why_stages_idle(tmp_path: Path) -> None:
    rows = json.loads((FILES / "packed.json").read_text())
    del rows[0]["server"]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    answer = explain([tmp_path]).answer
    assert answer["primary"] == "packed-slot"
    assert any("fullbore" in fact["text"] for fact in answer["facts"])


DAMAGE: dict[str, Any] = {
    "no list": 7,
    "no tables": [1, "x", None],
    "no shares": [{"stage": 0, "busy": "much", "idle": {"packed": 0.4}}],
    "shares beyond all": [{"stage": 0, "busy": 1e9, "idle": {"packed": -3}}, {"stage": 1, "busy": None, "idle": []}],
    "not finite": [{"stage": 0, "busy": float("nan"), "idle": {"packed": float("inf")}}],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_stages_are_no_account(name: str, tmp_path: Path) -> None:
    rows = json.loads((FILES / "packed.json").read_text())
    rows[0]["stages"], rows[0]["server"] = DAMAGE[name], ["not", "a", "table"]
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    explanation = explain([tmp_path])
    assert not explanation.situation.evidence.accounts
    assert not explanation.answer["problems"]


def test_gpus_that_the_bench_watched_are_samples(tmp_path: Path) -> None:
    """Of any server: one client on four even stages."""
    gpus = [{"gpu": n, "name": "NVIDIA H100 80GB HBM3", "utilisation": 0.24, "power_w": 180.0} for n in range(4)]
    row = {"concurrency": 1, "output_tok_s": 40.0, "ttft_ms_mean": 60.0, "itl_ms_mean": 25.0, "gpus": gpus}
    (tmp_path / "bench.json").write_text(json.dumps([row]))
    (tmp_path / "launch.txt").write_text("vllm serve m --pipeline-parallel-size 4")
    answer = explain([tmp_path]).answer
    assert answer["primary"] == "few-requests"
    assert any(fact["text"].startswith("GPU 3 (NVIDIA H100") for fact in answer["facts"])
    (tmp_path / "nvidia-smi.csv").write_text("index, utilization.gpu [%], power.draw [W]\n" + "0, 20 %, 90 W\n" * 3)
    assert len(explain([tmp_path]).situation.evidence.gpus) == 1  # samples say more than means
    (tmp_path / "nvidia-smi.csv").unlink()
    for damaged in ({"gpu": "x"}, {"gpu": 0, "utilisation": "much"}, 7):
        (tmp_path / "bench.json").write_text(json.dumps([{**row, "gpus": [damaged]}]))
        assert not explain([tmp_path]).situation.evidence.gpus


@pytest.mark.parametrize("change", [{"concurrency": None, "request_rate": 4.0}, {"interrupted": True}, {"errors": 3}])
def test_open_loops_and_broken_off_levels_have_an_account_too(change: dict[str, Any], tmp_path: Path) -> None:
    rows = json.loads((FILES / "packed.json").read_text())
    rows[0] |= change
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    assert explain([tmp_path]).answer["primary"] == "packed-slot"


def test_one_stage_has_no_pipeline_to_blame(tmp_path: Path) -> None:
    rows = json.loads((FILES / "packed.json").read_text())
    rows[0]["stages"] = [{"stage": 0, "busy": 0.93, "idle": {"control": 0.05, "no-requests": 0.02}, "host": 0.03}]
    rows[0]["server"] |= {"pp_size": 1, "layers_per_stage": [8]}
    (tmp_path / "bench.json").write_text(json.dumps(rows))
    assert explain([tmp_path]).answer["primary"] == "at-roofline"

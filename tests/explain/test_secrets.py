"""Keys and tokens in evidence never come out again, in no rendering."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fullbore.explain.report.html import page
from fullbore.explain.report.text import print_answer
from fullbore.explain.run import explain
from fullbore.explain.secrets import Masker


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("vllm serve m --api-key correct-horse-battery", "correct-horse-battery"),
        ("vllm serve m --api-key=correct-horse-battery --port 1", "correct-horse-battery"),
        ("HF_TOKEN=hf_abcdefghijklmnop vllm serve m", "hf_abcdefghijklmnop"),
        ("export HUGGING_FACE_HUB_TOKEN=plainvalue123", "plainvalue123"),
        ("Authorization: Bearer abc.def-ghi_123", "abc.def-ghi_123"),
        ("curl -H 'Authorization: Bearer sekret9999' http://x", "sekret9999"),
        ('{"api_key": "correct horse", "port": 3}', "correct horse"),
        ("server_args={'api_key': 'correct-horse', 'admin_api_key': 'other-horse'}", "other-horse"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalrXUtnFEMI"),
        ("AKIAIOSFODNN7EXAMPLE in the log", "AKIAIOSFODNN7EXAMPLE"),
        ("https://user:hunter2222@host/path", "hunter2222"),
        ("sk-proj-abcdef123456 was used", "sk-proj-abcdef123456"),
        ("OPENAI_API_KEY: sk-1234567890", "sk-1234567890"),
        ("token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.SflKxwRJ", "eyJhbGciOiJIUzI1NiJ9"),
        ("--ssl-keyfile-password swordfish77", "swordfish77"),
        ("password: swordfish77", "swordfish77"),
    ],
)
def test_masked(text: str, secret: str) -> None:
    masker = Masker()
    masker.learn(text)
    assert secret not in masker.mask(text)
    assert secret not in Masker().mask(text), "by pattern alone"


@pytest.mark.parametrize(
    "text",
    [
        "#new-token: 128, #cached-token: 0, token usage: 0.02",
        "gen throughput (token/s): 20.43",
        "max_total_num_tokens=8192",
        "--max-num-batched-tokens 4096",
        "--pp-max-micro-batch-size 8",
        "Avg generation throughput: 12.3 tokens/s",
        "api_key=None",
        "'api_key': None, 'port': 1",
        "23.4 tokens/s at concurrency 8",
        "a key fact about API keys",
    ],
)
def test_left_alone(text: str) -> None:
    masker = Masker()
    masker.learn(text)
    assert masker.mask(text) == text


def test_a_learned_value_is_masked_everywhere() -> None:
    masker = Masker()
    masker.learn("--api-key correct-horse")
    assert masker.mask("GET /v1 key correct-horse ok") == "GET /v1 key *** ok"


def test_no_rendering_shows_a_secret(tmp_path: Path) -> None:
    secrets = ["correct-horse-1", "hf_abcdefghijk", "notes-secret-3", "log-secret-4", "info-secret-5", "url-secret-6"]
    (tmp_path / "launch.txt").write_text(
        f"HF_TOKEN={secrets[1]} vllm serve https://me:{secrets[5]}@hub/m --pipeline-parallel-size 4 --api-key "
        f"{secrets[0]}\n"
    )
    (tmp_path / "notes.json").write_text(
        json.dumps({"api_key": secrets[2], "model": f"70B (key {secrets[2]})", "clients": 2})
    )
    (tmp_path / "server.log").write_text(
        f"INFO 03-01 10:00:00 EngineDeadError for Bearer {secrets[3]}: Worker proc 3 died\n"
        "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 "
        "reqs, Waiting: 0 reqs\n"
    )
    (tmp_path / "info.json").write_text(
        json.dumps({"internal_states": [], "pp_size": 4, "model_path": f"/m/{secrets[4]}", "api_key": secrets[4]})
    )
    (tmp_path / f"{secrets[0]}.bin").write_bytes(bytes(range(256)))
    explanation = explain([tmp_path])
    stream = io.StringIO()
    print_answer(explanation.answer, Console(file=stream, width=80))
    rendered = stream.getvalue() + json.dumps(explanation.answer) + page(explanation.situation, explanation.answer)
    for secret in secrets:
        assert secret not in rendered
    assert "***" in rendered

"""Damaged evidence of every kind gives an answer and an exit code, never a traceback."""

from __future__ import annotations

import gzip
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullbore.explain.evidence import batch_sequence
from fullbore.explain.evidence.files import EvidenceFile
from fullbore.explain.evidence.log import LogReadings
from fullbore.explain.report.html import page
from fullbore.explain.run import explain

CASES = sorted((Path(__file__).parent.parent / "data" / "cases").glob("*/"))
EXIT_CODES = {0, 1, 3, 4}
Damage = Callable[[random.Random, bytes], bytes]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randrange(1, 30)):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def junk(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(2000)


def shuffle_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    rng.shuffle(lines)
    return b"\n".join(lines)


def drop_lines(rng: random.Random, data: bytes) -> bytes:
    return b"\n".join(line for line in data.split(b"\n") if rng.random() > 0.3)


def not_available(rng: random.Random, data: bytes) -> bytes:
    return re.sub(rb"\d+", lambda m: b"[N/A]" if rng.random() < 0.1 else m[0], data)


def odd_numbers(rng: random.Random, data: bytes) -> bytes:
    choices = [b"0", b"-1", b"1", b"999999", b"1" + b"0" * 30]
    return re.sub(rb"\d+", lambda m: rng.choice(choices) if rng.random() < 0.15 else m[0], data)


def other_locale(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b",", b";").replace(b".", b",")


def cut_gzip(rng: random.Random, data: bytes) -> bytes:
    packed = gzip.compress(data)
    return packed[: rng.randrange(10, len(packed) + 1)]


def utf16(rng: random.Random, data: bytes) -> bytes:
    return data.decode(errors="replace").encode("utf-16")


def nothing(rng: random.Random, data: bytes) -> bytes:
    return b""


DAMAGES: list[Damage] = [
    cut,
    flip,
    junk,
    shuffle_lines,
    drop_lines,
    not_available,
    odd_numbers,
    other_locale,
    cut_gzip,
    utf16,
    nothing,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damaged_case(case: Path, damage: Damage, tmp_path: Path) -> None:
    rng = random.Random(f"{case.name} {damage.__name__}")
    for file in case.iterdir():
        if file.name != "expected.json":
            data = file.read_bytes()
            is_damaged = rng.random() < 0.7
            (tmp_path / file.name).write_bytes(damage(rng, data) if is_damaged else data)
    explanation = explain([tmp_path])
    assert explanation.exit_code in EXIT_CODES
    assert not any("failed on these values" in problem for problem in explanation.answer["problems"])
    assert page(explanation.situation, explanation.answer).endswith("</html>\n")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        b"[]",
        b"{}",
        b"[[[[[[",
        b"[" * 100_000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"null",
        b'"text"',
        b'{"traceEvents": [',
        b'{"traceEvents": [{"ph": "X"}, {"ph": 1}, 7, {"ph": "X", "ts": "x", "dur": null, "cat": "kernel", "name": 3}]}',  # noqa: E501
        b'{"pp_size": "many", "model": 3, "internal_states": [null]}',
        b'{"internal_states": {}, "stages": [1, {"layers": [3]}]}',
        b'{"window_s": "x", "stages": [{"seconds": {"compute": "y"}}]}',
        b'[{"concurrency": 0, "output_tok_s": 0, "itl_ms_mean": 0}, {"concurrency": -4, "output_tok_s": -1}]',
        b'{"gpus": -3, "num_hidden_layers": 0, "stage_ms": [0, 0], "step_period_ms": 0, "clients": -1, "single_gpu_tok_s": 0}',  # noqa: E501
        b"index, name, utilization.gpu [%]\n,,\n0\n0, x, y, z, w\n",
        b"# gpu pwr sm\n# Idx W %\n - - -\n 0 - 4\n x 1 1\n",
        b"vllm serve --pipeline-parallel-size --max-num-seqs 0 'unclosed",
        b"vllm serve m --pipeline-parallel-size 0 --tensor-parallel-size -1",
        b"vllm serve m --pipeline-parallel-size 999999999999999999999",
        b"[2026-13-99 99:99:99 PP99999999] Decode batch, #running-req: , #token: x",
        b"Engine 000: Avg prompt throughput: 1 tokens/s, Avg generation throughput: 9.9.9 tokens/s, Running: 1 reqs, Waiting: 1 reqs",  # noqa: E501
        b'vllm:num_requests_running{engine="0"} NaN\nvllm:generation_tokens_total{engine="0"} +Inf\n',
        b"\x1f\x8b\x08\x00garbage",
        b"PK\x03\x04zip",
        b"\x00" * 4096,
        "日志 [2026-03-01 10:00:00 PP0] Decode batch, #running-req: 4".encode("gbk"),
    ],
)
def test_odd_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "evidence").write_bytes(content)
    explanation = explain([tmp_path])
    assert explanation.exit_code in {3, 4}
    assert len(explanation.answer["recognised"]) == 1


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 500)[:30])
    recognised = explain([tmp_path]).answer["recognised"]
    assert not recognised[0]["used"]
    assert "damaged" in recognised[0]["remark"]


def _decode_lines(count: int) -> Iterator[tuple[int, str]]:
    for n in range(count):
        yield (
            n,
            (
                f"[2026-03-01 10:{n // 60 % 60:02d}:{n % 60:02d} PP{n % 2}] Decode batch, #running-req: 4, #token: "
                f"{n}, token usage: 0.05, "
                f"cuda graph: True, gen throughput (token/s): {n % 977}.43, #queue-req: 0"
            ),
        )


def test_log_is_read_in_constant_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sequence, "KEPT", 300)

    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        LogReadings().read(_decode_lines(count), "server.log")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)  # imports and caches
    assert peak_bytes(20_000) < 1.3 * peak_bytes(5000)


def test_overlong_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_text("x" * 3_000_000 + "\nsecond\n")
    lines = list(EvidenceFile(path, "long").lines())
    assert [number for number, _ in lines] == [1, 2]
    assert len(lines[0][1]) == 1 << 20
    assert lines[1][1] == "second"

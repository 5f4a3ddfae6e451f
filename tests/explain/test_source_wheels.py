"""`fullbore source` on two released SGLang wheels: the exact lines, and no occurrence of a name left unexplained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fullbore.explain.source import Package, Study, open_package, study

pytestmark = pytest.mark.slow
MIXIN = "sglang/srt/managers/scheduler_pp_mixin.py"
LOOPS = ["event_loop_pp", "event_loop_pp_disagg_prefill", "event_loop_pp_disagg_decode"]


def download(version: str, folder: Path) -> Package:
    """The package from its wheel; skips the test when the package index cannot be reached."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        result = subprocess.run(
            [*command, "--retries=1", "--dest", str(folder), f"sglang=={version}"],
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"offline? pip download sglang=={version} took more than 240 s")
    wheels = list(folder.glob(f"sglang-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"offline: pip download sglang=={version} failed: {result.stderr.strip()[-200:]}")
    return open_package(str(wheels[0]))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return download("0.5.11", tmp_path_factory.mktemp("older"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return download("0.5.23", tmp_path_factory.mktemp("newer"))


def lines(found: Study, role: str | None = None, function: str | None = None) -> list[int]:
    return [
        place.line
        for place in found.places
        if place.file == MIXIN and role in (None, place.role) and function in (None, place.function)
    ]


def test_depth_in_0_5_11(older: Package) -> None:
    found = study(older, "--pp-async-batch-depth")
    assert found.version == "0.5.11"
    assert lines(found) == [102, 117, 242, 257, 395, 412, 523]
    assert [lines(found, "guards", loop) for loop in LOOPS] == [[102, 117], [242, 257], [395, 412]]
    assert lines(found, "sizes") == [523]
    (ring,) = found.derived
    assert ring.expression == "self.pp_size + self.server_args.pp_async_batch_depth"
    assert {"self.mbs", "self.running_mbs", "self.last_mbs"} <= {use.into for use in ring.uses if use.role == "sizes"}
    text = "\n".join(found.summary)
    assert "3 functions fork on pp_async_batch_depth" in text
    assert "_pp_launch_batch" in text.split("It decides the order")[1]


def test_depth_in_0_5_23_decides_in_a_helper(newer: Package) -> None:
    found = study(newer, "pp_async_batch_depth")
    assert found.version == "0.5.23"
    assert lines(found, function="_pp_exchange_outputs_before_forward") == [72, 77]
    assert lines(found, "guards", "_pp_exchange_outputs_before_forward") == [77]
    assert 166 in lines(found, "passes on", "event_loop_pp")
    assert lines(found, "guards", "event_loop_pp") == [168, 184]
    assert lines(found, "guards", "event_loop_pp_disagg_prefill") == [301, 319]
    assert lines(found, "guards", "event_loop_pp_disagg_decode") == [438, 456]
    assert lines(found, "sizes") == [562, 563]


def test_micro_batch_cap_is_defaulted_checked_and_used(older: Package, newer: Package) -> None:
    old = {
        (place.file.rpartition("/")[2], place.line): place.role
        for place in study(older, "pp_max_micro_batch_size").places
    }
    assert old["scheduler.py", 730] == "defaults"
    assert old["scheduler.py", 2541] == "derives"
    assert old["scheduler.py", 3412] == "validates"
    assert old["server_args.py", 6780] == "validates"
    new = {
        (place.file.rpartition("/")[2], place.line): place.role
        for place in study(newer, "pp_max_micro_batch_size").places
    }
    assert new["scheduler.py", 1240] == "defaults"
    assert new["scheduler.py", 4034] == "derives"
    assert new["validation_hook.py", 183] == "validates"


@pytest.mark.parametrize(
    "flag",
    [
        *("pp_async_batch_depth", "pp_max_micro_batch_size", "enable_dynamic_chunking", "SGLANG_PP_LAYER_PARTITION"),
        *("disable_cuda_graph", "chunked_prefill_size"),
    ],
)
def test_every_line_with_the_name_is_listed_or_explained(older: Package, newer: Package, flag: str) -> None:
    for package in (older, newer):
        found = study(package, flag)
        uses = [*found.places, *(use for derived in found.derived for use in derived.uses)]
        accounted = {(each.file, each.line) for each in (*uses, *found.derived, *found.mentions)}
        word = re.compile(rb"(?<!\w)" + flag.encode() + rb"(?!\w)")
        occurring = {
            (file, number)
            for file, data in package.files.items()
            for number, line in enumerate(data.splitlines(), 1)
            if word.search(line)
        }
        assert occurring - accounted == set()

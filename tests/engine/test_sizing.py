from __future__ import annotations

import pytest

from fullbore.config import EngineConfig
from fullbore.engine.messages import Loaded
from fullbore.engine.sizing import check_weights_fit, num_kv_blocks
from fullbore.errors import OutOfMemoryError

GIB = 1 << 30
MIB = 1 << 20


def loaded(stage: int, kv_block_bytes: int, free_bytes: int) -> Loaded:
    return Loaded(stage, 100 + stage, 0, kv_block_bytes, free_bytes)


def test_stages_of_one_host_share_its_memory() -> None:
    reports = [loaded(0, 2 * MIB, 11 * GIB), loaded(1, 1 * MIB, 10 * GIB)]
    blocks = num_kv_blocks(EngineConfig(pp_size=2), reports, ["cpu", "cpu"], 32_768)
    assert blocks == int(0.3 * 10 * GIB) // (3 * MIB)


def test_smallest_gpu_decides() -> None:
    reports = [loaded(0, 2 * MIB, 10 * GIB), loaded(1, 1 * MIB, 4 * GIB)]
    blocks = num_kv_blocks(EngineConfig(pp_size=2), reports, ["cuda:0", "cuda:1"], 131_072)
    assert blocks == int(0.85 * 4 * GIB) // (1 * MIB)


def test_never_more_than_all_running_requests_can_use() -> None:
    config = EngineConfig(max_running_requests=3, page_size=16)
    assert num_kv_blocks(config, [loaded(0, 1024, 10 * GIB)], ["cpu"], 1000) == 3 * 63


def test_user_says_how_much() -> None:
    reports = [loaded(0, 1 * MIB, 2 * GIB)]
    assert num_kv_blocks(EngineConfig(max_total_tokens=1024), reports, ["cpu"], 4096) == 64
    assert num_kv_blocks(EngineConfig(mem_fraction_static=0.5), reports, ["cpu"], 100_000) == 1024
    assert num_kv_blocks(EngineConfig(max_total_tokens=1), reports, ["cpu"], 4096) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 16 * 4096}, r"65536 tokens needs 4.0 GiB .*stages 0, 1.*: 2.0 GiB are missing"),
        ({"context_length": 16 * 1024}, r"16384 tokens needs 1.0 GiB .*may use 614.4 MiB"),
        ({"mem_fraction_static": 0.001}, r"256 tokens"),
    ],
)
def test_too_little_memory_says_how_much_is_missing(settings: dict[str, int], message: str) -> None:
    reports = [loaded(stage, 512 * 1024, 2 * GIB) for stage in range(2)]
    with pytest.raises(OutOfMemoryError, match=message):
        num_kv_blocks(
            EngineConfig(pp_size=2, **settings), reports, ["cpu", "cpu"], settings.get("context_length", 8192)
        )


def test_weights_are_checked_before_loading() -> None:
    check_weights_fit([3 * GIB, 4 * GIB], [8 * GIB, 8 * GIB], ["cpu", "cpu"])
    check_weights_fit([7 * GIB, 7 * GIB], [8 * GIB, 8 * GIB], ["cuda:0", "cuda:1"])
    with pytest.raises(OutOfMemoryError, match=r"stages 0, 1 need 14.0 GiB on cpu but 8.0 GiB are free: 6.0 GiB"):
        check_weights_fit([7 * GIB, 7 * GIB], [8 * GIB, 8 * GIB], ["cpu", "cpu"])
    with pytest.raises(OutOfMemoryError, match=r"stage 1 need 9.0 GiB on cuda:1"):
        check_weights_fit([7 * GIB, 9 * GIB], [8 * GIB, 8 * GIB], ["cuda:0", "cuda:1"])

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullbore.engine.transport import LoopbackTransport, MessageFormat, PeerLostError, WrongMessageError

PEER = Path(__file__).parent / "transport_peer.py"


def message_of(message_format: MessageFormat, micro_batch_id: int, hidden: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(message_format.num_bytes(len(hidden)), dtype=torch.uint8)
    return message_format.write(buffer, micro_batch_id, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_message_carries_rows(dtype: torch.dtype, num_tokens: int) -> None:
    message_format = MessageFormat(6, dtype)
    hidden = torch.randn((num_tokens, 6)).to(dtype)
    message = message_of(message_format, 3, hidden)
    assert torch.equal(message_format.read(message, 3, num_tokens), hidden)


def test_wrong_micro_batch_is_an_error_naming_both() -> None:
    message_format = MessageFormat(4, torch.float32)
    message = message_of(message_format, 41, torch.zeros((2, 4)))
    with pytest.raises(WrongMessageError, match=r"micro-batch 42 .*micro-batch 41 "):
        message_format.read(message, 42, 2)


@pytest.mark.parametrize(
    ("other", "num_tokens"),
    [(MessageFormat(4, torch.bfloat16), 2), (MessageFormat(8, torch.float32), 2), (MessageFormat(4, torch.float32), 3)],
    ids=["dtype", "hidden size", "tokens"],
)
def test_wrong_shape_is_an_error(other: MessageFormat, num_tokens: int) -> None:
    message = message_of(other, 1, torch.zeros((num_tokens, other.hidden_size), dtype=other.dtype))
    with pytest.raises(WrongMessageError, match="micro-batch 1 "):
        MessageFormat(4, torch.float32).read(message, 1, 2)


def test_garbage_is_an_error() -> None:
    message_format = MessageFormat(4, torch.float32)
    with pytest.raises(WrongMessageError, match="not a fullbore message"):
        message_format.read(torch.zeros(message_format.num_bytes(1), dtype=torch.uint8), 1, 1)


def test_stage_that_makes_another_dtype_is_found_out_when_sending() -> None:
    with pytest.raises(WrongMessageError, match="Micro-batch 5"):
        message_of(MessageFormat(4, torch.float32), 5, torch.zeros((1, 4), dtype=torch.float16))


def test_loopback_checks_as_the_real_one_does() -> None:
    first, second = LoopbackTransport(4, torch.float32), LoopbackTransport(4, torch.float32)
    first.link(second)
    received = second.post_receive(0, 2)
    with pytest.raises(PeerLostError, match="Micro-batch 0"):
        received.wait()
    first.send(0, torch.ones((2, 4)))
    first.send(1, torch.ones((2, 4)))
    hidden = received.wait()
    assert torch.equal(hidden, torch.ones((2, 4)))
    received.release()
    assert hidden.isnan().all(), "rows must not be used after release"
    with pytest.raises(WrongMessageError, match=r"micro-batch 7 .*micro-batch 1 "):
        second.post_receive(7, 2).wait()


def run_peers(folder: Path, scenario: str, kind: str = "gloo") -> str:
    """Runs both ends as processes; returns what the receiver printed."""
    command = [sys.executable, str(PEER)]
    sender = subprocess.Popen([*command, "0", str(folder / "rendezvous"), scenario, kind])
    receiver = subprocess.Popen(
        [*command, "1", str(folder / "rendezvous"), scenario, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = receiver.communicate(timeout=120)
        sender.wait(timeout=30)
    finally:
        for process in (sender, receiver):
            process.kill()
            process.wait()
    assert receiver.returncode == 0, errors
    return output


def test_many_messages_in_flight_between_processes(tmp_path: Path) -> None:
    assert run_peers(tmp_path, "many") == "received all\n"


def test_wrong_micro_batch_between_processes(tmp_path: Path) -> None:
    # 22 tokens arrive where 1 was planned: gloo alone would end the process.
    output = run_peers(tmp_path, "wrong")
    assert "micro-batch 8 (1 tokens" in output
    assert "micro-batch 7 (22 tokens" in output


def test_lost_neighbour_between_processes(tmp_path: Path) -> None:
    assert run_peers(tmp_path, "nothing").startswith("Stage 1 lost the connection to stage 0")

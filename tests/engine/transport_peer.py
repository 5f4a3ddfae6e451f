"""One end of a two-stage transport, run as a process of its own: `transport_peer.py STAGE RENDEZVOUS SCENARIO KIND`.

KIND is gloo, or nccl for the transport between GPUs, with gloo in NCCL's place.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from stream_model import StreamModel

from fullbore.engine.nccl_transport import NcclTransport
from fullbore.engine.transport import PeerLostError, TorchTransport, WrongMessageError

HIDDEN_SIZE = 24
MANY = 60


def rows(micro_batch_id: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(micro_batch_id)
    num_tokens = 1 + micro_batch_id * 7 % 40  # up to 40, more than the buffers of 32 rows hold
    return torch.randn((num_tokens, HIDDEN_SIZE), generator=generator).to(dtype)


def send_many(transport: TorchTransport | NcclTransport) -> None:
    for micro_batch_id in range(MANY):
        transport.send(micro_batch_id, rows(micro_batch_id))
    transport.close()


def receive_many(transport: TorchTransport | NcclTransport) -> None:
    posted = {k: transport.post_receive(k, len(rows(k))) for k in range(5)}
    for micro_batch_id in range(MANY):
        received = posted.pop(micro_batch_id)
        assert torch.equal(received.wait(), rows(micro_batch_id)), micro_batch_id
        received.release()
        ahead = micro_batch_id + 5
        if ahead < MANY:
            posted[ahead] = transport.post_receive(ahead, len(rows(ahead)))
    transport.close()
    print("received all")


def send_wrong(transport: TorchTransport | NcclTransport) -> None:
    transport.send(7, rows(3)).wait()


def receive_wrong(transport: TorchTransport | NcclTransport) -> None:
    try:
        transport.post_receive(8, 1).wait()
    except WrongMessageError as error:
        print(error)


def send_nothing(transport: TorchTransport | NcclTransport) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def receive_nothing(transport: TorchTransport | NcclTransport) -> None:
    try:
        transport.post_receive(0, 1).wait()
    except PeerLostError as error:
        print(error)


def main() -> None:
    stage, rendezvous, scenario, kind = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    ends: dict[str, Any] = {
        "stage": stage,
        "num_stages": 2,
        "hidden_size": HIDDEN_SIZE,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "max_tokens": 32,
    }
    transport: TorchTransport | NcclTransport
    if kind == "nccl":
        transport = NcclTransport(**ends, streams=StreamModel())
        transport.connect(rendezvous, "gloo")
    else:
        transport = TorchTransport(**ends)
        transport.connect(rendezvous)
    globals()[("send_" if stage == 0 else "receive_") + scenario](transport)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

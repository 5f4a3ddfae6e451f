"""Hidden states between stages on different GPUs: NCCL, on a stream of its own.

What a GPU does goes by two queues, streams: compute and transfer. Work in one does not wait for the other unless told
to, so that a transfer passes while the stage computes; it is told at four places, by events ("marks"):

- a message is sent once compute has written it, and its buffer written again once it has left;
- rows are read once they have arrived, and their buffer filled again once compute has read it.

NCCL needs two different GPUs. Stages on one GPU exchange hidden states through the host's memory; see transport.py.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullbore.engine.transport import (
    MessageFormat,
    OutstandingSends,
    Received,
    Sent,
    guarded,
    join_process_group,
    ping_neighbours,
)


class Mark(Protocol):
    """A point in a stream. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Blocks until the stream has got there."""
        ...


class Streams(Protocol):
    """The two streams of a stage."""

    def on_transfer(self) -> AbstractContextManager[Any]:
        """What is launched inside goes to the transfer stream, everything else to the compute stream."""
        ...

    def mark_compute(self) -> Mark:
        """Where the compute stream's work so far ends."""
        ...

    def mark_transfer(self) -> Mark: ...

    def compute_after(self, mark: Mark) -> None:
        """The compute stream's later work waits for the mark."""
        ...

    def transfer_after(self, mark: Mark) -> None: ...


class CudaStreams:
    """Compute is the device's current stream, transfer a new one."""

    def __init__(self, device: torch.device) -> None:
        self._compute: Any = torch.cuda.current_stream(device)
        self._transfer: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_transfer(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._transfer)

    def mark_compute(self) -> Mark:
        mark: Mark = self._compute.record_event()
        return mark

    def mark_transfer(self) -> Mark:
        mark: Mark = self._transfer.record_event()
        return mark

    def compute_after(self, mark: Mark) -> None:
        self._compute.wait_event(mark)

    def transfer_after(self, mark: Mark) -> None:
        self._transfer.wait_event(mark)


class MarkedBuffers:
    """Message buffers, reused; each comes with the mark after which it may be."""

    def __init__(self, message_format: MessageFormat, max_tokens: int, device: torch.device) -> None:
        self._format = message_format
        self._num_bytes = message_format.num_bytes(max_tokens)
        self._device = device
        self._free: deque[tuple[torch.Tensor, Mark]] = deque()

    def take(self, num_tokens: int) -> tuple[torch.Tensor, Mark | None]:
        num_bytes = self._format.num_bytes(num_tokens)
        if num_bytes <= self._num_bytes and self._free:
            return self._free.popleft()
        return torch.empty(max(num_bytes, self._num_bytes), dtype=torch.uint8, device=self._device), None

    def give_back(self, buffer: torch.Tensor, mark: Mark) -> None:
        if buffer.numel() == self._num_bytes:
            self._free.append((buffer, mark))
        else:  # larger than usual: freed, which must not happen under a stream that uses it
            mark.synchronize()


class _NcclReceived:
    def __init__(self, transport: NcclTransport, micro_batch_id: int, num_tokens: int) -> None:
        self._transport = transport
        self._micro_batch_id = micro_batch_id
        self._num_tokens = num_tokens
        self._peer = transport.stage - 1
        self._buffer, read = transport.receive_buffers.take(num_tokens)
        if read is not None:
            transport.streams.transfer_after(read)
        rows = self._buffer[: transport.message_format.num_bytes(num_tokens)]  # both ends must name the same size
        with transport.streams.on_transfer():
            self._work = guarded(transport.stage, self._peer, lambda: dist.irecv(rows, src=self._peer))

    def wait(self) -> torch.Tensor:
        streams = self._transport.streams
        with streams.on_transfer():
            guarded(self._transport.stage, self._peer, self._work.wait)
        arrived = streams.mark_transfer()
        arrived.synchronize()  # not needed for the order, but for true times of waiting
        streams.compute_after(arrived)
        return self._transport.message_format.read(self._buffer, self._micro_batch_id, self._num_tokens)

    def release(self) -> None:
        self._transport.receive_buffers.give_back(self._buffer, self._transport.streams.mark_compute())


class _NcclSent:
    def __init__(self, transport: NcclTransport, micro_batch_id: int, hidden: torch.Tensor) -> None:
        self._transport = transport
        self._peer = transport.stage + 1
        self._buffer, left = transport.send_buffers.take(hidden.shape[0])
        if left is not None:
            transport.streams.compute_after(left)
        message = transport.message_format.write(self._buffer, micro_batch_id, hidden)
        transport.streams.transfer_after(transport.streams.mark_compute())
        with transport.streams.on_transfer():
            self._work = guarded(transport.stage, self._peer, lambda: dist.isend(message, dst=self._peer))
        self._is_waited_for = False

    def wait(self) -> None:
        if self._is_waited_for:
            return
        self._is_waited_for = True
        with self._transport.streams.on_transfer():
            guarded(self._transport.stage, self._peer, self._work.wait)
        self._transport.send_buffers.give_back(self._buffer, self._transport.streams.mark_transfer())


class NcclTransport:
    """See `Transport`. `Sent.wait` returns at once: later work on the buffer is ordered behind the send."""

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        streams: Streams,
    ) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self.streams = streams
        self.message_format = MessageFormat(hidden_size, dtype)
        self.receive_buffers = MarkedBuffers(self.message_format, max_tokens, device)
        self.send_buffers = MarkedBuffers(self.message_format, max_tokens, device)
        self._device = device
        self._outstanding = OutstandingSends(num_stages)

    def connect(self, rendezvous_file: Path, backend: str = "nccl") -> None:
        """Meets the other stages and exchanges a ping with the neighbours, which makes NCCL connect them.

        No device is named to NCCL: it would then send and receive in one queue, and a receive that is posted would hold
        up a send.
        """
        join_process_group(backend, rendezvous_file, self.stage, self.num_stages)
        shape = (0, self.message_format.hidden_size)
        empty = torch.empty(shape, dtype=self.message_format.dtype, device=self._device)
        ping_neighbours(self, self.stage, self.num_stages, empty)
        self.streams.mark_transfer().synchronize()

    def post_receive(self, micro_batch_id: int, num_tokens: int) -> Received:
        return _NcclReceived(self, micro_batch_id, num_tokens)

    def send(self, micro_batch_id: int, hidden: torch.Tensor) -> Sent:
        self._outstanding.make_room()
        sent = _NcclSent(self, micro_batch_id, hidden)
        self._outstanding.add(sent)
        return sent

    def close(self) -> None:
        self._outstanding.wait()
        self.streams.mark_transfer().synchronize()
        if dist.is_initialized():
            dist.destroy_process_group()

"""How hidden states go from one stage to the next.

One message per hop: a fixed header, then the rows. The receiver knows from the plan what must come; the header says
what did come, so that a mix-up is an error naming both micro-batches and never a wrong answer.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullbore.errors import EngineDeadError

HEADER_BYTES = 64  # one cache line: the rows behind it stay aligned
PING_ID = -1  # sent once between neighbours at start, so that the first request does not pay for connecting

_HEADER = struct.Struct("<4sIqqq")  # magic, dtype code, micro-batch id, tokens, hidden size
_MAGIC = b"fbmb"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FOREVER = timedelta(days=365)  # the driver decides what is stuck, not a timeout in here


class WrongMessageError(EngineDeadError):
    """Other hidden states arrived than the plan says."""


class PeerLostError(EngineDeadError):
    """The connection to a neighbour broke; the neighbour, not this stage, is likely the culprit."""


class Received(Protocol):
    """Hidden states on their way in."""

    def wait(self) -> torch.Tensor:
        """Blocks until they are here. Returns [num_tokens, hidden_size], valid until `release`.

        Raises:
            WrongMessageError: another micro-batch, size or dtype arrived.
            PeerLostError: the previous stage is gone.
        """
        ...

    def release(self) -> None:
        """The rows are used up; their buffer may be filled again."""
        ...


class Sent(Protocol):
    """Hidden states on their way out."""

    def wait(self) -> None:
        """Blocks until the next stage has them. Raises PeerLostError."""
        ...


class Transport(Protocol):
    """One stage's two ends: from the previous stage and to the next one. Micro-batches pass in order."""

    def post_receive(self, micro_batch_id: int, num_tokens: int) -> Received:
        """Makes ready for this micro-batch; data may flow in while the stage computes something else."""
        ...

    def send(self, micro_batch_id: int, hidden: torch.Tensor) -> Sent:
        """Copies `hidden` ([num_tokens, hidden_size]) and starts sending it; `hidden` may be reused at once."""
        ...

    def close(self) -> None:
        """Waits for what is still being sent. All stages close together."""
        ...


# ---------------------------------------------------------------------------------------------- message and buffers


class MessageFormat:
    """Writes and checks messages of one hidden size and dtype."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self._dtype_code = _DTYPES.index(dtype)
        self._row_bytes = hidden_size * dtype.itemsize

    def num_bytes(self, num_tokens: int) -> int:
        return HEADER_BYTES + num_tokens * self._row_bytes

    def rows(self, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The message's rows as a view of the buffer: [num_tokens, hidden_size]."""
        payload = buffer[HEADER_BYTES : self.num_bytes(num_tokens)]
        return payload.view(self.dtype).view(num_tokens, self.hidden_size)

    def write(self, buffer: torch.Tensor, micro_batch_id: int, hidden: torch.Tensor) -> torch.Tensor:
        """Fills `buffer` (uint8) and returns the part of it to send."""
        if hidden.dtype != self.dtype or hidden.shape[1:] != (self.hidden_size,):
            raise WrongMessageError(
                f"Micro-batch {micro_batch_id}: the stage made hidden states of {hidden.dtype} {tuple(hidden.shape)}, "
                f"but {self.dtype} with {self.hidden_size} columns are agreed."
            )
        num_tokens = hidden.shape[0]
        header = bytearray(HEADER_BYTES)
        _HEADER.pack_into(header, 0, _MAGIC, self._dtype_code, micro_batch_id, num_tokens, self.hidden_size)
        buffer[:HEADER_BYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
        self.rows(buffer, num_tokens).copy_(hidden)
        return buffer[: self.num_bytes(num_tokens)]

    def read(self, buffer: torch.Tensor, micro_batch_id: int, num_tokens: int) -> torch.Tensor:
        """Checks the message in `buffer` and returns its rows.

        Raises:
            WrongMessageError: it is not the expected one.
        """
        header = buffer[:HEADER_BYTES].cpu().numpy().tobytes()
        found = _HEADER.unpack_from(header)
        expected = (_MAGIC, self._dtype_code, micro_batch_id, num_tokens, self.hidden_size)
        if found != expected:
            raise WrongMessageError(_explain_mismatch(found, expected))
        return self.rows(buffer, num_tokens)


def _explain_mismatch(found: tuple[Any, ...], expected: tuple[Any, ...]) -> str:
    if found[0] != _MAGIC:
        return f"Expected micro-batch {expected[2]} but received something that is not a fullbore message."
    parts = [
        f"micro-batch {header[2]} ({header[3]} tokens, hidden size {header[4]}, dtype code {header[1]})"
        for header in (expected, found)
    ]
    return f"Expected {parts[0]} from the previous stage but received {parts[1]}."


class BufferPool:
    """Message buffers in the host's memory, reused. All have room for `max_tokens` rows; a larger message gets a buffer
    that is not kept.

    Args:
        is_pinned: rows go to and from a GPU; pages that stay in place are copied faster.
    """

    def __init__(self, message_format: MessageFormat, max_tokens: int, is_pinned: bool = False) -> None:
        self._format = message_format
        self._num_bytes = message_format.num_bytes(max_tokens)
        self._is_pinned = is_pinned
        self._free: list[torch.Tensor] = []

    def take(self, num_tokens: int) -> torch.Tensor:
        num_bytes = self._format.num_bytes(num_tokens)
        if num_bytes <= self._num_bytes and self._free:
            return self._free.pop()
        return torch.empty(max(num_bytes, self._num_bytes), dtype=torch.uint8, pin_memory=self._is_pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        if buffer.numel() == self._num_bytes:
            self._free.append(buffer)


# ------------------------------------------------------------------------------------------------ torch.distributed


class _TorchReceived:
    def __init__(self, transport: TorchTransport, micro_batch_id: int, num_tokens: int) -> None:
        self._transport = transport
        self._micro_batch_id = micro_batch_id
        self._num_tokens = num_tokens
        self._buffer = transport.receive_buffers.take(num_tokens)
        # gloo ends the process when a message is longer than the buffer but takes a shorter one, so the whole buffer is
        # offered and the header decides.
        self._peer = transport.stage - 1
        self._work = guarded(transport.stage, self._peer, lambda: dist.irecv(self._buffer, src=self._peer))

    def wait(self) -> torch.Tensor:
        guarded(self._transport.stage, self._peer, self._work.wait)
        rows = self._transport.message_format.read(self._buffer, self._micro_batch_id, self._num_tokens)
        return rows.to(self._transport.device)

    def release(self) -> None:
        self._transport.receive_buffers.give_back(self._buffer)


class _TorchSent:
    def __init__(self, transport: TorchTransport, micro_batch_id: int, hidden: torch.Tensor) -> None:
        self._transport = transport
        self._buffer: torch.Tensor | None = transport.send_buffers.take(hidden.shape[0])
        message = transport.message_format.write(self._buffer, micro_batch_id, hidden)
        self._peer = transport.stage + 1
        self._work = guarded(transport.stage, self._peer, lambda: dist.isend(message, dst=self._peer))

    def wait(self) -> None:
        if self._buffer is not None:
            guarded(self._transport.stage, self._peer, self._work.wait)
            self._transport.send_buffers.give_back(self._buffer)
            self._buffer = None


def guarded(stage: int, peer: int, action: Callable[[], Any]) -> Any:
    """Does something with torch.distributed. Raises PeerLostError where it fails."""
    try:
        return action()
    except RuntimeError as error:
        raise PeerLostError(f"Stage {stage} lost the connection to stage {peer}: {error}") from error


def join_process_group(backend: str, rendezvous_file: Path, stage: int, num_stages: int) -> None:
    """Meets the other stages through a file in the private run folder."""
    store = dist.FileStore(str(rendezvous_file), num_stages)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=stage, world_size=num_stages, timeout=_FOREVER)


def ping_neighbours(transport: Transport, stage: int, num_stages: int, empty: torch.Tensor) -> None:
    """Receives a ping from the stage before, sends one to the stage after. `empty`: hidden states of no tokens."""
    if stage > 0:
        ping = transport.post_receive(PING_ID, 0)
        ping.wait()
        ping.release()
    if stage < num_stages - 1:
        transport.send(PING_ID, empty).wait()


def max_outstanding_sends(num_stages: int) -> int:
    """Beyond the in-flight limit the oldest send has surely been received, so waiting for it takes no time."""
    return 2 * num_stages + 4


class OutstandingSends:
    """Waits for the oldest sends, whose buffers are free then."""

    def __init__(self, num_stages: int) -> None:
        self._sends: deque[Sent] = deque()
        self._most = max_outstanding_sends(num_stages)

    def make_room(self) -> None:
        while len(self._sends) >= self._most:
            self._sends.popleft().wait()

    def add(self, sent: Sent) -> None:
        self._sends.append(sent)

    def wait(self) -> None:
        while self._sends:
            self._sends.popleft().wait()


class TorchTransport:
    """`torch.distributed` point-to-point by gloo: between CPU stages, and through the host's memory between stages that
    share a GPU, which NCCL cannot serve.

    Args:
        device: of the hidden states.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self.device = device
        self.message_format = MessageFormat(hidden_size, dtype)
        self.receive_buffers = BufferPool(self.message_format, max_tokens, is_pinned=device.type == "cuda")
        self.send_buffers = BufferPool(self.message_format, max_tokens, is_pinned=device.type == "cuda")
        self._outstanding = OutstandingSends(num_stages)

    def connect(self, rendezvous_file: Path) -> None:
        """Meets the other stages and exchanges a ping with the neighbours."""
        join_process_group("gloo", rendezvous_file, self.stage, self.num_stages)
        empty = torch.empty((0, self.message_format.hidden_size), dtype=self.message_format.dtype)
        ping_neighbours(self, self.stage, self.num_stages, empty)

    def post_receive(self, micro_batch_id: int, num_tokens: int) -> Received:
        return _TorchReceived(self, micro_batch_id, num_tokens)

    def send(self, micro_batch_id: int, hidden: torch.Tensor) -> Sent:
        self._outstanding.make_room()
        sent = _TorchSent(self, micro_batch_id, hidden)
        self._outstanding.add(sent)
        return sent

    def close(self) -> None:
        self._outstanding.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------- loopback


class LoopbackTransport:
    """The same messages and checks between stages that live in one process. `link` joins two neighbours."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.message_format = MessageFormat(hidden_size, dtype)
        self.inbox: deque[torch.Tensor] = deque()
        self._next: LoopbackTransport | None = None

    def link(self, next_stage: LoopbackTransport) -> None:
        self._next = next_stage

    def post_receive(self, micro_batch_id: int, num_tokens: int) -> Received:
        return _LoopbackReceived(self, micro_batch_id, num_tokens)

    def send(self, micro_batch_id: int, hidden: torch.Tensor) -> Sent:
        assert self._next is not None, "the last stage has no next stage"
        buffer = torch.empty(self.message_format.num_bytes(hidden.shape[0]), dtype=torch.uint8)
        self.message_format.write(buffer, micro_batch_id, hidden)
        self._next.inbox.append(buffer)
        return _LoopbackSent()


class _LoopbackReceived:
    def __init__(self, transport: LoopbackTransport, micro_batch_id: int, num_tokens: int) -> None:
        self._transport = transport
        self._micro_batch_id = micro_batch_id
        self._num_tokens = num_tokens
        self._buffer: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if not self._transport.inbox:
            raise PeerLostError(f"Micro-batch {self._micro_batch_id} was not sent by the previous stage.")
        self._buffer = self._transport.inbox.popleft()
        return self._transport.message_format.read(self._buffer, self._micro_batch_id, self._num_tokens)

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer.fill_(0xFF)  # NaN in every dtype: a stage that still uses the rows is found out
            self._buffer = None


class _LoopbackSent:
    def wait(self) -> None:
        pass

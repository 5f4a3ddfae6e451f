"""The transport between GPUs without a GPU: gloo in NCCL's place, and a model of streams that finds races."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from stream_model import Mark, StreamModel
from test_transport import run_peers

from fullbore.config import EngineConfig
from fullbore.engine import nccl_transport
from fullbore.engine.messages import StageSetup
from fullbore.engine.nccl_transport import CudaStreams, NcclTransport
from fullbore.engine.placement import choose_transport
from fullbore.engine.run_dir import rendezvous_file
from fullbore.engine.sleep_runner import SleepRunner
from fullbore.engine.stage_process import DriverLink, Stage
from fullbore.engine.transport import MessageFormat, TorchTransport, max_outstanding_sends

HIDDEN_SIZE = 4


def test_nccl_only_where_every_stage_has_a_gpu_of_its_own() -> None:
    assert choose_transport(["cuda:0", "cuda:1", "cuda:2"]) == "nccl"
    assert choose_transport(["cuda:0", "cuda:0"]) == "gloo"
    assert choose_transport(["cuda:0", "cuda:1", "cuda:0"]) == "gloo"
    assert choose_transport(["cpu", "cpu"]) == "gloo"


@pytest.mark.parametrize(("kind", "expected"), [("nccl", NcclTransport), ("gloo", TorchTransport)])
def test_a_stage_takes_the_transport_it_is_told(
    kind: Any, expected: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = []
    for each in (NcclTransport, TorchTransport):
        monkeypatch.setattr(each, "connect", lambda self, rendezvous: connected.append((self, rendezvous)))
    monkeypatch.setattr(nccl_transport, "CudaStreams", lambda device: StreamModel())
    setup = StageSetup(
        config=EngineConfig(pp_size=2),
        model_path="somewhere",
        stage=1,
        partition=(2, 2),
        device="cuda:1",
        dtype="float16",
        transport=kind,
        cpu_cores=(),
        run_dir=str(tmp_path),
        driver_pid=0,
    )
    stage = Stage(setup, create_autospec(DriverLink, instance=True))
    stage.runner = create_autospec(SleepRunner, instance=True, hidden_size=8, dtype=torch.float16)
    transport = stage._connect()
    assert type(transport) is expected
    assert connected == [(transport, rendezvous_file(str(tmp_path)))]


def test_many_messages_in_flight_between_processes(tmp_path: Path) -> None:
    assert run_peers(tmp_path, "many", "nccl") == "received all\n"


def test_lost_neighbour_between_processes(tmp_path: Path) -> None:
    assert run_peers(tmp_path, "nothing", "nccl").startswith("Stage 1 lost the connection to stage 0")


class Work:
    """What NCCL gives back: waiting makes the current stream wait, not the host."""

    def __init__(self, model: StreamModel, end: Mark) -> None:
        self._model, self._end = model, end

    def wait(self) -> None:
        order = self._model.transfer_after if self._model.current == "transfer" else self._model.compute_after
        order(self._end)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> StreamModel:
    """All that happens to buffers is noted; nothing is transferred."""
    model = StreamModel()

    def irecv(buffer: torch.Tensor, src: int) -> Work:
        return Work(model, model.launch_on_nccl("receive", buffer, writes=True))

    def isend(buffer: torch.Tensor, dst: int) -> Work:
        return Work(model, model.launch_on_nccl("send", buffer, writes=False))

    def write(self: MessageFormat, buffer: torch.Tensor, micro_batch_id: int, hidden: torch.Tensor) -> torch.Tensor:
        model.access(model.current, buffer, writes=True)
        return buffer[: self.num_bytes(len(hidden))]

    def read(self: MessageFormat, buffer: torch.Tensor, micro_batch_id: int, num_tokens: int) -> torch.Tensor:
        model.access(model.current, buffer, writes=False)
        return self.rows(buffer, num_tokens)

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(MessageFormat, "write", write)
    monkeypatch.setattr(MessageFormat, "read", read)
    return model


def middle_stage(model: StreamModel) -> NcclTransport:
    return NcclTransport(
        stage=1,
        num_stages=3,
        hidden_size=HIDDEN_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens=8,
        streams=model,
    )


def pass_on(transport: NcclTransport, model: StreamModel, count: int, ahead: int) -> None:
    """Receives, computes and sends micro-batches as a stage does, with some receives posted ahead."""
    posted = {k: transport.post_receive(k, 2) for k in range(ahead)}
    for k in range(count):
        received = posted.pop(k)
        rows = received.wait()
        model.access("compute", buffer_of(rows), writes=False)
        transport.send(k, torch.zeros(2, HIDDEN_SIZE))
        received.release()
        if k + ahead < count:
            posted[k + ahead] = transport.post_receive(k + ahead, 2)
    transport.close()


def buffer_of(rows: torch.Tensor) -> torch.Tensor:
    """From the first byte of its message, which is how the model of streams names buffers."""
    return torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage())


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_buffer_is_touched_too_early(model: StreamModel, ahead: int) -> None:
    transport = middle_stage(model)
    pass_on(transport, model, 60, ahead)
    assert model.races == []
    assert len(transport.receive_buffers._free) == ahead
    assert len(transport.send_buffers._free) <= max_outstanding_sends(3)


def test_a_posted_receive_holds_up_neither_compute_nor_send(model: StreamModel) -> None:
    transport = middle_stage(model)
    transport.post_receive(0, 2)
    pending = model.clocks["receive"]["receive"]
    transport.send(0, torch.zeros(2, HIDDEN_SIZE))
    for queue in ("compute", "transfer", "send", "host"):
        assert model.clocks[queue].get("receive", 0) < pending, queue


def test_a_send_under_way_does_not_hold_up_compute(model: StreamModel) -> None:
    transport = middle_stage(model)
    for k in range(max_outstanding_sends(3)):
        transport.send(k, torch.zeros(2, HIDDEN_SIZE))
        assert "send" not in model.clocks["compute"]
        assert "send" not in model.clocks["host"]


def test_larger_messages_than_usual_are_not_freed_under_a_send(model: StreamModel) -> None:
    transport = middle_stage(model)
    sent = transport.send(0, torch.zeros(20, HIDDEN_SIZE))
    sent.wait()
    assert model.clocks["host"]["send"] == 1
    assert not transport.send_buffers._free


def test_the_model_of_streams_is_told_what_real_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch, whose names and arguments are the real ones."""
    torch_cuda = create_autospec(torch.cuda)
    compute, transfer = (create_autospec(torch.cuda.Stream, instance=True) for _ in range(2))
    torch_cuda.current_stream.return_value, torch_cuda.Stream.return_value = compute, transfer
    for name in ("current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch_cuda, name))
    streams = CudaStreams(torch.device("cuda:0"))
    for mark, stream in ((streams.mark_compute(), compute), (streams.mark_transfer(), transfer)):
        assert mark is stream.record_event.return_value
        streams.compute_after(mark)
        compute.wait_event.assert_called_with(mark)
        streams.transfer_after(mark)
        transfer.wait_event.assert_called_with(mark)
    streams.on_transfer()
    torch_cuda.stream.assert_called_once_with(transfer)


@pytest.mark.parametrize("forgotten", ["compute_after", "transfer_after"])
def test_the_race_detector_finds_a_missing_order(
    model: StreamModel, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = middle_stage(model)
    monkeypatch.setattr(Mark, "synchronize", lambda self: None)
    if forgotten == "transfer_after":  # the work's own wait has to stay
        monkeypatch.setattr(Work, "wait", lambda self: StreamModel.transfer_after(model, self._end))
    monkeypatch.setattr(model, forgotten, lambda mark: None)
    pass_on(transport, model, 60, 3)
    assert model.races

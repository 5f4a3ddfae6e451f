"""Every message between client, driver and stages. Encoded with msgpack; decoding checks every type."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from fullbore.config import EngineConfig
from fullbore.scheduler.logprobs import MicroBatchLogprobs
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import TokenOutput
from fullbore.scheduler.shaper import LogitOptions
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.spans import StageRecord

# ------------------------------------------------------------------------------------------ client -> driver, once


class DriverSetup(Struct):
    """On the driver's standard input, as JSON."""

    config: EngineConfig
    run_dir: str  # private folder of this run: sockets and the torch.distributed rendezvous file
    client_pid: int
    has_waiting_clients: bool  # people wait for what the client sends them: it must not be stopped for long


# ---------------------------------------------------------------------------------------------- driver -> stage


class StageSetup(Struct, tag=True):
    """First message to a stage process (on its standard input, as JSON): who it is and what to load."""

    config: EngineConfig
    model_path: str  # local and resolved
    stage: int
    partition: tuple[int, ...]  # layers per stage, for all stages
    device: str  # "cpu", "cuda:0", ...
    dtype: str  # resolved: "float32", ...
    cpu_cores: tuple[int, ...]  # cores to pin to; empty: none
    run_dir: str  # private folder of this run: sockets and the torch.distributed rendezvous file
    driver_pid: int


class AllocateKV(Struct, tag=True):
    """All stages have loaded; allocate this many KV blocks (the same on every stage)."""

    num_blocks: int


class Execute(Struct, tag=True):
    micro_batch: MicroBatch


class Shutdown(Struct, tag=True):
    pass


ToStage = AllocateKV | Execute | Shutdown

# ---------------------------------------------------------------------------------------------- stage -> driver


class Loading(Struct, tag=True):
    """Progress while reading weights."""

    stage: int
    loaded_bytes: int
    total_bytes: int


class Loaded(Struct, tag=True):
    """Weights are in; how much one KV block costs and what is free for blocks."""

    stage: int
    pid: int
    weight_bytes: int
    kv_block_bytes: int
    free_bytes: int


class StageReady(Struct, tag=True):
    """KV blocks allocated, neighbours connected; plans may come."""

    stage: int


class Heartbeat(Struct, tag=True):
    """Sent by a thread of its own every 0.5 s; `step_since_ns` tells since when the current step computes (0: none)."""

    stage: int
    step_since_ns: int


class Executed(Struct, tag=True):
    """A stage is done with a micro-batch.

    `token_ids`: the last stage's samples in the order of the plan's runs; None for a run whose logits are not finite.
    """

    record: StageRecord
    token_ids: list[int | None] | None
    logprobs: MicroBatchLogprobs | None = None  # None: no run asked for any
    used_graph: bool = False  # the layers ran as a CUDA graph


class StageFailed(Struct, tag=True):
    """Sent before a stage process exits by itself; `message` is for the user, `stack` for the log."""

    stage: int
    message: str
    stack: str
    error: str = "EngineDeadError"  # class in fullbore.errors
    is_peer_lost: bool = False  # only a neighbour's connection broke: look for the culprit elsewhere


FromStage = Loading | Loaded | StageReady | Heartbeat | Executed | StageFailed

# --------------------------------------------------------------------------------------------- client -> driver


class AddRequest(Struct, tag=True):
    request_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    choice: int = 0
    timeout_s: float | None = None
    grammar: str | None = None  # that the output must follow, in llguidance's serialised form (see text.grammar)
    stop_token_ids: list[int] = []  # beside the model's own end tokens
    options: LogitOptions | None = None
    num_logprobs: int | None = None  # of the output's tokens, and of so many likeliest ones
    num_prompt_logprobs: int | None = None  # of the prompt's tokens, and of so many likeliest ones


class AbortRequest(Struct, tag=True):
    request_id: int


class GetStats(Struct, tag=True):
    pass


class GetRecords(Struct, tag=True):
    """Answered with RecordsReply: the last `seconds` or, if it is given, all since `since_ns` (monotonic clock)."""

    seconds: float
    since_ns: int | None = None


class Ping(Struct, tag=True):
    """Answered with Pong at once: how a client that hears nothing tells an idle driver from a stuck one."""


class StopDriver(Struct, tag=True):
    """Stop admitting, let running requests finish for `grace_s`, then cut them, stop the stages and exit."""

    grace_s: float


ToDriver = AddRequest | AbortRequest | GetStats | GetRecords | Ping | StopDriver

# --------------------------------------------------------------------------------------------- driver -> client


class StageInfo(Struct):
    stage: int
    layers: tuple[int, int]  # first layer, end (exclusive)
    device: str
    pid: int
    weight_bytes: int


class EngineInfo(Struct, tag=True):
    """The engine as it is: sent once, when requests may come.

    `config` has what the user set, and what was chosen where partition, context length, capacity, dtype or device was
    left open. `dtype`, `device` and `context_length` say it again with narrower types: nothing is "auto" or None now.
    """

    config: EngineConfig
    model_path: str
    model_name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    num_kv_blocks: int
    kv_capacity_tokens: int
    in_flight_limit: int
    eos_token_ids: tuple[int, ...]
    stages: list[StageInfo]


class ModelFound(Struct, tag=True):
    """The model is on this machine; its weights are about to be loaded."""

    tokenizer_path: str  # the folder whose tokenizer belongs to it


class LoadProgress(Struct, tag=True):
    """A step of starting. `stage` -1: no single stage (fetching the model at first, measuring at the end)."""

    stage: int
    what: str  # "downloading …", "loading", "measuring the stages"
    done_bytes: int
    total_bytes: int  # 0: not known, or nothing that is counted in bytes


class Outputs(Struct, tag=True):
    outputs: list[TokenOutput]


class Rejected(Struct, tag=True):
    """The request never entered the pipeline."""

    request_id: int
    message: str
    param: str | None  # the offending field in the API, if there is one
    is_stopping: bool = False  # nothing wrong with the request: the engine admits no more


class Pong(Struct, tag=True):
    pass


class EngineStats(Struct, tag=True):
    """Counters and gauges for /metrics and tests."""

    running: int
    waiting: int
    in_flight: int
    used_blocks: int
    free_blocks: int
    preemptions: int
    micro_batches: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    max_in_flight: int
    in_flight_at_launch: dict[int, int]  # how many micro-batches were in flight after each launch -> launches
    requests_in_micro_batch: dict[int, int]  # size in requests -> launches
    stage_busy_s: list[float]
    graph_steps: list[int]  # per stage: micro-batches whose layers ran as a CUDA graph
    steps_in_bucket: list[list[int]]  # per stage: steps by duration, see records.STEP_BUCKETS_S


class RecordsReply(Struct, tag=True):
    recording: Recording


class EngineDead(Struct, tag=True):
    """The pipeline failed. `stage` None: the driver itself."""

    message: str
    stage: int | None
    stack: str
    error: str = "EngineDeadError"  # class in fullbore.errors
    exit_code: int = 1


FromDriver = (
    EngineInfo | ModelFound | LoadProgress | Outputs | Rejected | Pong | EngineStats | RecordsReply | EngineDead
)

# ------------------------------------------------------------------------------------------------------ coding

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: ToStage | FromStage | ToDriver | FromDriver) -> bytes:
    return _encoder.encode(message)


def encode_plan(micro_batch: MicroBatch) -> tuple[bytes, bytes]:
    """The Execute message for the stages before the last, and the one for the last."""
    for_last = encode(Execute(micro_batch))
    for_earlier = micro_batch.for_earlier_stages()
    return for_last if for_earlier is micro_batch else encode(Execute(for_earlier)), for_last


to_stage_decoder: msgspec.msgpack.Decoder[ToStage] = msgspec.msgpack.Decoder(ToStage)
from_stage_decoder: msgspec.msgpack.Decoder[FromStage] = msgspec.msgpack.Decoder(FromStage)
to_driver_decoder: msgspec.msgpack.Decoder[ToDriver] = msgspec.msgpack.Decoder(ToDriver)
from_driver_decoder: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)

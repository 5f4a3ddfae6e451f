"""An engine without a model: what it says, how fast, and when it dies are the test's to decide."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec.structs import replace
from recordings import simulated_recording

from fullbore.config import EngineConfig
from fullbore.engine.messages import AddRequest, EngineDead, EngineInfo, EngineStats, StageInfo
from fullbore.errors import EngineDeadError, RequestError
from fullbore.scheduler.logprobs import Logprobs
from fullbore.scheduler.request import FinishReason, TokenOutput
from fullbore.telemetry.accounting import Recording

Reply = Callable[[AddRequest], Sequence[int | None]]


class FakeEngine:
    """Has AsyncEngineClient's interface. `reply` gives a request's output tokens; after them comes the end token.

    A None among them is where the request fails.
    """

    def __init__(self, reply: Reply, vocab_size: int, eos_token_id: int, context_length: int = 512) -> None:
        self.reply = reply
        self.eos_token_id = eos_token_id
        self.token_delay_s = 0.0
        self.finish_reason: FinishReason | None = None  # set: how outputs end, at once
        self.error: RequestError | None = None  # set: no request is accepted
        self.requests: list[AddRequest] = []
        self.running: set[int] = set()
        self.aborted: set[int] = set()
        self.dead: EngineDead | None = None
        self.recording = simulated_recording(pp_size=2)
        self.records_asked: list[tuple[float, int | None]] = []
        self.stopped_with_grace_s: float | None = None
        self.death: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._request_ids = itertools.count()
        self._cut = asyncio.Event()
        self.info = EngineInfo(
            config=EngineConfig(model="tiny", pp_size=2),
            model_path="/models/tiny",
            model_name="tiny",
            architecture="FakeForCausalLM",
            dtype="float32",
            device="cpu",
            vocab_size=vocab_size,
            context_length=context_length,
            num_kv_blocks=64,
            kv_capacity_tokens=1024,
            in_flight_limit=2,
            eos_token_ids=(eos_token_id,),
            stages=[StageInfo(0, (0, 2), "cpu", 4242, 1000), StageInfo(1, (2, 4), "cpu", 4243, 1000)],
        )

    def forget_requests(self) -> None:
        """As if none had come yet."""
        self.requests.clear()
        self._request_ids = itertools.count()

    def next_request_id(self) -> int:
        return next(self._request_ids)

    async def generate(self, *requests: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        """One token of each request in turn."""
        if self.error is not None:
            raise self.error
        self.requests += requests
        coming = {request.request_id: self._outputs(request) for request in requests}
        self.running |= coming.keys()
        try:
            while coming:
                for request_id in list(coming):
                    await self._pause()
                    output = coming[request_id].pop(0)
                    if self._cut.is_set() or request_id in self.aborted:
                        output = TokenOutput(request_id, None, "abort")
                    if output.finish_reason is not None:
                        del coming[request_id]
                    yield output
        finally:
            self.running.difference_update(request.request_id for request in requests)
            self.aborted |= coming.keys()

    def abort(self, request_id: int) -> None:
        self.aborted.add(request_id)

    def _outputs(self, request: AddRequest) -> list[TokenOutput]:
        if self.finish_reason is not None:
            return [TokenOutput(request.request_id, None, self.finish_reason)]
        token_ids = self.reply(request)[: request.max_tokens]
        outputs = [
            TokenOutput(request.request_id, token_id, None, 4, _logprobs([token_id], request.num_logprobs))
            for token_id in token_ids
        ]
        outputs[0].prompt_logprobs = _logprobs(request.prompt_token_ids[1:], request.num_prompt_logprobs)
        if None in token_ids:
            failure = token_ids.index(None)
            return [*outputs[:failure], TokenOutput(request.request_id, None, "error", 4)]
        if len(token_ids) == request.max_tokens:
            outputs[-1].finish_reason = "length"
        else:
            end = _logprobs([self.eos_token_id], request.num_logprobs)
            outputs.append(TokenOutput(request.request_id, self.eos_token_id, "stop", 4, end))
        return outputs

    async def _pause(self) -> None:
        cut = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait({cut, self.death}, timeout=self.token_delay_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut.cancel()
        if self.dead is not None:
            raise EngineDeadError(self.dead.message)

    async def stats(self) -> EngineStats:
        if self.dead is not None:
            raise EngineDeadError(self.dead.message)
        return EngineStats(
            running=len(self.running),
            waiting=0,
            in_flight=min(len(self.running), 2),
            used_blocks=2 * len(self.running),
            free_blocks=64 - 2 * len(self.running),
            preemptions=0,
            micro_batches=7,
            generated_tokens=11,
            prompt_tokens=13,
            cached_tokens=4,
            max_in_flight=2,
            in_flight_at_launch={1: 3, 2: 4},
            requests_in_micro_batch={1: 7},
            stage_busy_s=[0.5, 0.25],
            graph_steps=[2, 0],
            steps_in_bucket=[[0] * 4 + [7] + [0] * 10] * 2,
        )

    async def records(self, seconds: float, since_ns: int | None = None) -> Recording:
        """As if now were `recording.end_ns`, whatever it is."""
        self.records_asked.append((seconds, since_ns))
        if self.dead is not None:
            raise EngineDeadError(self.dead.message)
        end_ns = self.recording.end_ns
        start_ns = since_ns if since_ns is not None else end_ns - round(seconds * 1e9)
        return replace(self.recording, start_ns=min(max(start_ns, self.recording.start_ns), end_ns))

    async def stop(self, grace_s: float) -> None:
        self.recording = simulated_recording(pp_size=2)
        self.records_asked: list[tuple[float, int | None]] = []
        self.stopped_with_grace_s = grace_s
        end_s = asyncio.get_running_loop().time() + grace_s
        while self.running and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        self._cut.set()
        while self.running:
            await asyncio.sleep(0.01)

    def die(self, message: str = "Stage 1 (pid 4243) was killed by SIGKILL.") -> None:
        self.dead = EngineDead(message=message, stage=1, stack="")
        self.death.set_result(self.dead)


def logprob_of(token_id: int) -> float:
    """Of any token, wherever it comes."""
    return -token_id / 8


def _logprobs(token_ids: Sequence[int | None], num_top: int | None) -> Logprobs | None:
    """The likeliest tokens are 0, 1, 2 … at every place."""
    if num_top is None or None in token_ids:
        return None
    top_ids = [*range(num_top)] * len(token_ids)
    return Logprobs(
        array("f", [logprob_of(token_id or 0) for token_id in token_ids]).tobytes(),
        array("I", top_ids).tobytes(),
        array("f", map(logprob_of, top_ids)).tobytes(),
    )

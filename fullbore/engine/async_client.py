"""The engine for an asyncio program, such as the HTTP server: one stream of tokens per request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import zmq.asyncio

from fullbore.config import EngineConfig
from fullbore.engine.client import CHECK_PERIOD_S, EXIT_TIMEOUT_S, EngineClient, OnModel, OnProgress
from fullbore.engine.messages import (
    AddRequest,
    EngineDead,
    EngineInfo,
    EngineStats,
    FromDriver,
    GetRecords,
    GetStats,
    Outputs,
    RecordsReply,
    Rejected,
)
from fullbore.errors import EngineDeadError, FullboreError, RequestError
from fullbore.scheduler.request import TokenOutput
from fullbore.telemetry.accounting import Recording

_Item = TokenOutput | FullboreError
_Reply = EngineStats | RecordsReply


class AsyncEngineClient:
    """A running engine. All methods belong to the event loop that `start` was awaited in."""

    def __init__(self, client: EngineClient) -> None:
        self.info: EngineInfo = client.info
        self.death: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self._client = client
        self._queues: dict[int, asyncio.Queue[_Item]] = {}
        self._waiters: dict[type[_Reply], deque[asyncio.Future[Any]]] = {EngineStats: deque(), RecordsReply: deque()}
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        on_model: OnModel | None = None,
        has_waiting_clients: bool = False,
    ) -> AsyncEngineClient:
        """Starts driver and stages and waits until requests may come. Cancelling it ends them.

        Args:
            on_progress: called with every step of loading, from another thread.
            on_model: called there with the model's folder before its weights are loaded; what it raises ends the start.
            has_waiting_clients: as for EngineClient.start.

        Raises:
            FullboreError: the subclass that fits, with one sentence; nothing is left running.
        """
        cancelled = Event()
        try:
            client = await asyncio.to_thread(
                EngineClient.start, config, on_progress, cancelled, on_model, has_waiting_clients
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return cls(client)

    @property
    def dead(self) -> EngineDead | None:
        """Why the pipeline is gone; None while it is well. `death` can be awaited instead."""
        return self._client.dead

    @property
    def run_dir(self) -> Path:
        """The private folder with the engine's sockets."""
        return self._client.run_dir

    def next_request_id(self) -> int:
        return self._client.next_request_id()

    async def generate(self, *requests: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        """The requests' tokens as they come; each one's last has a finish reason. Leaving early aborts all.

        Raises:
            RequestError: one of them can never be served.
            EngineDeadError: the pipeline is gone, or shutting down.
        """
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        running = {request.request_id for request in requests}
        try:
            for request in requests:
                self._client.add(request)
                self._queues[request.request_id] = queue
            while running:
                item = await queue.get()
                if isinstance(item, FullboreError):
                    raise item
                if item.finish_reason is not None:
                    running.discard(item.request_id)
                yield item
        finally:
            for request in requests:
                self._queues.pop(request.request_id, None)
            for request_id in running:
                self.abort(request_id)

    def abort(self, request_id: int) -> None:
        """Ends one of the requests of a stream early; it still gets its last output. Others are ignored."""
        with suppress(EngineDeadError):
            self._client.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counters and gauges now. Raises EngineDeadError."""
        stats: EngineStats = await self._ask(GetStats(), EngineStats)
        return stats

    async def records(self, seconds: float, since_ns: int | None = None) -> Recording:
        """What driver and stages recorded in the last `seconds`, or since `since_ns`. Raises EngineDeadError."""
        reply: RecordsReply = await self._ask(GetRecords(seconds, since_ns), RecordsReply)
        return reply.recording

    async def _ask(self, question: GetStats | GetRecords, kind: type[_Reply]) -> Any:
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.send(question)
        self._waiters[kind].append(waiter)
        return await waiter

    async def stop(self, grace_s: float = 0.0) -> None:
        """Admits no more requests, lets running ones finish for `grace_s`, then ends everything. Twice is fine."""
        self._client.begin_stop(grace_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reader, grace_s + EXIT_TIMEOUT_S)
        self._fail_all(EngineDeadError("The engine was stopped."))
        self._client.close()

    async def _read(self) -> None:
        """Hands out what the driver sends until the engine ends, well or not."""
        try:
            await self._read_until_end()
        except Exception as error:  # whatever it is, nobody may wait for tokens that nobody reads
            self._client.dead = EngineDead(f"The engine's client failed: {type(error).__name__}: {error}", None, "")
        if self.dead is not None:
            self.death.set_result(self.dead)
            self._fail_all(EngineDeadError(self.dead.message))
            self._client.close()

    async def _read_until_end(self) -> None:
        socket = zmq.asyncio.Socket(shadow=self._client.from_driver)
        while not self._client.has_ended:
            await socket.poll(int(CHECK_PERIOD_S * 1e3))
            messages = self._client.drain()
            for message in messages:
                self._hand_out(message)
            if not messages:
                self._client.check_driver()

    def _hand_out(self, message: FromDriver) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._put(output.request_id, output)
        elif isinstance(message, Rejected):
            error = (
                EngineDeadError(message.message)
                if message.is_stopping
                else RequestError(message.message, message.param)
            )
            self._put(message.request_id, error)
        elif isinstance(message, EngineStats | RecordsReply):
            waiter = self._waiters[type(message)].popleft()  # replies come in the order of the questions
            if not waiter.done():
                waiter.set_result(message)

    def _put(self, request_id: int, item: _Item) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # else its consumer has left
            queue.put_nowait(item)

    def _fail_all(self, error: FullboreError) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error)
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
            waiters.clear()

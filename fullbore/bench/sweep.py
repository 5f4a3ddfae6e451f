"""A benchmark: one load level after the other against one server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle

import httpx

from fullbore.bench.gpus import GpuSampler
from fullbore.bench.load import closed_loop, open_loop
from fullbore.bench.measure import Level, measure, server_setup, stage_use
from fullbore.bench.prompts import Prompt, RandomPrompts, calibrated, calibration_texts
from fullbore.bench.target import BenchError, RequestResult, Target, new_client

OnProgress = Callable[[int, int, int], None]  # requests ended, requests in all, errors


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured. Either `concurrencies` (closed loop) or `request_rates` (open loop) are given."""

    prompts: RandomPrompts | list[Prompt]
    concurrencies: tuple[int, ...] = ()
    request_rates: tuple[float, ...] = ()
    num_requests: int | None = None  # per level; None: four per client and at least eight, or 30 s of arrivals
    warmup_requests: int = 2
    request_timeout_s: float = 600.0
    seed: int = 0

    @property
    def levels(self) -> list[tuple[int | None, float | None]]:
        """(concurrency, request rate) of each level; one of the two is None."""
        return [(c, None) for c in self.concurrencies] or [(None, rate) for rate in self.request_rates]

    def requests_of(self, concurrency: int | None, request_rate: float | None) -> int:
        if self.num_requests is not None:
            return self.num_requests
        if concurrency is not None:
            return max(4 * concurrency, 8)
        return max(round(30 * (request_rate or 0)), 8)


async def calibrate(sweep: Sweep, target: Target) -> Sweep:
    """The sweep with prompts of the wanted length in this server's tokens."""
    if isinstance(sweep.prompts, list):
        return sweep
    tokens = []
    async with new_client(1, sweep.request_timeout_s) as client:
        for text in calibration_texts(sweep.seed):
            result = await target.send(client, Prompt(text, output_tokens=1), time.perf_counter())
            if result.error is not None:
                raise BenchError(f"A request to find out the length of prompts failed. {result.error}")
            tokens.append(result.prompt_tokens)
    return replace(sweep, prompts=calibrated(sweep.prompts, *tokens))


async def run(sweep: Sweep, target: Target, on_progress: OnProgress) -> AsyncIterator[Level]:
    """Yields each level's figures when it is done. Ctrl-C ends the level; what it has so far is its result, the last.

    Raises:
        BenchError: no warm-up request succeeds.
    """
    prompts = iter(cycle(sweep.prompts)) if isinstance(sweep.prompts, list) else iter(sweep.prompts)
    await _warm_up(sweep, target, prompts)
    for concurrency, request_rate in sweep.levels:
        level, is_interrupted = await _run_level(sweep, target, prompts, concurrency, request_rate, on_progress)
        yield level
        if is_interrupted:
            return


async def _warm_up(sweep: Sweep, target: Target, prompts: Iterator[Prompt]) -> None:
    async with new_client(1, sweep.request_timeout_s) as client:
        for _ in range(sweep.warmup_requests):
            result = await target.send(client, next(prompts), time.perf_counter())
            if result.error is not None:
                raise BenchError(f"A warm-up request failed. {result.error}")


async def _run_level(
    sweep: Sweep,
    target: Target,
    prompts: Iterator[Prompt],
    concurrency: int | None,
    request_rate: float | None,
    on_progress: OnProgress,
) -> tuple[Level, bool]:
    num_requests = sweep.requests_of(concurrency, request_rate)
    results: list[RequestResult] = []

    def on_result(result: RequestResult) -> None:
        results.append(result)
        on_progress(len(results), num_requests, sum(not r.is_ok for r in results))

    start_s = time.perf_counter()
    async with new_client(concurrency or num_requests, sweep.request_timeout_s) as client:
        if concurrency is not None:
            load = closed_loop(target, client, prompts, concurrency, num_requests, on_result)
        else:
            load = open_loop(target, client, prompts, request_rate or 1.0, num_requests, on_result, sweep.seed)
        with GpuSampler() as gpus:
            is_interrupted = await _until_done_or_interrupted(load)
        level = measure(results, concurrency=concurrency, request_rate=request_rate, is_interrupted=is_interrupted)
        if uses := gpus.uses():
            level.gpus = uses
        await _add_stages(level, target, client, time.perf_counter() - start_s)
    return level, is_interrupted


async def _until_done_or_interrupted(load: Coroutine[None, None, None]) -> bool:
    """Runs the load; True if SIGINT cut it short."""
    task = asyncio.create_task(load)
    with _cancel_on_interrupt(task), suppress(asyncio.CancelledError):
        await task
    return task.cancelled()


@contextmanager
def _cancel_on_interrupt(task: asyncio.Task[None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread: the caller handles it
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


async def _add_stages(level: Level, target: Target, client: httpx.AsyncClient, seconds: float) -> None:
    """What a fullbore server says about its stages and settings; other servers have no /account."""
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        response = await client.get(
            f"{target.url}/account", params={"seconds": seconds}, headers=target.headers, timeout=10
        )
        if response.status_code == 200:
            level.stages = stage_use(response.json())
            info = await client.get(f"{target.url}/server_info", headers=target.headers, timeout=10)
            level.server = server_setup(info.json())

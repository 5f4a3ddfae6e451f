"""Two ways to put load on a server: clients that wait for their answer, and arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import httpx

from fullbore.bench.prompts import Prompt
from fullbore.bench.target import RequestResult, Target

OnResult = Callable[[RequestResult], None]


async def closed_loop(
    target: Target,
    client: httpx.AsyncClient,
    prompts: Iterator[Prompt],
    concurrency: int,
    num_requests: int,
    on_result: OnResult,
) -> None:
    """`concurrency` clients share `num_requests` requests; each sends its next when its last one is complete.

    Cancelling it closes all connections; results so far have been handed to `on_result`.
    """
    numbers = iter(range(num_requests))

    async def one_client() -> None:
        for _ in numbers:
            on_result(await target.send(client, next(prompts), time.perf_counter()))

    await _all(asyncio.create_task(one_client()) for _ in range(min(concurrency, num_requests)))


async def open_loop(
    target: Target,
    client: httpx.AsyncClient,
    prompts: Iterator[Prompt],
    requests_per_s: float,
    num_requests: int,
    on_result: OnResult,
    seed: int = 0,
) -> None:
    """Requests at random times (Poisson), however slow the server is.

    A request's latency counts from when it was due, so that a stalled client or server cannot hide waiting time
    (coordinated omission).
    """
    random = Random(seed)
    start_s = time.perf_counter()

    async def one_request(prompt: Prompt, due_s: float) -> None:
        await asyncio.sleep(due_s - time.perf_counter())
        on_result(await target.send(client, prompt, due_s))

    due_s = start_s
    tasks = []
    for _ in range(num_requests):
        due_s += random.expovariate(requests_per_s)
        tasks.append(asyncio.create_task(one_request(next(prompts), due_s)))
    await _all(tasks)


async def _all(tasks: Iterator[asyncio.Task[None]] | list[asyncio.Task[None]]) -> None:
    """Waits for all; when cancelled or when one fails, none goes on."""
    running = list(tasks)
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running, return_exceptions=True)

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing

import pytest
from engine_helpers import MODEL, add_request, assert_nothing_left, config, expected, prompt_of, tokens_of

from fullbore.engine.async_client import AsyncEngineClient
from fullbore.engine.messages import AddRequest
from fullbore.errors import ConfigError, EngineDeadError, RequestError
from fullbore.scheduler.request import TokenOutput


async def outputs_of(client: AsyncEngineClient, request: AddRequest) -> list[TokenOutput]:
    return [output async for output in client.generate(request)]


async def wait_until_empty(client: AsyncEngineClient) -> None:
    while True:
        stats = await client.stats()
        if (stats.running, stats.waiting, stats.in_flight, stats.used_blocks) == (0, 0, 0, 0):
            return
        await asyncio.sleep(0.02)


def test_streams_of_many_requests() -> None:
    async def main() -> None:
        client = await AsyncEngineClient.start(config(2))
        prompts = [prompt_of(k, 4 + k) for k in range(10)]
        streams = [outputs_of(client, add_request(client.next_request_id(), prompt, 20)) for prompt in prompts]
        for prompt, outputs in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert tokens_of(outputs) == expected(MODEL, prompt, 20)

        with pytest.raises(RequestError) as raised:
            await outputs_of(client, add_request(client.next_request_id(), [1], 10**7))
        assert raised.value.param == "max_tokens"

        # Several in one stream, of which one is ended early.
        together = [add_request(client.next_request_id(), prompt, 30) for prompt in prompts[:3]]
        outputs_of_each: dict[int, list[TokenOutput]] = {request.request_id: [] for request in together}
        ended_early = together[1].request_id
        async for output in client.generate(*together):
            outputs_of_each[output.request_id].append(output)
            if output.request_id == ended_early and len(outputs_of_each[ended_early]) == 1:
                client.abort(ended_early)
        reasons = [outputs_of_each[request.request_id][-1].finish_reason for request in together]
        assert reasons == ["length", "abort", "length"]
        for request in together[::2]:
            assert tokens_of(outputs_of_each[request.request_id]) == expected(MODEL, request.prompt_token_ids, 30)

        # Leaving the loop, cancelling the task: either frees the request.
        async with aclosing(client.generate(add_request(client.next_request_id(), [1, 2], 4000))) as stream:
            async for _ in stream:
                break
        task = asyncio.create_task(outputs_of(client, add_request(client.next_request_id(), [1, 2], 4000)))
        while (await client.stats()).running == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(wait_until_empty(client), 30)

        # Stopping: what fits into the grace period ends well, the rest is cut, and nothing new gets in.
        short = asyncio.create_task(outputs_of(client, add_request(client.next_request_id(), [1], 30)))
        long = asyncio.create_task(outputs_of(client, add_request(client.next_request_id(), [1], 4000)))
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(client.stop(1.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await outputs_of(client, add_request(client.next_request_id(), [1], 5))
        await stopping
        await client.stop(0.0)
        assert (await short)[-1].finish_reason == "length"
        assert (await long)[-1].finish_reason == "abort"
        assert client.dead is None
        assert_nothing_left([stage.pid for stage in client.info.stages], client.run_dir)
        with pytest.raises(EngineDeadError):
            await client.stats()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_death_reaches_every_waiting_request() -> None:
    async def main() -> None:
        client = await AsyncEngineClient.start(config(2))
        requests = [add_request(client.next_request_id(), prompt_of(k, 3), 4000) for k in range(6)]
        streams = [asyncio.create_task(outputs_of(client, request)) for request in requests]
        while (await client.stats()).running < 6:
            await asyncio.sleep(0.01)
        os.kill(client.info.stages[1].pid, signal.SIGKILL)
        dead = await asyncio.wait_for(client.death, 5)
        assert dead is client.dead
        assert dead.stage == 1
        for stream in streams:
            with pytest.raises(EngineDeadError, match="Stage 1"):
                await stream
        with pytest.raises(EngineDeadError, match="Stage 1"):
            await outputs_of(client, add_request(client.next_request_id(), [1], 5))
        with pytest.raises(EngineDeadError, match="Stage 1"):
            await client.stats()
        await client.stop()
        assert_nothing_left([stage.pid for stage in client.info.stages], client.run_dir)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_start_errors_and_cancelled_start() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="8 layers"):
            await AsyncEngineClient.start(config(9))
        start = asyncio.create_task(AsyncEngineClient.start(config(1, MODEL + ",load_ms=60000")))
        await asyncio.sleep(1.0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(asyncio.wait_for(main(), 120))

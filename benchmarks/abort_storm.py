"""Does anything break when clients leave all the time? Run: python benchmarks/abort_storm.py

A server over stages that sleep, whose tokens are known beforehand, with a KV cache too small for all requests at once.
Nine of ten prompts share a prefix, four of five clients close their sockets at a random moment: before, during or after
their request, as its first tokens come, or later. Afterwards

- everybody who stayed has got exactly the expected text;
- every gauge is 0, and the processes have hardly grown during the last two fifths (what the driver remembers for
  /timeline is bounded, and full by then);
- all stages have executed the same micro-batches in the same order.

Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from fullbore.config import DEFAULT_MODEL
from fullbore.engine.sleep_model import expected_tokens, parse
from fullbore.model.resolve import resolve_model
from fullbore.text.tokenizer import Tokenizer

NUM_STAGES = 3
MODEL = "sleep://layers=6,layer_ms=0.5,vocab={vocab}"
KV_TOKENS = 512  # a few requests at a time; the others wait
PREFIX = [7 * position % 250 for position in range(64)]
SHARE_WITH_PREFIX, SHARE_LEAVING = 0.9, 0.8
MOST_TOKENS = 24
GAUGES = ["requests_running", "requests_waiting", "micro_batches_in_flight", "kv_blocks_used"]
GROWTH_LIMIT_MIB = 24  # of all processes together, over the last two fifths


@dataclass
class Storm:
    """What clients do, and what they got."""

    url: str
    tokenizer: Tokenizer
    model: str
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """One request; its prompt, parameters and moment of leaving depend on `number` alone."""
        chance = random.Random(number)
        prompt = PREFIX * (chance.random() < SHARE_WITH_PREFIX) + chance.choices(range(250), k=chance.randint(1, 40))
        prompt += self.tokenizer.encode("a", add_special_tokens=False)  # an output's text begins with a whole character
        num_tokens, seed = chance.randint(1, MOST_TOKENS), chance.choice([None, chance.getrandbits(60)])
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": chance.random() < 0.7}
        body |= {"temperature": 0} if seed is None else {"seed": seed}
        moments = ["connected", "half sent", "sent", "soon", "answering", "later"]
        moment = chance.choice(moments) if chance.random() < SHARE_LEAVING else "stays"
        reader, writer = await asyncio.open_connection(urlsplit(self.url).hostname, urlsplit(self.url).port)
        try:
            answer = await self._ask(reader, writer, _http(body), moment, chance)
        finally:
            writer.transport.abort() if chance.random() < 0.5 else writer.close()
        self.ended[moment] += 1
        if moment == "stays":
            expected = self.tokenizer.decode(expected_tokens(parse(self.model), prompt, num_tokens, seed))
            if _text(answer) != expected:
                self.wrong.append(f"request {number}: {expected!r} expected, got {answer!r}")

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: bytes,
        moment: str,
        chance: random.Random,
    ) -> bytes:
        """The answer; only if the client stays it is whole."""
        writer.write(request[: {"connected": 0, "half sent": chance.randrange(len(request))}.get(moment)])
        await writer.drain()
        if moment == "stays":
            return await reader.read()
        if moment == "answering":
            await reader.readline()
        elif moment in ("soon", "later"):
            await asyncio.sleep(chance.uniform(0, 0.05 if moment == "soon" else 1.0))
        return b""


def _http(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _text(answer: bytes) -> str | None:
    """The text in an answer, streamed or not; None if it has not ended well."""
    documents = [json.loads(each) for each in re.findall(rb"^(?:data: )?(\{.*\})\r?$", answer, re.MULTILINE)]
    if not answer.startswith(b"HTTP/1.1 200") or any("error" in document for document in documents):
        return None
    return "".join(choice["text"] for document in documents for choice in document["choices"])


# ------------------------------------------------------------------------------------------------ what is left behind


class Watch:
    """What the server tells of itself while the storm goes on."""

    def __init__(self, url: str, server: psutil.Process) -> None:
        self.url = url
        self.server = server
        self.executed: list[list[int]] = [[] for _ in range(NUM_STAGES)]  # stage -> ids of micro-batches, in its order
        self._since_ns = 0

    async def follow(self) -> None:
        """Fetches the stages' records again and again, since the server does not remember all of them."""
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                await self.fetch(client)
                await asyncio.sleep(1)

    async def fetch(self, client: httpx.AsyncClient) -> None:
        timeline = (await client.get(f"{self.url}/timeline", params={"since_ns": self._since_ns})).json()
        self._since_ns = timeline["recording"]["end_ns"]
        for stage, micro_batch_id, *_ in timeline["recording"]["stage_records"]:
            seen = self.executed[stage]
            if not seen or micro_batch_id > seen[-1]:  # the records overlap
                seen.append(micro_batch_id)

    def memory_bytes(self) -> int:
        """What the server's processes have for themselves."""
        processes = [self.server, *self.server.children(recursive=True)]
        return sum(process.memory_full_info().uss for process in processes)

    async def metric(self, client: httpx.AsyncClient, name: str) -> float:
        value = re.search(rf"^fullbore_{name} (.+)$", (await client.get(f"{self.url}/metrics")).text, re.MULTILINE)
        assert value is not None, name
        return float(value[1])

    async def gauges(self, client: httpx.AsyncClient) -> dict[str, float]:
        return {name: await self.metric(client, name) for name in GAUGES}


async def all_zero(watch: Watch, client: httpx.AsyncClient, timeout_s: float = 10) -> dict[str, float]:
    """The gauges once they are 0, or as they are in the end."""
    end_s = time.monotonic() + timeout_s
    while any((gauges := await watch.gauges(client)).values()) and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    return gauges


async def run(storm: Storm, watch: Watch, num_requests: int, concurrency: int) -> list[str]:
    """Returns what is wrong."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with slots:
            await storm.client(number)

    follower = asyncio.create_task(watch.follow())
    async with httpx.AsyncClient(timeout=60) as client:
        used_bytes = []  # after each fifth
        for wave in range(5):
            await asyncio.gather(*map(one, range(wave * num_requests // 5, (wave + 1) * num_requests // 5)))
            gauges = await all_zero(watch, client)
            used_bytes.append(watch.memory_bytes())
        follower.cancel()
        await watch.fetch(client)
        num_preemptions = await watch.metric(client, "preemptions_total")
    first, *others = watch.executed
    growth_mib = (used_bytes[-1] - used_bytes[2]) / 2**20
    print(f"{num_requests} requests by moment of leaving: {dict(storm.ended)}")
    print(f"{len(first)} micro-batches, {num_preemptions:.0f} preemptions")
    print(f"MiB of all processes after each fifth: {[round(each / 2**20, 1) for each in used_bytes]}")
    wrong = storm.wrong[:10]
    if any(gauges.values()):
        wrong.append(f"gauges are not 0: {gauges}")
    if growth_mib > GROWTH_LIMIT_MIB:
        wrong.append(f"the processes grew by {growth_mib:.1f} MiB")
    if not first or any(ids != first for ids in others) or first != list(range(first[0], first[0] + len(first))):
        wrong.append("stages have not executed the same micro-batches in the same order")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--vocab", type=int, default=49_152, help="its number of tokens")
    parser.add_argument("--tokenizer-path", type=Path, help="default: the default model's")
    arguments = parser.parse_args()
    tokenizer_path = arguments.tokenizer_path or resolve_model(DEFAULT_MODEL).path
    tokenizer = Tokenizer.load(tokenizer_path)
    model = MODEL.format(vocab=arguments.vocab)
    command = [str(Path(sys.executable).parent / "fullbore"), "serve", model, "--tokenizer-path", str(tokenizer_path)]
    command += ["--pp-size", str(NUM_STAGES), "--max-total-tokens", str(KV_TOKENS), "--port", "0"]
    with subprocess.Popen([*command, "--disable-log-requests"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(line for line in server.stdout if line.startswith("API:")).split()[1].removesuffix("/v1")
            next(line for line in server.stdout if line.startswith("Stop with"))
            watch = Watch(url, psutil.Process(server.pid))
            wrong = asyncio.run(run(Storm(url, tokenizer, model), watch, arguments.requests, arguments.concurrency))
        finally:
            server.terminate()
    print(*wrong or ["Nothing is wrong."], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

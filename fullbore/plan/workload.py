"""Who asks for what, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a simulated client; times in seconds."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0  # not used in a closed loop
    shared_prefix_tokens: int = 0  # so many leading prompt tokens are the same in every job that has them
    timeout_s: float | None = None  # from arrival
    abort_after_s: float | None = None  # from arrival


@dataclass(frozen=True)
class Workload:
    """Jobs, sent by `concurrency` clients that each wait for an answer before the next, or at their own times."""

    jobs: Sequence[Job]
    concurrency: int | None = None  # None: at `arrival_s`


def closed_loop(
    concurrency: int,
    num_requests: int,
    prompt_tokens: int | Sequence[int],
    output_tokens: int | Sequence[int],
    shared_prefix_tokens: int = 0,
) -> Workload:
    """`num_requests` from `concurrency` clients. Lists of lengths are used in turn, over and over."""
    lengths = islice(_pairs(prompt_tokens, output_tokens), num_requests)
    jobs = [Job(prompt, output, shared_prefix_tokens=shared_prefix_tokens) for prompt, output in lengths]
    return Workload(jobs, concurrency)


def poisson(
    requests_per_s: float,
    num_requests: int,
    prompt_tokens: int | Sequence[int],
    output_tokens: int | Sequence[int],
    seed: int = 0,
) -> Workload:
    """Arrivals at random, independent of each other."""
    random = Random(seed)
    at_s = 0.0
    jobs = []
    for prompt, output in islice(_pairs(prompt_tokens, output_tokens), num_requests):
        at_s += random.expovariate(requests_per_s)
        jobs.append(Job(prompt, output, at_s))
    return Workload(jobs)


def _pairs(prompt_tokens: int | Sequence[int], output_tokens: int | Sequence[int]) -> Iterator[tuple[int, int]]:
    prompts = [prompt_tokens] if isinstance(prompt_tokens, int) else prompt_tokens
    outputs = [output_tokens] if isinstance(output_tokens, int) else output_tokens
    return zip(cycle(prompts), cycle(outputs), strict=False)

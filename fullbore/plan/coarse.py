"""Making long simulations short: one simulated request stands for several, one simulated token for several.

Both are changes of unit, not of policy: the scheduler sees proportionally smaller numbers everywhere (requests, tokens,
KV blocks, budgets), and the costs are those of the real numbers. With `requests` = q, a micro-batch of d decodes costs
what q·d decodes cost. With `tokens` = k, a simulated step is k real steps; the prompt tokens in it are charged as the
full chunks that an engine would cut them into, in as many of the k steps as they fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fullbore.plan.loads import Load, StageCosts
from fullbore.plan.pipeline import Hop

# Finer than this is exact. Fewer requests would arrive in lumps, and ⌈C/m⌉ would round differently; fewer steps would
# blur the time to the first token (throughput stays within 1 %).
SIMULATED_REQUESTS = 256
SIMULATED_TOKENS = 1024  # of output per request


@dataclass(frozen=True)
class Grain:
    """How much a simulated request and a simulated token stand for."""

    requests: int = 1
    tokens: int = 1

    def jobs(self, number: int) -> int:
        return max(ceil(number / self.requests), 1)

    def length(self, tokens: int) -> int:
        return max(round(tokens / self.tokens), 1)


EXACT = Grain()


def grain_for(concurrency: int, output_tokens: int) -> Grain:
    """The grain at which a simulation of this size is short enough."""
    requests = 1
    while concurrency % (requests * 2) == 0 and concurrency // (requests * 2) >= SIMULATED_REQUESTS:
        requests *= 2
    return Grain(requests, max(output_tokens // SIMULATED_TOKENS, 1))


@dataclass
class CoarseCosts:
    """The costs of real micro-batches, asked for simulated ones."""

    costs: StageCosts
    grain: Grain
    chunk_tokens: int  # real budget of one micro-batch

    def seconds(self, load: Load) -> Sequence[float]:
        """Seconds of all real micro-batches that one simulated micro-batch stands for."""
        q, k = self.grain.requests, self.grain.tokens
        decodes, context = load.decodes * q, load.context_tokens * q * k
        prefill = load.prefill_tokens * q * k
        if not prefill:
            plain = self.costs.seconds(Load(decodes, sampled=load.sampled * q, context_tokens=context))
            return [each * k for each in plain] if k > 1 else plain
        chunks = min(ceil(prefill / self.chunk_tokens), k) if k > 1 else 1
        sampled = decodes + (load.sampled - load.decodes) * q
        full = self.costs.seconds(
            Load(decodes, ceil(prefill / chunks), load.prefill_token_pairs * q * k * k // chunks, sampled, context)
        )
        if not decodes or k == chunks:
            return [each * chunks for each in full] if chunks > 1 else full
        rest = self.costs.seconds(Load(decodes, sampled=decodes, context_tokens=context))
        return [chunks * one + (k - chunks) * other for one, other in zip(full, rest, strict=True)]


def coarse_hops(hops: Sequence[Hop], grain: Grain) -> list[Hop]:
    """Links in the same units: a step's latency counts for each real step, its bytes for each real token."""
    return [Hop(hop.latency_s * grain.tokens, hop.token_s * grain.requests * grain.tokens) for hop in hops]

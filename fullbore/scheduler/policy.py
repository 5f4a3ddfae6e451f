"""How many micro-batches, and how many prompt tokens in each. Pure functions of the cost estimates.

Decode. With D requests, which read `context` cached tokens each, in m micro-batches of sizes b_j (differing by at most
one) the cycle is
    max( Σ_i s_i(max b_j) + Σh + c ,  max_i Σ_j s_i(b_j) )
since a request can start its next step only after its token came back (first term), and a stage runs one micro-batch
at a time (second). For costs of the form (size factor × stage factor) this is exact: any other critical circuit of
the event graph is a mixture of the two. Tokens/s = D / cycle.

Prefill. W waiting tokens of w requests, cut into n equal chunks, take (n + P - 1)·(α + β·W/n) through P stages, where
α is what a micro-batch costs without them. The part n·α is waited for by the w requests alone, but (P-1)·β·W/n, by
which the chunks make micro-batches uneven, by everyone: each stage idles so long, and the D decoding requests with it.
Together least at n = sqrt((w + D/k)·(P-1)·β·W / (w·α)), where k says how much more a first token is worth in a hurry.
"""

from __future__ import annotations

from math import ceil, sqrt

from fullbore.scheduler.cost import CostModel

# A choice other than one micro-batch per stage must win by more than the estimates' noise.
_MIN_GAIN = 1.015

# Delaying one request's first token by a second is as bad as delaying so many decoding requests by a second.
_FIRST_TOKEN_WEIGHT = 4

# Chunks of one prompt whose costs differ by no more than this share are left alike.
_EVEN_ENOUGH = 0.05


def decode_cycle_s(costs: CostModel, num_requests: int, num_micro_batches: int, context: int = 0) -> float:
    """Predicted seconds in which each of `num_requests` gets one token."""
    small, larger = divmod(num_requests, num_micro_batches)
    if larger == 0:
        total, slowest = costs.decode_s(small, context)
        return max(total + costs.overhead_s, num_micro_batches * slowest)
    total, slowest = costs.decode_s(small + 1, context)
    gate = larger * slowest
    if small:
        gate += (num_micro_batches - larger) * costs.decode_s(small, context)[1]
    return max(total + costs.overhead_s, gate)


def rounded_context(tokens: int) -> int:
    """A context length to three significant bits: what the estimates can tell apart, and few enough to remember."""
    return tokens & -(1 << max(tokens.bit_length() - 3, 6))


def best_micro_batches(
    costs: CostModel, num_requests: int, num_stages: int, limit: int, max_requests: int, context: int = 0
) -> int:
    """m*: into how many micro-batches to spread `num_requests` decoding requests of `context` tokens each.

    Args:
        limit: most micro-batches in flight.
        max_requests: most requests in one micro-batch; m* is at least what this requires (up to `limit`).
    """
    if num_requests <= 0:
        return 1
    least = min(ceil(num_requests / max_requests), limit)
    most = max(min(limit, num_requests), least)
    usual = min(max(num_stages, least), most)
    if not costs.knows_decode:
        return usual
    cycles = {m: decode_cycle_s(costs, num_requests, m, context) for m in range(least, most + 1)}
    fastest = min(cycles.values())
    if cycles[usual] <= fastest * _MIN_GAIN:
        return usual
    return min((m for m in cycles if cycles[m] <= fastest * 1.002), key=lambda m: abs(m - num_stages))


def prefill_quota_tokens(
    costs: CostModel,
    waiting_tokens: int,
    waiting_requests: int,
    num_decoding: int,
    num_decodes: int,
    num_stages: int,
    budget_tokens: int,
    min_chunk_tokens: int,
    context: int = 0,
) -> int:
    """Prompt tokens per micro-batch that spread `waiting_tokens` evenly and keep every stage busy.

    `num_decoding` requests of `context` tokens are decoding, `num_decodes` of them in each micro-batch. The result is
    at most `budget_tokens`, and at least `min_chunk_tokens` where so many wait.
    """
    if waiting_tokens <= 0:
        return budget_tokens
    fewest = ceil(waiting_tokens / budget_tokens)
    alpha = costs.decode_s(num_decodes, context)[1] if num_decodes and costs.knows_decode else costs.fixed_s()
    if costs.knows_prefill and alpha > 0:
        beta = costs.slowest_prefill().per_token_s
        delayed = num_decoding / _FIRST_TOKEN_WEIGHT + waiting_requests
        best = sqrt(beta * waiting_tokens * (num_stages - 1) * delayed / (alpha * waiting_requests))
        pieces = max(fewest, round(best))
    else:
        pieces = max(fewest, min(num_stages, waiting_requests))
    # Smaller pieces than this are not worth a launch, unless each is a request of its own on an otherwise idle stage.
    most = max(waiting_tokens // min_chunk_tokens, min(num_stages, waiting_requests))
    pieces = max(min(pieces, most), fewest, 1)
    return ceil(waiting_tokens / pieces)


def prefill_depth(costs: CostModel, num_stages: int, quota_tokens: int, limit: int) -> int:
    """Micro-batches in flight that keep every stage busy with prefill chunks: P, and cover for the result's return."""
    if not costs.knows_prefill:
        return min(num_stages + 1, limit)
    chunk_s = costs.fixed_s() + costs.slowest_prefill().chunk_s(quota_tokens)
    return min(num_stages + ceil(costs.overhead_s / max(chunk_s, 1e-9)), limit)


def chunk_tokens(costs: CostModel, quota_tokens: int, context: int) -> int:
    """Tokens after `context` earlier ones that cost about what `quota_tokens` at the start of a prompt cost.

    Solves f(L+x) - f(L) = f(quota) - f(0) for x with f(l) = a·l² + b·l, where the right side has a little more, so that
    a fit to costs that hardly depend on tokens means nothing; at least quota/8, so that an extreme context cannot grind
    a prompt to crumbs.
    """
    fit = costs.slowest_prefill()
    if context == 0 or not costs.knows_prefill or fit.per_token_pair_s == 0:
        return quota_tokens
    a, b = fit.per_token_pair_s, fit.per_token_s
    first_s = fit.chunk_s(quota_tokens)
    first_s += _EVEN_ENOUGH * (first_s + costs.fixed_s())
    slope = b + 2 * a * context
    x = (-slope + sqrt(slope * slope + 4 * a * first_s)) / (2 * a)
    return min(max(round(x), ceil(quota_tokens / 8), 1), quota_tokens)


def cut_tokens(
    remaining_tokens: int,
    room_tokens: int,
    quota_tokens: int,
    used_tokens: int,
    budget_tokens: int,
    min_chunk_tokens: int,
) -> int:
    """How many of a prompt's `remaining_tokens` go into a micro-batch; 0: none.

    Args:
        room_tokens: what is left of the quota in this micro-batch.
        quota_tokens: what one chunk of this prompt may have now, see `chunk_tokens`.
        used_tokens: prompt tokens that are in the micro-batch already.
        budget_tokens: most prompt tokens in a micro-batch.
    """
    take = min(room_tokens, quota_tokens)
    if remaining_tokens <= take:
        return remaining_tokens
    shortest = max(min_chunk_tokens, quota_tokens // 4)
    if remaining_tokens - take >= shortest and take >= shortest:
        return take
    # A crumb on either side of the cut is not worth a launch: take all, or leave all, or cut in the middle.
    budget = budget_tokens - used_tokens
    if remaining_tokens <= min(take + quota_tokens // 8, budget):
        return remaining_tokens
    if used_tokens > 0:
        return 0
    if remaining_tokens <= min(shortest, budget):
        return remaining_tokens
    return min(ceil(remaining_tokens / ceil(remaining_tokens / take)), budget)

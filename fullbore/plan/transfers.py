"""Time of messages between devices, by size."""

from __future__ import annotations

from fullbore.plan.links import Link


def all_reduce_s(link: Link, num_ranks: int, message_bytes: float) -> float:
    """Seconds until every rank has the sum, by the better of the two algorithms that engines choose from.

    One-shot: each rank reads all others' buffers, one latency. Ring: 2·(n-1) steps of a part of the message each. The
    first wins for the small messages of decoding, the second for prefill.
    """
    if num_ranks < 2:
        return 0.0
    others = num_ranks - 1
    one_shot_s = link.all_reduce_latency_s + others * message_bytes / link.bandwidth_bytes_s
    part_bytes = message_bytes / num_ranks
    ring_s = link.all_reduce_latency_s + 2 * others * (link.ring_step_latency_s + part_bytes / link.bandwidth_bytes_s)
    return min(one_shot_s, ring_s)


def all_gather_s(link: Link, num_ranks: int, part_bytes: float) -> float:
    """Seconds until every rank has all ranks' parts."""
    if num_ranks < 2:
        return 0.0
    return link.all_reduce_latency_s + (num_ranks - 1) * part_bytes / link.bandwidth_bytes_s


def send_s(link: Link, message_bytes: float) -> float:
    """Seconds from the end of a stage to the start of the next one."""
    return link.latency_s + message_bytes / link.bandwidth_bytes_s


def scaled_link(link: Link, factor: float) -> Link:
    """A link `factor` times as fast, in bandwidth and latency."""
    return Link(
        name=link.name,
        bandwidth_bytes_s=link.bandwidth_bytes_s * factor,
        latency_s=link.latency_s / factor,
        all_reduce_latency_s=link.all_reduce_latency_s / factor,
        ring_step_latency_s=link.ring_step_latency_s / factor,
        source=link.source,
    )

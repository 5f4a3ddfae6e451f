"""The records that stages and driver make of each micro-batch: when what happened, in monotonic nanoseconds.

Real stages and simulated ones fill the same struct. On one host CLOCK_MONOTONIC is shared by all processes, so the
times of different stages can be compared directly.
"""

from __future__ import annotations

from msgspec import Struct


class StageRecord(Struct, array_like=True, gc=False):
    """One micro-batch on one stage. Times never decrease from one field to the next.

    On stage 0 nothing is received: `receive_posted_ns == receive_end_ns`. On the last stage nothing is sent:
    `send_start_ns == send_end_ns`. `sample_end_ns == compute_end_ns` where nothing is sampled.
    """

    stage: int
    micro_batch_id: int
    plan_received_ns: int
    receive_posted_ns: int
    receive_end_ns: int
    compute_start_ns: int
    compute_end_ns: int
    sample_end_ns: int
    send_start_ns: int
    send_end_ns: int


class DriverRecord(Struct, array_like=True, gc=False):
    """One event in the driver, with the scheduler's state just after it.

    Events: "launch" (a micro-batch was sent to the stages), "result" (a micro-batch's tokens were applied), "arrival"
    (a request was added), "end" (a request was aborted or timed out). `micro_batch_id` is -1 for the last two; the
    fields after `is_memory_short` have a meaning for launches only.
    """

    at_ns: int
    event: str
    micro_batch_id: int
    running: int
    waiting: int
    ready: int  # decoding requests with a token to launch and none in flight
    in_flight: int
    free_blocks: int
    is_memory_short: bool  # the oldest waiting request, or the next prompt chunk, lacks KV blocks
    reason: str = ""  # see scheduler/micro_batch.py: LaunchReason
    reason_since_ns: int = 0
    num_requests: int = 0
    num_decodes: int = 0
    prefill_tokens: int = 0

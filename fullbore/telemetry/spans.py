"""The record that each stage makes of each micro-batch: when what happened, in monotonic nanoseconds.

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

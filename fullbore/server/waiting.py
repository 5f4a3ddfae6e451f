"""Requests that wait for their first token: how many, and whether more may come."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from fullbore.server.errors import ApiError

LONGEST_RETRY_S = 60


class WaitingRequests:
    """Outputs that have been asked for and have no token yet."""

    def __init__(self, most: int | None) -> None:
        """`most`: how many may wait; None: any number."""
        self._most = most
        self._since_s: dict[int, float] = {}  # request id -> arrival; the oldest first

    def __len__(self) -> int:
        return len(self._since_s)

    def check(self) -> None:
        """Raises ApiError (429) when no more may wait."""
        if self._most is not None and len(self._since_s) >= self._most:
            raise self._refusal()

    def enter(self, request_ids: Iterable[int]) -> None:
        """Lets outputs wait, all or none of them. Raises ApiError (429) when there are too many."""
        new = list(request_ids)
        if self._most is not None and self._since_s and len(self._since_s) + len(new) > self._most:
            raise self._refusal()
        self._since_s.update(dict.fromkeys(new, time.monotonic()))

    def leave(self, request_id: int) -> None:
        """The output's first token is there, or it has ended without one. More than once is fine."""
        self._since_s.pop(request_id, None)

    def _refusal(self) -> ApiError:
        # How long the oldest has waited is what a new one had better expect to wait.
        waited_s = time.monotonic() - next(iter(self._since_s.values()))
        retry_s = min(max(math.ceil(waited_s), 1), LONGEST_RETRY_S)
        return ApiError(
            429,
            f"{len(self._since_s)} requests are waiting already (--max-queued-requests); try again in {retry_s} s.",
            code="queue_full",
            headers={"Retry-After": str(retry_s)},
        )

"""What limits a request's output to a grammar, as far as the scheduler has to know."""

from __future__ import annotations

from typing import Literal, Protocol


class Constraint(Protocol):
    """A grammar's state after the request's output so far. It belongs to one request.

    The scheduler asks for `mask` whenever a token is to be drawn, also again after a preemption, and calls `accept`
    exactly once for each output token, in their order.
    """

    def mask(self) -> bytes:
        """The tokens that may come next, in the form of `Sampling.mask`: an end token only where an end may be."""
        ...

    def accept(self, token_id: int) -> Literal["stop", "grammar"] | None:
        """Takes the output's next token; "stop": nothing more may follow, "grammar": it cannot be followed."""
        ...

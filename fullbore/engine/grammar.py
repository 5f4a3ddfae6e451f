"""Grammars that outputs must follow: compiled by llguidance in a thread of their own, followed in the driver's loop."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple

from fullbore.engine.messages import AddRequest
from fullbore.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_CACHED_GRAMMARS = 256
# Bounds of one mask: about 4 ms of regular expressions and 1 ms of parsing, between two launches of others.
_STEP_LEXER_FUEL = 50_000
_STEP_MAX_ITEMS = 20_000


class GrammarConstraint:
    """A `Constraint`: the matcher of one request."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask_bytes = -(-vocab_size // 8)

    def mask(self) -> bytes:
        return self._matcher.compute_bitmask()[: self._mask_bytes]

    def accept(self, token_id: int) -> Literal["stop", "grammar"] | None:
        # It ran into a limit or a dead end; then the mask, which excludes everything wrong, has only the end token.
        if self._matcher.is_error() or not self._matcher.consume_token(token_id):
            return "grammar"
        return "stop" if self._matcher.is_stopped() else None


class GrammarCompiler:
    """Makes constraints for one model. Grammars are llguidance's serialised form; see `text.grammar` for making one."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids) or None
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the most recently used ones

    def load(self) -> None:
        """Reads the tokenizer, which takes up to a second and keeps other threads waiting meanwhile."""
        from llguidance import LLTokenizer

        if not self._tokenizer_file.is_file():
            return
        text = self._tokenizer_file.read_text(encoding="utf-8")
        # Some tokenizers have tokens that the model has no logits for; then their own number counts.
        for num_tokens in (self._vocab_size, None):
            with suppress(ValueError):  # or it cannot be used: nothing that other requests need
                self._tokenizer = LLTokenizer(text, n_vocab=num_tokens, eos_token=self._eos_token_ids)
                return

    def cached(self, grammar: str) -> GrammarConstraint | None:
        """A fresh constraint of a grammar that was compiled before."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            return None
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(matcher.deep_copy(), self._vocab_size)

    def compile(self, grammar: str) -> LLMatcher:
        """Takes milliseconds, for a few grammars seconds; other threads run meanwhile.

        Raises:
            RequestError: the grammar is wrong or too complex, or the model has no tokenizer that can be used.
        """
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            raise RequestError(
                "This model cannot follow a grammar or schema: its folder has no tokenizer.json that can be used.",
                "grammar",
            )
        limits = LLParserLimits(step_lexer_fuel=_STEP_LEXER_FUEL, step_max_items=_STEP_MAX_ITEMS, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one often takes longest, and not all is found out before
        if matcher.is_error():
            raise RequestError(f"The grammar or schema cannot be used: {_reason(matcher.get_error())}.", "grammar")
        return matcher

    def remember(self, grammar: str, matcher: LLMatcher) -> None:
        self._compiled[grammar] = matcher
        while len(self._compiled) > _CACHED_GRAMMARS:
            self._compiled.popitem(last=False)


def _reason(error: str) -> str:
    """What llguidance says, in one line."""
    if error.startswith("NoExtensionBias"):
        return "no text satisfies it"
    return " ".join(error.replace("<non-verbose/>", "").split())[:300].rstrip(".")


class Pending(NamedTuple):
    """A request that waits for its grammar."""

    message: AddRequest
    grammar: str
    arrival_s: float


class Compiled(NamedTuple):
    """A request whose grammar is ready, or wrong."""

    pending: Pending
    constraint: GrammarConstraint | RequestError


class GrammarQueue:
    """Requests that wait for their grammars. All methods belong to the driver's thread.

    `fileno` becomes readable when something is done, so that the driver can wait for it.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.is_loaded = False
        self._compiler = compiler
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: dict[int, Pending] = {}
        self._to_do: SimpleQueue[Pending] = SimpleQueue()
        self._done: SimpleQueue[tuple[Pending, LLMatcher | RequestError]] = SimpleQueue()
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def __len__(self) -> int:
        return len(self._waiting)

    def fileno(self) -> int:
        return self._event_fd

    def add(self, message: AddRequest, grammar: str, arrival_s: float) -> None:
        pending = Pending(message, grammar, arrival_s)
        self._waiting[message.request_id] = pending
        self._to_do.put(pending)

    def cached(self, grammar: str) -> GrammarConstraint | None:
        """A constraint that needs no waiting."""
        return self._compiler.cached(grammar)

    def finished(self) -> list[Compiled]:
        """The requests that need wait no more, in the order in which they came; aborted ones are left out."""
        with suppress(BlockingIOError):  # nothing new, or what is new is announced a moment later
            os.eventfd_read(self._event_fd)
        compiled = []
        while not self._done.empty():
            pending, result = self._done.get()
            if not isinstance(result, RequestError):
                self._compiler.remember(pending.grammar, result)
            if self._waiting.pop(pending.message.request_id, None) is None:
                continue
            constraint = result if isinstance(result, RequestError) else self._compiler.cached(pending.grammar)
            assert constraint is not None
            compiled.append(Compiled(pending, constraint))
        return compiled

    def remove(self, request_id: int) -> bool:
        """Gives up waiting for a request's grammar; False if it does not wait for one."""
        return self._waiting.pop(request_id, None) is not None

    def expire(self, now_s: float) -> list[int]:
        """Gives up the requests whose time is up, and returns them."""
        expired = [
            request_id
            for request_id, (message, _, arrival_s) in self._waiting.items()
            if message.timeout_s is not None and arrival_s + message.timeout_s <= now_s
        ]
        for request_id in expired:
            del self._waiting[request_id]
        return expired

    def _work(self) -> None:
        with suppress(Exception):  # a broken tokenizer: requests with a grammar are refused, others need none
            self._compiler.load()
        self.is_loaded = True  # in any case: the engine's start waits for it
        compiled = ""  # the last grammar: the choices of one request follow each other
        result: LLMatcher | RequestError
        while True:
            pending = self._to_do.get()
            if pending.message.request_id in self._waiting:  # else it was aborted, and nobody wants to know
                if pending.grammar != compiled:
                    compiled, result = pending.grammar, self._compile(pending.grammar)
                self._done.put((pending, result))
                os.eventfd_write(self._event_fd, 1)

    def _compile(self, grammar: str) -> LLMatcher | RequestError:
        try:
            return self._compiler.compile(grammar)
        except RequestError as error:
            return error
        except Exception as error:  # whatever it is, only this request may suffer
            return RequestError(f"The grammar or schema cannot be compiled: {type(error).__name__}.", "grammar")

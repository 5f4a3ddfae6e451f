"""Token ids in, text out, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a decoder prints for bytes that are not (yet) a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Decoded together with new tokens, so that a decoder that treats the start of a text specially (SentencePiece drops its
# leading space) sees the middle of one.
CONTEXT_TOKENS = 6
# A UTF-8 character has at most 4 bytes and a token at least one: the last 3 tokens may be part of an unfinished one.
UNFINISHED_TOKENS = 3
# Invalid bytes may go on for ever. Beyond this many waiting tokens the finished ones are emitted as they are.
MAX_WAITING_TOKENS = 16


class Detokenizer:
    """Turns the tokens of one output into text as they come.

    The texts returned by `push` and `flush` together are what decoding all tokens at once gives. Every call decodes a
    window of at most CONTEXT_TOKENS + MAX_WAITING_TOKENS tokens: linear in the length of the output.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        """`decode` maps token ids to text; `prompt_token_ids` precede the output and are never emitted."""
        self._decode = decode
        self._context = list(prompt_token_ids[-CONTEXT_TOKENS:])  # text already out
        self._waiting: list[int] = []  # text not out yet

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that has become certain, "" while a character is unfinished."""
        self._waiting.append(token_id)
        text = self._text_after_context(self._waiting)
        if not text.endswith(REPLACEMENT):
            return self._emit(text, len(self._waiting))
        if len(self._waiting) > MAX_WAITING_TOKENS:
            return self._emit_finished(text)
        return ""

    def flush(self) -> str:
        """The text still held back, an unfinished character as a replacement character. To be called at the end."""
        return self._emit(self._text_after_context(self._waiting), len(self._waiting))

    def _emit_finished(self, text: str) -> str:
        # A cut between two characters (or between invalid bytes) is one where both sides decode to the same text apart.
        for end in range(len(self._waiting) - UNFINISHED_TOKENS, 0, -1):
            head = self._text_after_context(self._waiting[:end])
            if head + self._decode(self._waiting[end:]) == text:
                return self._emit(head, end)
        return self._emit(text, len(self._waiting))

    def _emit(self, text: str, num_tokens: int) -> str:
        self._context = (self._context + self._waiting[:num_tokens])[-CONTEXT_TOKENS:]
        del self._waiting[:num_tokens]
        return text

    def _text_after_context(self, token_ids: list[int]) -> str:
        context_text = self._decode(self._context)
        text = self._decode(self._context + token_ids)
        if text.startswith(context_text):
            return text[len(context_text) :]
        # The decoder has changed its mind about text that is already out (invalid byte-fallback tokens).
        return self._decode(token_ids)

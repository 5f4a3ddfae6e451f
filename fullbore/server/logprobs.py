"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.scheduler.logprobs import TokenLogprob
from fullbore.server.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from fullbore.text.token_bytes import num_characters, readable
from fullbore.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what OpenAI sends for "never"; JSON has no infinity


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], num_top: int
) -> ChatLogprobs:
    """Of consecutive tokens of an answer, an element for each."""
    content = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        token = tokenizer.token_bytes(token_id)
        top = [_top(tokenizer, *likely) for likely in found.top[:num_top]]
        logprob = _finite(found.logprob)
        content.append(ChatLogprob(token=readable(token), logprob=logprob, bytes=list(token), top_logprobs=top))
    return ChatLogprobs(content=content)


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice's text, from its beginning on, in one piece or many."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Of the next tokens; None where a token has no probability, since it follows nothing."""
        document = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, found in zip(token_ids, logprobs, strict=True):
            token = self._tokenizer.token_bytes(token_id)
            document.tokens.append(readable(token))
            document.token_logprobs.append(None if found is None else _finite(found.logprob))
            document.top_logprobs.append(None if found is None else self._top_of(token_id, found))
            document.text_offset.append(self._offset)
            if not self._tokenizer.is_special(token_id):
                self._offset += num_characters(token)
        return document

    def _top_of(self, token_id: int, found: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, as OpenAI has it, always the token itself."""
        top = {readable(self._tokenizer.token_bytes(likely)): _finite(logprob) for likely, logprob in found.top}
        top.setdefault(readable(self._tokenizer.token_bytes(token_id)), _finite(found.logprob))
        return top


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    token = tokenizer.token_bytes(token_id)
    return TopLogprob(token=readable(token), logprob=_finite(logprob), bytes=list(token))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)

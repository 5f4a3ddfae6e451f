"""The text of one output while its tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fullbore.scheduler.logprobs import TokenLogprob
from fullbore.scheduler.request import FinishReason, TokenOutput
from fullbore.text.detokenizer import Detokenizer
from fullbore.text.stop_strings import StopMatcher
from fullbore.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizes one output and ends it at a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`decode`: instead of the tokenizer's own. Neither of `stop` and `stop_token_ids` becomes part of the text.

        `stop` is looked for in what comes after `min_tokens`; tokens end the output by the engine's word.
        """
        self._detokenizer = Detokenizer(decode or tokenizer.decode, prompt_token_ids)
        self._matcher = StopMatcher(stop)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # one for each of `token_ids`, if the request asked for them
        self.prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token, which follows none
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, output: TokenOutput) -> str:
        """Takes the engine's next output; returns the text that it makes certain.

        When `finish_reason` is set afterwards the output has ended, by the engine's word or by a stop string; in the
        latter case the engine still has to be told.
        """
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self._take_logprobs(output)
        text = ""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
            if output.finish_reason != "stop" or output.token_id not in self._stop_token_ids:
                text = self._match(self._detokenizer.push(output.token_id))
        if output.finish_reason is not None and self._matcher.found is None:
            text += self._match(self._detokenizer.flush()) + self._matcher.flush()
        self.finish_reason = "stop" if self._matcher.found is not None else output.finish_reason
        return text

    def _match(self, text: str) -> str:
        return text if len(self.token_ids) <= self._min_tokens else self._matcher.push(text)

    def _take_logprobs(self, output: TokenOutput) -> None:
        if output.logprobs is not None:
            self.logprobs += output.logprobs.unpack()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *output.prompt_logprobs.unpack()]

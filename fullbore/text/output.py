"""The text of one output while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.scheduler.request import FinishReason, TokenOutput
from fullbore.text.detokenizer import Detokenizer
from fullbore.text.stop_strings import StopMatcher
from fullbore.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizes one output and ends it at a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_token_ids)
        self._matcher = StopMatcher(stop)
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, output: TokenOutput) -> str:
        """Takes the engine's next output; returns the text that it makes certain.

        When `finish_reason` is set afterwards the output has ended, by the engine's word or by a stop string; in the
        latter case the engine still has to be told.
        """
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = ""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
            text = self._matcher.push(self._detokenizer.push(output.token_id))
        if output.finish_reason is not None and self._matcher.found is None:
            text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        self.finish_reason = "stop" if self._matcher.found is not None else output.finish_reason
        return text

"""One request from its checked prompt to the last piece of text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fullbore.errors import LogitsError
from fullbore.scheduler.request import SamplingParams
from fullbore.server.errors import ApiError
from fullbore.server.responses import FinishReason, PromptTokensDetails, Usage
from fullbore.server.state import ServerState
from fullbore.text.output import OutputText
from fullbore.text.requests import make_request


class Generation:
    """Runs one request on the engine."""

    def __init__(self, state: ServerState, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises RequestError when the engine cannot serve this."""
        self._request = make_request(state.engine.next_request_id(), prompt_token_ids, params, state.engine.info)
        self._engine = state.engine
        self._metrics = state.metrics
        self._output = OutputText(state.tokenizer, prompt_token_ids, params.stop)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yields text as it becomes certain, then ends; `finish_reason` and `usage` are known from then on.

        Closing the generator early aborts the request.

        Raises:
            LogitsError: the model gave no usable logits.
            ApiError: the output was cut.
            EngineDeadError: the pipeline is gone.
        """
        with self._metrics.request() as timing:
            async with aclosing(self._engine.generate(self._request)) as outputs:
                async for output in outputs:
                    text = self._output.push(output)
                    if output.token_id is not None:
                        timing.on_token(time.perf_counter())
                    if text:
                        yield text
                    if self._output.finish_reason is not None:
                        break
            timing.finish_reason = self.finish_reason

    async def text(self) -> str:
        """The whole output. Raises as `pieces` does."""
        return "".join([piece async for piece in self.pieces()])

    @property
    def finish_reason(self) -> FinishReason:
        reason = self._output.finish_reason
        if reason == "stop" or reason == "length":
            return reason
        if reason == "error":
            raise LogitsError
        raise ApiError(503, "The output was cut because the server is shutting down.", code="shutting_down")

    @property
    def usage(self) -> Usage:
        num_prompt, num_output = len(self._request.prompt_token_ids), len(self._output.token_ids)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._output.num_cached_tokens),
        )

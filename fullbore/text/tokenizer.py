"""The model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from jinja2 import TemplateError

from fullbore.errors import ModelError, RequestError
from fullbore.text.token_bytes import TokenBytes

_LONG_CHARS = 2000  # a shorter text takes about a millisecond
# Without any of these there can be no tokenizer.
_FILES = ("tokenizer*", "*.model", "vocab*", "merges*", "tekken*", "*.tiktoken")


class FunctionCall(TypedDict):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """OpenAI's form of a call, but with the arguments as an object: chat templates write the JSON themselves."""

    id: str
    type: str
    function: FunctionCall


class ChatMessage(TypedDict):
    """One turn of a conversation, as chat templates expect it."""

    role: str
    content: str
    tool_calls: NotRequired[list[ToolCall]]  # of an assistant
    tool_call_id: NotRequired[str]  # of a tool's answer
    name: NotRequired[str]


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, pretrained: Any) -> None:
        """`pretrained`: a transformers tokenizer backed by the tokenizers library."""
        self._pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        # Some tokenizer files cut every text to the length used in training.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = TokenBytes(self._backend)
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._longest_token_chars = max((len(token) for token in pretrained.get_vocab()), default=1)

    @classmethod
    def load(cls, model_path: Path | str) -> Tokenizer:
        """Reads the tokenizer in a model folder.

        Raises:
            ModelError: there is none, it is broken, or it needs code of its own.
        """
        if Path(model_path).is_dir() and not any(any(Path(model_path).glob(name)) for name in _FILES):
            raise ModelError(
                f"No tokenizer in {model_path}; the folder needs tokenizer.json, "
                "or the files that transformers makes one from."
            )
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            pretrained = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except Exception as error:  # every tokenizer format fails in its own way
            raise ModelError(
                f"No usable tokenizer in {model_path} ({_first_line(error)}). "
                "The folder needs tokenizer.json, or the files that transformers makes one from."
            ) from error
        if not getattr(pretrained, "is_fast", False):
            raise ModelError(
                f"The tokenizer in {model_path} ({type(pretrained).__name__}) is not backed by the tokenizers library; "
                "convert it to a tokenizer.json first."
            )
        return cls(pretrained)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    @property
    def chat_template(self) -> str:
        """Its source; of several the default one. Empty without one."""
        template = self._pretrained.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        return str(template or "")

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for functions."""
        return "tools" in self.chat_template

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's length in tokens, without the work of finding them."""
        return len(text) // self._longest_token_chars

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts in what the model wants at the start, such as BOS.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("The text contains a lone surrogate, which is not valid Unicode.", "prompt") from error
        if len(text) < _LONG_CHARS:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The same, but other threads may run meanwhile: tokens on their way to other clients do not wait.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens such as end-of-text. Ids that are no token give nothing."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: list[int]) -> str:
        """Text of token ids, with special tokens."""
        if len(token_ids) < _LONG_CHARS:
            return str(self._backend.decode(token_ids, skip_special_tokens=False))
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=False)  # other threads may run meanwhile
        return str(text)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it, "" for ids that are no token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def decoder_that_keeps(self, markers: Collection[str]) -> Callable[[list[int]], str]:
        """As `decode`, but special tokens among `markers` stay in the text."""
        added = self._backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        kept = {token_id for token_id in special if added[token_id].content in markers}
        if not kept:
            return self.decode
        dropped = special - kept
        return lambda token_ids: self.decode_all([token_id for token_id in token_ids if token_id not in dropped])

    def token_bytes(self, token_id: int) -> bytes:
        """What a single token stands for, perhaps a part of a character; special tokens stand for their names."""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return token_id in self._special_ids

    def format_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation in the model's chat format, special tokens included, up to where the answer starts.

        Args:
            tools: functions that may be called, in OpenAI's form; see `knows_tools`.
            add_generation_prompt: end with the beginning of the answer.

        Raises:
            RequestError: the model has no chat template, or its template refuses these messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "This model has no chat template; use /v1/completions (LLM.generate) with the prompt as plain text.",
                "messages",
            )
        try:
            text = self._pretrained.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {_first_line(error)}", "messages"
            ) from error
        return str(text)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

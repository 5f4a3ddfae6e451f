"""The bytes of single tokens, which may be less than a character; for log-probabilities."""

from __future__ import annotations

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """What each token stands for, wherever it is in a text; special tokens stand for their names."""

    def __init__(self, backend: Any) -> None:
        """`backend`: a tokenizer of the tokenizers library."""
        self._backend = backend
        kind = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._is_byte_level = b'"ByteLevel"' in kind
        self._byte_of_char = _byte_level_alphabet() if self._is_byte_level else {}
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
        }

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that is no token, as padding of the vocabulary."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(self._byte_of_char.get(char) or char.encode() for char in token)
        found = _BYTE_TOKEN.fullmatch(token)
        if found is not None:
            return bytes.fromhex(found[1])
        return str(token.replace(_SENTENCEPIECE_SPACE, " ")).encode()


def readable(token: bytes) -> str:
    r"""A token's bytes as text, `\xe2` for bytes that are not a whole character."""
    return token.decode("utf-8", "backslashreplace")


def num_characters(token: bytes) -> int:
    """How many characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in token)


def _byte_level_alphabet() -> dict[str, bytes]:
    """Byte-level BPE (GPT-2) writes each byte as a printable character: its own, or the next free one from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): bytes([byte]) for byte in own}
    return alphabet | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}

"""Single tokens as bytes, and what ends an output beside the engine."""

from __future__ import annotations

from array import array

import pytest
from tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, make_byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fullbore.scheduler.logprobs import Logprobs
from fullbore.scheduler.request import TokenOutput
from fullbore.text.output import OutputText
from fullbore.text.token_bytes import TokenBytes, num_characters, readable
from fullbore.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(make_byte_tokenizer())


@pytest.mark.parametrize("text", ["plain", "naïve 😀 你好", "a\n\t\0b"])
def test_the_bytes_of_a_text_s_tokens_are_the_text_s(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_every_byte_has_its_token() -> None:
    assert {TOKENIZER.token_bytes(token_id) for token_id in range(256)} == {bytes([byte]) for byte in range(256)}


def test_special_tokens_stand_for_their_names() -> None:
    for token_id, name in zip(range(256, VOCAB_SIZE), SPECIAL_TOKENS, strict=True):
        assert TOKENIZER.token_bytes(token_id) == name.encode()
        assert TOKENIZER.is_special(token_id)
    assert not TOKENIZER.is_special(65)
    assert TOKENIZER.token_bytes(VOCAB_SIZE + 5) == b""


def test_sentencepiece_with_byte_fallback() -> None:
    vocabulary = {"<unk>": 0, "\N{LOWER ONE EIGHTH BLOCK}the": 1, "<0xE2>": 2, "<0x0A>": 3, "ü": 4}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    of = TokenBytes(backend)
    assert [of[token_id] for token_id in range(1, 5)] == [b" the", b"\xe2", b"\n", "ü".encode()]


def test_readable_and_number_of_characters() -> None:
    assert readable("ü!".encode()) == "ü!"
    assert readable(b"\xe2\x82") == "\\xe2\\x82"
    pieces = ["€uro".encode()[:2], "€uro".encode()[2:]]
    assert [num_characters(piece) for piece in pieces] == [1, 3]


# ------------------------------------------------------------------------------------------------------- the output


def push_all(output: OutputText, token_ids: list[int], finish_reason: str | None = None) -> str:
    text = ""
    for place, token_id in enumerate(token_ids):
        reason = finish_reason if place == len(token_ids) - 1 else None
        text += output.push(TokenOutput(0, token_id, reason))  # type: ignore[arg-type]
        if output.finish_reason is not None:
            break
    return text


def test_a_stop_token_is_a_token_but_not_text() -> None:
    output = OutputText(TOKENIZER, [], [], stop_token_ids=(65,))
    token_ids = [*TOKENIZER.encode("ab"), 65]
    assert push_all(output, token_ids, "stop") == "ab"
    assert output.token_ids == token_ids
    assert output.finish_reason == "stop"


def test_a_token_that_would_stop_is_text_when_something_else_ended_the_output() -> None:
    for finish_reason in ("length", None):
        output = OutputText(TOKENIZER, [], [], stop_token_ids=(65,))
        assert push_all(output, [66, 65], finish_reason) == TOKENIZER.decode([66, 65])


def test_the_last_token_of_a_grammar_is_text() -> None:
    output = OutputText(TOKENIZER, [], [])
    assert push_all(output, TOKENIZER.encode("{}"), "stop") == "{}"


def test_an_unfinished_character_before_a_stop_token() -> None:
    output = OutputText(TOKENIZER, [], [], stop_token_ids=(EOS_TOKEN_ID,))
    assert push_all(output, [*TOKENIZER.encode("aü")[:2], EOS_TOKEN_ID], "stop") == "a\N{REPLACEMENT CHARACTER}"


def test_stop_strings_begin_after_min_tokens() -> None:
    output = OutputText(TOKENIZER, [], ["."], min_tokens=2)
    assert push_all(output, TOKENIZER.encode("..ab.c")) == "..ab"
    assert output.finish_reason == "stop"


def test_logprobs_are_collected() -> None:
    output = OutputText(TOKENIZER, [1, 2], [])
    one = Logprobs(array("f", [-0.5]).tobytes(), array("I", [7]).tobytes(), array("f", [-0.25]).tobytes())
    output.push(TokenOutput(0, 66, None, 0, one, one))
    output.push(TokenOutput(0, 67, "length", 0, one))
    assert output.logprobs == [(-0.5, [(7, -0.25)])] * 2
    assert output.prompt_logprobs == [None, (-0.5, [(7, -0.25)])]

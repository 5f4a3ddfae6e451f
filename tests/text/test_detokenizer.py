"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fullbore.text.detokenizer import CONTEXT_TOKENS, MAX_WAITING_TOKENS, REPLACEMENT, Detokenizer

SAMPLE = ["The quick brown fox — jumps over 12 lazy dogs. Grüße, naïve café! 你好世界 😀👩‍👩‍👧 здравствуй " * 4]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama 2's kind: a marker for spaces, bytes for what is not in the vocabulary, the first space dropped."""
    pieces = ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁Hello", "▁world", "s", "!", "é"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece_like()


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, prompt or [])
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_text_of_decoding_them_at_once(token_ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert sum(REPLACEMENT in piece for piece in pieces) <= text.count(REPLACEMENT)


def test_a_finished_character_is_not_held_back() -> None:
    token_ids = BYTE_LEVEL.encode("zQ😀x").ids
    pieces = stream(BYTE_LEVEL, token_ids)
    for count in range(1, len(token_ids) + 1):
        whole = BYTE_LEVEL.decode(token_ids[:count])
        assert "".join(pieces[:count]) == whole.rstrip(REPLACEMENT)


@pytest.mark.parametrize("bad_bytes", [[0x80], [0xF0, 0x9F], [0xE2, 0x82], [0xFF], [0xF0, 0x9F, 0x98]])
def test_endless_invalid_bytes_are_emitted_as_they_are(bad_bytes: list[int]) -> None:
    table = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    other = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(other)}
    assert sorted(symbol.values()) == table
    token_ids = [BYTE_LEVEL.token_to_id(symbol[byte]) for byte in bad_bytes] * 60
    pieces = stream(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids)
    for count in range(MAX_WAITING_TOKENS + 1, len(token_ids)):
        assert len("".join(pieces[:count])) >= (count - MAX_WAITING_TOKENS - 1) // len(bad_bytes)


def test_work_per_token_is_bounded() -> None:
    decoded_lengths: list[int] = []

    def decode(token_ids: list[int]) -> str:
        decoded_lengths.append(len(token_ids))
        return BYTE_LEVEL.decode(token_ids)

    detokenizer = Detokenizer(decode)
    for token_id in BYTE_LEVEL.encode("".join(SAMPLE) * 5).ids:
        detokenizer.push(token_id)
    assert max(decoded_lengths) <= CONTEXT_TOKENS + MAX_WAITING_TOKENS + 1


def test_a_space_between_prompt_and_output_is_kept() -> None:
    hello, world = SENTENCEPIECE.token_to_id("▁Hello"), SENTENCEPIECE.token_to_id("▁world")
    assert SENTENCEPIECE.decode([world]) == "world"
    assert "".join(stream(SENTENCEPIECE, [world, world], prompt=[hello])) == " world world"


def test_bytes_of_a_character_missing_from_the_vocabulary() -> None:
    token_ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    exclamation = SENTENCEPIECE.token_to_id("!")
    assert stream(SENTENCEPIECE, [exclamation, *token_ids, exclamation]) == ["!", "", "", "€", "!", ""]


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1), max_size=60))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_garbage_neither_fails_nor_loses_the_rest(token_ids: list[int]) -> None:
    marker = SENTENCEPIECE.token_to_id("▁Hello")
    assert "".join(stream(SENTENCEPIECE, [*token_ids, marker])).endswith("Hello")


def test_special_tokens_are_not_text() -> None:
    end = BYTE_LEVEL.token_to_id("<|end|>")
    token_ids = [*BYTE_LEVEL.encode("quick").ids, end, *BYTE_LEVEL.encode(" fox").ids]
    assert "".join(stream(BYTE_LEVEL, token_ids)) == "quick fox"


def test_an_output_that_ends_inside_a_character() -> None:
    token_ids = BYTE_LEVEL.encode("Q𝔘").ids[:-1]
    pieces = stream(BYTE_LEVEL, token_ids)
    assert "".join(pieces[:-1]) == "Q"
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids)

"""Prompts of a wanted length for servers whose tokenizer is not known, or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from fullbore.errors import ConfigError

# Frequent words, which nearly every tokenizer keeps whole.
_WORDS = (  # noqa: SIM905 (words are easier to read as text)
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend"
).split()


@dataclass(frozen=True)
class Prompt:
    """What one request sends and how much it wants back."""

    text: str
    output_tokens: int


@dataclass(frozen=True)
class RandomPrompts:
    """Texts of about `input_tokens` tokens that share no prefix, so that no cache shortens the work."""

    input_tokens: int
    output_tokens: int
    tokens_per_word: float = 1.0
    fixed_tokens: float = 0.0  # what the server adds: chat template, begin-of-text
    seed: int = 0

    def __iter__(self) -> Iterator[Prompt]:
        random = Random(self.seed)
        words = max(round((self.input_tokens - self.fixed_tokens) / self.tokens_per_word), 1)
        while True:
            yield Prompt(" ".join(random.choices(_WORDS, k=words)), self.output_tokens)


_FEW_WORDS, _MANY_WORDS = 16, 144


def calibration_texts(seed: int) -> tuple[str, str]:
    """A short and a long text; how many tokens a server makes of each tells how to make prompts of a wanted length."""
    random = Random(seed + 1)
    return " ".join(random.choices(_WORDS, k=_FEW_WORDS)), " ".join(random.choices(_WORDS, k=_MANY_WORDS))


def calibrated(prompts: RandomPrompts, few_tokens: int, many_tokens: int) -> RandomPrompts:
    """The same prompts, with as many words as give the wanted length in tokens.

    Args:
        few_tokens, many_tokens: what the server makes of the two `calibration_texts`, all it adds included.
    """
    per_word = max((many_tokens - few_tokens) / (_MANY_WORDS - _FEW_WORDS), 0.1)
    fixed = few_tokens - _FEW_WORDS * per_word
    return replace(prompts, tokens_per_word=per_word, fixed_tokens=fixed)


def read_dataset(path: Path, output_tokens: int) -> list[Prompt]:
    """Prompts from a JSON-lines file: `{"prompt": "…", "output_tokens": 64}` (the latter optional), or plain strings.

    Raises:
        ConfigError: naming the line that is wrong.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_parse_line(path, number, line, output_tokens))
    if not prompts:
        raise ConfigError(f"--dataset {path} has no prompts; it needs a JSON object with `prompt` on each line.")
    return prompts


def _parse_line(path: Path, number: int, line: str, output_tokens: int) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is not JSON: {error}.") from error
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"]:
        raise ConfigError(f'{path}, line {number} has no text under "prompt".')
    wanted = entry.get("output_tokens", entry.get("max_tokens", output_tokens))
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ConfigError(f"{path}, line {number}: output_tokens must be a whole number of at least 1.")
    return Prompt(entry["prompt"], wanted)

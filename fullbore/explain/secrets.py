"""Secrets never leave: whatever is printed goes through `mask`."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"

# Names whose value is secret whatever it looks like. A bare "token" is not one of them: tokens are our daily business.
_SECRET_NAME = (
    r"(?:[\w.-]*(?:api[-_]?key|secret|passw(?:or)?d|passwd|credential|private[-_]?key|access[-_]?key|auth[-_]?token"
    r"|access[-_]?token|bearer[-_]?token|hub[-_]token|hf[-_]token|ssl[-_]keyfile[-_]password|watermark[-_]key)[\w.-]*"
    r"|[A-Z][A-Z0-9_]*_TOKEN|TOKEN|[A-Z][A-Z0-9_]*_KEY)"
)
_VALUE = r"(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;&\"'}\])]+)"
_NAMED = re.compile(rf"(?P<name>(?<![\w-])-{{0,2}}{_SECRET_NAME})(?P<mid>[\"']?\s*[=:]\s*|\s+)(?P<value>{_VALUE})")
_NOT_SECRET = re.compile(r"(?i)[\"']?(?:none|null|true|false|<redacted>|\*+|)[\"']?$")
_LITERALS = re.compile(
    r"\bhf_[A-Za-z0-9]{6,}|\bsk-[A-Za-z0-9_-]{6,}|\bgh[pousr]_[A-Za-z0-9]{10,}|\bgithub_pat_\w{10,}|\bglpat-[\w-]{10,}"
    r"|\bnvapi-[\w-]{6,}|\bAKIA[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bxox[abprs]-[\w-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+(?!token\b)([\w.~+/=-]{4,})")
_URL_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@")
_SHORTEST = 4  # shorter values are masked where they stand, not everywhere


class Masker:
    """Masks by pattern, and every value that was seen under a secret name, wherever else it occurs."""

    def __init__(self) -> None:
        self._learned: set[str] = set()

    def learn(self, text: str) -> None:
        """Remembers the values that stand under secret names in `text`."""
        for match in _NAMED.finditer(text):
            value = match["value"].strip("\"'")
            is_flag_or_word = match["mid"].isspace() and (value.startswith("-") or not match["name"].startswith("-"))
            if not is_flag_or_word:
                self.learn_value(value)
        for match in _BEARER.finditer(text):
            self.learn_value(match[2])

    def learn_value(self, value: str) -> None:
        if len(value) >= _SHORTEST and not _NOT_SECRET.match(value) and not value.isdigit():
            self._learned.add(value)

    def mask(self, text: str) -> str:
        for value in sorted(self._learned, key=len, reverse=True):
            text = text.replace(value, MASK)
        text = _URL_LOGIN.sub(rf"\1{MASK}@", text)
        text = _BEARER.sub(rf"\1 {MASK}", text)
        text = _LITERALS.sub(MASK, text)
        return _NAMED.sub(_mask_named, text)

    def mask_tree(self, tree: Any) -> Any:
        """The same for all strings in lists and dicts."""
        if isinstance(tree, str):
            return self.mask(tree)
        if isinstance(tree, dict):
            return {key: self.mask_tree(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self.mask_tree(value) for value in tree]
        return tree


def _mask_named(match: re.Match[str]) -> str:
    value = match["value"]
    if match["mid"].isspace() and (value.startswith("-") or not match["name"].startswith("-")):
        return match[0]  # a sentence about API keys, or a flag without a value
    if _NOT_SECRET.match(value):
        return match[0]
    return match["name"] + match["mid"] + MASK

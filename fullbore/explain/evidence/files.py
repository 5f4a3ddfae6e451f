"""Opening evidence: what kind of bytes, which encoding, line by line in bounded memory. The only I/O of explain."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

HEAD_BYTES = 1 << 16
MAX_LINE_CHARS = 1 << 20
MAX_FILES = 2000
MAX_DEPTH = 6

Line = tuple[int, str]

_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


@dataclass
class EvidenceFile:
    """A file that is evidence or may be. `problem` says what went wrong while reading, as far as it got."""

    path: Path
    name: str  # as shown: relative to what the user gave
    head: str = ""
    is_binary: bool = False
    is_empty: bool = False
    problem: str | None = None
    _encoding: str = field(default="utf-8", repr=False)

    def __post_init__(self) -> None:
        try:
            with self._open() as stream:
                raw = stream.read(HEAD_BYTES)
        except _READ_ERRORS as error:
            raw = self._what_can_be_read(error)
        self.is_empty = not raw.strip()
        self._encoding = _encoding_of(raw)
        self.head = raw.decode(self._encoding, errors="replace").removeprefix("\ufeff")
        self.is_binary = self._encoding == "utf-8" and _looks_binary(raw)

    def lines(self) -> Iterator[Line]:
        """(line number, line without its end); a longer line than `MAX_LINE_CHARS` is cut."""
        try:
            with io.TextIOWrapper(self._open(), encoding=self._encoding, errors="replace", newline=None) as text:
                yield from _bounded_lines(text)
        except _READ_ERRORS as error:
            self.problem = _explain(error)

    def chunks(self) -> Iterator[str]:
        """The text in pieces, for formats whose lines have no bounds."""
        try:
            with io.TextIOWrapper(self._open(), encoding=self._encoding, errors="replace") as text:
                while chunk := text.read(HEAD_BYTES):
                    yield chunk
        except _READ_ERRORS as error:
            self.problem = _explain(error)

    def text(self, max_chars: int) -> str:
        """The whole text, cut at `max_chars`."""
        pieces: list[str] = []
        size = 0
        for chunk in self.chunks():
            pieces.append(chunk)
            size += len(chunk)
            if size >= max_chars:
                self.problem = self.problem or f"longer than {max_chars:,} characters, the rest was not read"
                break
        return "".join(pieces)[:max_chars].removeprefix("\ufeff")

    def _open(self) -> BinaryIO:
        with self.path.open("rb") as raw:
            start = raw.read(8)
        for magic, opener in _COMPRESSED.items():
            if start.startswith(magic):
                return cast(BinaryIO, opener(self.path, "rb"))
        return self.path.open("rb")

    def _what_can_be_read(self, error: Exception) -> bytes:
        """The beginning of a damaged file, byte by byte up to the damage."""
        self.problem = _explain(error)
        raw = bytearray()
        try:
            with self._open() as stream:
                while len(raw) < HEAD_BYTES and (piece := stream.read(256)):
                    raw += piece
        except _READ_ERRORS:
            pass
        return bytes(raw)


def find_files(paths: list[Path]) -> tuple[list[EvidenceFile], list[str]]:
    """Files given or inside given folders, in a stable order, and what could not be looked at."""
    found: list[EvidenceFile] = []
    problems: list[str] = []
    for path in paths:
        if path.is_dir():
            names = list(_walk(path, 0, problems))
            root = path
        elif path.exists():
            names, root = [path], path.parent
        else:
            problems.append(f"{path}: no such file or folder")
            continue
        if len(names) > MAX_FILES:
            problems.append(f"{path}: {len(names):,} files, only the first {MAX_FILES:,} were read")
        found += [EvidenceFile(name, str(name.relative_to(root))) for name in sorted(names, key=_by_number)[:MAX_FILES]]
    return found, problems


def _walk(folder: Path, depth: int, problems: list[str]) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        problems.append(f"{folder}: {_explain(error)}")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if depth < MAX_DEPTH and not entry.is_symlink():
                yield from _walk(entry, depth + 1, problems)
        elif entry.is_file():
            yield entry


def _by_number(path: Path) -> list[tuple[int, int, str]]:
    """rank2 before rank10."""
    pieces: list[tuple[int, int, str]] = []
    digits = ""
    for char in f"{path} ":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            pieces.append((0, int(digits[:18]), ""))
            digits = ""
        pieces.append((1, 0, char))
    return pieces


def _bounded_lines(text: io.TextIOWrapper) -> Iterator[Line]:
    number = 0
    while line := text.readline(MAX_LINE_CHARS):
        number += 1
        yield number, line.rstrip("\r\n").removeprefix("\ufeff").replace("\0", "")
        while not line.endswith("\n") and (line := text.readline(MAX_LINE_CHARS)):
            pass  # the rest of an overlong line


def _encoding_of(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"  # what PowerShell's > writes
    sample = raw[:512]
    if len(sample) >= 32 and sample[1::2].count(0) > len(sample) * 0.4 and sample[0::2].count(0) < len(sample) * 0.05:
        return "utf-16-le"
    return "utf-8"


_HOLE = re.compile(rb"\0{16,}")  # what a log that was cut short while it was written to has instead of its beginning


def _looks_binary(raw: bytes) -> bool:
    sample = _HOLE.sub(b"", raw)[:8192]
    if not sample:
        return bool(raw)
    odd = sum(byte < 9 or (13 < byte < 32 and byte != 27) for byte in sample)
    return (sample.count(0) > 0 and odd > len(sample) * 0.01) or odd > len(sample) * 0.05


def _explain(error: Exception) -> str:
    if isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile):
        return "the compressed data is damaged or cut short; what precedes the damage was read"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return str(getattr(error, "strerror", None) or error)

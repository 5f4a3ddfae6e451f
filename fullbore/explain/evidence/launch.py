"""How an engine was started: command lines in scripts, shell history, `ps`, compose files and unit files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fullbore.explain.evidence.files import Line
from fullbore.explain.evidence.recognise import ENGINE_COMMANDS
from fullbore.explain.facts import Reading, Source

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.S)
_ENV_NAME = re.compile(r"^[A-Z][A-Z0-9_]+$")
_KEYWORD = re.compile(r"\b([a-z]\w*)\s*=\s*('[^']*'|\"[^\"]*\"|\{[^}]*\}|[\w.+-]+)")
_FLAG = re.compile(r"^--?[A-Za-z]")
_MAX_LAUNCHES = 64


@dataclass
class Launch:
    """One start of one engine. Names of flags are without dashes: `pp_size`, `enforce_eager`."""

    engine: str
    source: Source
    label: str = ""  # the comment before it, or empty
    command: str = ""
    flags: dict[str, Reading] = field(default_factory=dict)
    env: dict[str, Reading] = field(default_factory=dict)


def read(lines: Iterable[Line], file: str) -> list[Launch]:
    """Every launch in the file; environment variables set on lines of their own belong to all that follow."""
    launches: list[Launch] = []
    env: dict[str, Reading] = {}
    label = ""
    for line_number, line in _logical_lines(lines):
        source = Source(file, line_number)
        if line.lstrip().startswith(("#", "//")) and not line.startswith("#!"):
            label = line.lstrip("#/ \t")
            continue
        engine = engine_of(line)
        if engine is None:
            env |= _settings_alone(line, source)
            continue
        launch = parse(line, engine, source)
        launch.label, label = label, ""
        launch.env = env | launch.env
        launches.append(launch)
        if len(launches) == _MAX_LAUNCHES:
            break
    return _merge_parts(launches)


def engine_of(line: str) -> str | None:
    """Which engine a command line starts, if it does."""
    if re.search(r"\bgrep\b", line):
        return None
    for engine, pattern in ENGINE_COMMANDS.items():
        if pattern.search(line):
            return engine
    return None


def parse(line: str, engine: str, source: Source) -> Launch:
    """Flags and environment of one command line."""
    launch = Launch(engine, source, command=line)
    if re.search(r"python[\d.]*\s+-c\b|\bLLM\(|from_pretrained\(|\bEngine\(", line):
        for name, value in _KEYWORD.findall(line):
            launch.flags.setdefault(name, Reading(name, value.strip("'\""), source))
        return launch
    words = _words(line)
    model = re.search(r"\b(?:vllm serve|ollama run|fullbore (?:serve|generate)|lmdeploy serve \w+)\s+([^\s-]\S*)", line)
    if model is not None:
        launch.flags["model"] = Reading("model", model[1], source)
    for position, word in enumerate(words):
        if word == "-m" and position and words[position - 1].rsplit("/")[-1].startswith("python"):
            continue  # a Python module, not a model
        following = words[position + 1] if position + 1 < len(words) else None
        assignment = _ASSIGNMENT.match(word)
        if assignment is not None and _ENV_NAME.match(assignment[1]):
            launch.env[assignment[1]] = Reading(assignment[1], assignment[2], source)
        elif _FLAG.match(word):
            name, value = _flag(word, following)
            launch.flags[name] = Reading(word.split("=")[0], value, source)
    return launch


def _flag(word: str, following: str | None) -> tuple[str, str | bool]:
    name, has_value, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if has_value:
        return name, value
    if following is None or _FLAG.match(following):
        return name, True
    return name, following


def _words(line: str) -> list[str]:
    if '"--' in line and "," in line:  # a JSON or YAML list
        line = re.sub(r"[\[\],\"]+", " ", line)
    try:
        words = shlex.split(line, comments=False)
    except ValueError:
        words = line.split()
    if len(words) == 1 and " " in words[0]:
        return words[0].split()
    flat: list[str] = []
    for word in words:  # bash -c "vllm serve …"
        flat += word.split() if " --" in word and engine_of(word) else [word]
    return flat


def _settings_alone(line: str, source: Source) -> dict[str, Reading]:
    """`export A=1`, `Environment=A=1`, `A: "1"`, `ENV A 1` on a line of their own."""
    line = re.sub(r"^\s*(?:-\s+|export\s+|set\s+|ENV\s+|Environment=|-e\s+)", "", line).strip().strip("'\"")
    found = {}
    for name, value in re.findall(r"\b([A-Z][A-Z0-9_]{2,})\s*[=:]\s*[\"']?([^\s\"';]+)", line):
        found[name] = Reading(name, value, source)
    return found


def _logical_lines(lines: Iterable[Line]) -> Iterator[Line]:
    """Joins continued lines: a backslash at the end, or flags alone on the next line."""
    start = 0
    pieces: list[str] = []
    for line_number, line in lines:
        bare = line.strip()
        is_item = bool(re.match(r"^-\s+[\"']?[\w./-]", bare))  # of a YAML list
        is_flag_line = bool(re.match(r"^[\"']?--?[A-Za-z]", bare))
        follows_engine = is_flag_line and bool(pieces) and engine_of(" ".join(pieces)) is not None
        continues = bool(pieces) and (pieces[-1].endswith("\\") or is_item or follows_engine)
        if not continues and pieces:
            yield start, _joined(pieces)
            pieces = []
        if not pieces:
            start = line_number
        if bare:
            pieces.append(_item(bare) if continues else line.rstrip())
        elif pieces and not pieces[-1].endswith("\\"):
            yield start, _joined(pieces)
            pieces = []
    if pieces:
        yield start, _joined(pieces)


def _item(bare: str) -> str:
    """An item of a YAML list without its dash; quotes around a plain word say nothing."""
    text = re.sub(r"^-\s+", "", bare)
    return re.sub(r"^([\"'])([^\s\"']+)\1$", r"\2", text)


def _joined(pieces: list[str]) -> str:
    return " ".join(re.sub(r"\\$", "", piece).rstrip() for piece in pieces)


def _merge_parts(launches: list[Launch]) -> list[Launch]:
    """`ollama serve` and `ollama run …` are one engine."""
    merged: list[Launch] = []
    for launch in launches:
        same = next((m for m in merged if m.engine == launch.engine == "ollama"), None)
        if same is None:
            merged.append(launch)
        else:
            same.flags |= launch.flags
            same.env |= launch.env
            same.command += "; " + launch.command.strip()
    return merged

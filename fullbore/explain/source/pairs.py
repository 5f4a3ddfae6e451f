"""Two forks of one function with opposite conditions around the same code: the setting decides when it runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import combinations

from fullbore.explain.source.index import Index
from fullbore.explain.source.module import Module, terminal_name
from fullbore.explain.source.places import Place


@dataclass(frozen=True)
class Pair:
    """The same code under `first` and, later in the function, under `second`; `between` are the calls in the middle."""

    first: Place
    second: Place
    between: list[str]


def find_pairs(index: Index, places: list[Place]) -> list[Pair]:
    """All such pairs among the guards of `places`, in the order of the source."""
    guards = [place for place in places if place.role == "guards" and place.runs]
    pairs = []
    for first, second in combinations(guards, 2):
        same_function = (first.file, first.qualname) == (second.file, second.qualname)
        if same_function and first.runs == second.runs and are_opposite(first.condition, second.condition):
            module = index.module(first.file)
            pairs.append(Pair(first, second, _calls_between(module, first, second) if module else []))
    return pairs


def are_opposite(one: str, other: str) -> bool:
    """`x` and `not x`; `x > 0` (or `x != 0`, `x >= 1`) and `x == 0`; `x is None` and `x is not None`."""
    if f"not {one}" == other or f"not {other}" == one or f"not ({one})" == other or f"not ({other})" == one:
        return True
    left, right = _compared(one), _compared(other)
    if left is None or right is None or left[0] != right[0]:
        return False
    opposites = {
        frozenset(pair)
        for pair in (("> 0", "== 0"), ("!= 0", "== 0"), (">= 1", "== 0"), ("> 0", "<= 0"), (">= 1", "<= 0"))
    } | {frozenset(("is None", "is not None")), frozenset(("> 1", "== 1")), frozenset(("> 1", "<= 1"))}
    return frozenset((left[1], right[1])) in opposites


def _compared(condition: str) -> tuple[str, str] | None:
    """`a.b > 0` -> (`a.b`, `> 0`)."""
    try:
        test = ast.parse(condition, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    subject = ast.unparse(test.left)
    return subject, ast.unparse(test).removeprefix(subject).strip()


def _calls_between(module: Module, first: Place, second: Place) -> list[str]:
    """Names of the calls in the statements that stand between the two forks, in order."""
    fork = next((node for node in ast.walk(module.tree) if _is_fork_at(node, first.statement_line)), None)
    block = _block_of(module, fork) if fork is not None else []
    inner = [each for each in block if first.statement_line < each.lineno < second.statement_line]
    calls = [node for each in inner for node in ast.walk(each) if isinstance(node, ast.Call)]
    names = [terminal_name(call) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
    return list(dict.fromkeys(name for name in names if name))


def _is_fork_at(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.If) and node.lineno == line


def _block_of(module: Module, statement: ast.AST) -> list[ast.stmt]:
    parent = module.parent[statement]
    blocks: list[list[ast.stmt]] = [getattr(parent, name, []) for name in ("body", "orelse", "finalbody")]
    return next((block for block in blocks if isinstance(block, list) and statement in block), [])

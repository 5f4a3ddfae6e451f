"""What a branch or a test amounts to."""

from __future__ import annotations

import ast

from fullbore.explain.source.module import Function, Module, terminal_name

MAX_TEXT = 2000  # characters kept of what a branch runs


def is_arithmetic_module(func: ast.expr) -> bool:
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in ("math", "np")


def is_truth(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def reads_nothing_else(module: Module, other: ast.AST, node: ast.AST) -> bool:
    """`other` has only constants and the expression that `node` is a test of."""
    inner = {module.text(each) for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute, ast.Call))}
    return all(module.text(each) in inner for each in ast.walk(other) if isinstance(each, (ast.Name, ast.Attribute)))


def refuses(body: list[ast.stmt]) -> bool:
    """The branch ends in an exception, an argparse error or an exit."""
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        owner = last.value.func.value if isinstance(last.value.func, ast.Attribute) else None
        return (terminal_name(last.value), terminal_name(owner) if owner else "") in {
            ("error", "parser"),
            ("exit", "sys"),
        }
    return isinstance(last, ast.Raise)


def answers_yes_or_no(function: Function) -> bool:
    """Every value that the function returns is a truth value, so a branch inside decides its answer."""
    returns = [child for child in ast.walk(function) if isinstance(child, ast.Return)]
    return bool(returns) and all(child.value is not None and _is_yes_or_no(child.value) for child in returns)


def _is_yes_or_no(value: ast.expr) -> bool:
    if isinstance(value, ast.BoolOp):
        return all(
            _is_yes_or_no(part) or isinstance(part, (ast.Name, ast.Attribute, ast.Call)) for part in value.values
        )
    return (
        is_truth(value)
        or isinstance(value, ast.Compare)
        or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))
    )


def outline(module: Module, body: list[ast.stmt]) -> str:
    """The statements of a branch on one line, docstrings left out."""
    texts = [module.text(statement, MAX_TEXT) for statement in body[:20] if not _is_docstring(statement)]
    return "; ".join(texts)[:MAX_TEXT]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

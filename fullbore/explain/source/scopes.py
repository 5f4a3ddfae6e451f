"""Questions about one place of a syntax tree: which line, under which condition, which variable."""

from __future__ import annotations

import ast

from fullbore.explain.source.module import Function, Module, is_store, parameters, terminal_name

LOOPS = (ast.For, ast.AsyncFor, ast.While)


def name_line(node: ast.AST) -> int:
    """Line of the identifier itself: the end of an attribute chain, the start of anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    line = getattr(node, "end_lineno", 0) if isinstance(node, ast.Attribute) else getattr(node, "lineno", 0)
    return line or 1


def statement_line(module: Module, node: ast.AST) -> int:
    while node is not module.tree and not isinstance(node, ast.stmt):
        node = module.parent[node]
    return getattr(node, "lineno", 1)


def condition_above(module: Module, node: ast.AST) -> str:
    """Condition of the innermost branch around `node` within its function; empty if there is none."""
    child = node
    for above in module.ancestors(node):
        if isinstance(above, (Function, ast.ClassDef)):
            return ""
        if isinstance(above, ast.If) and child is not above.test:
            test = module.text(above.test)
            return test if child in above.body else f"not ({test})"
        child = above
    return ""


def is_computed(module: Module, node: ast.AST) -> bool:
    """What is assigned here is more than a constant."""
    value = getattr(module.statement(node), "value", None)
    return value is not None and any(isinstance(each, (ast.Name, ast.Attribute, ast.Call)) for each in ast.walk(value))


def is_variable_of(module: Module, function: Function | None, node: ast.Name) -> bool:
    """`node` is a variable of `function` (of the module: None) itself, not of a function in between."""
    scope = module.scope(node)
    while scope is not function:
        if scope is None or (isinstance(scope, Function) and _binds(module, scope, node.id)):
            return False
        scope = module.scope(scope)
    return True


def _binds(module: Module, function: Function, name: str) -> bool:
    """`function` has a parameter or variable of its own under `name`."""
    if name in parameters(function):
        return True
    return any(is_store(node) and module.scope(node) is function for node in module.named.get(name, ()))


def is_reached(module: Module, function: Function | None, line: int, node: ast.Name) -> bool:
    """A value assigned at `line` (0: a parameter) can be in the variable at `node`.

    Not when the read comes first, nor when a statement that surely runs in between assigns something else.
    """
    above = list(module.ancestors(node))
    above = above[: above.index(function)] if function in above else above
    if node.lineno < line and not any(isinstance(each, LOOPS) for each in above):
        return any(isinstance(each, (Function, ast.Lambda)) for each in above)
    child: ast.AST = module.statement(node)
    for parent in [each for each in [*above, function or module.tree] if not isinstance(each, ast.expr)]:
        for block in (getattr(parent, part, None) for part in ("body", "orelse", "finalbody")):
            before = block[: block.index(child)] if isinstance(block, list) and child in block else []
            last = next((each for each in reversed(before) if _overwrites(each, node.id)), None)
            if last is not None:
                return bool(last.lineno <= line <= (last.end_lineno or 0))
        child = parent
    return True


def _overwrites(statement: ast.stmt, name: str) -> bool:
    """`name = value` with a value that is not computed from `name`."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return False
    if statement.value is not None and any(terminal_name(each) == name for each in ast.walk(statement.value)):
        return False
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)

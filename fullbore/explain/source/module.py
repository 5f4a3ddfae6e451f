"""One parsed source file: its syntax tree with parents, and where every name occurs."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# What has a place of its own in the tree; operators and contexts are shared markers.
TREE_NODES = (
    *(ast.mod, ast.stmt, ast.expr, ast.excepthandler, ast.arguments, ast.arg, ast.keyword, ast.alias, ast.withitem),
    *(ast.comprehension, ast.match_case, ast.pattern),
)


def _concrete(kind: type[ast.AST]) -> Iterator[type[ast.AST]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _concrete(below)


# Fields of each type of node that can hold such nodes.
_CHILD_FIELDS = {
    kind: tuple(
        field for field in kind._fields if field not in ("ctx", "op", "ops", "type_comment", "id", "attr", "kind")
    )
    for each in TREE_NODES
    for kind in _concrete(each)
}

# The identifier (or text) that a node of each type carries.
NAMING_FIELD = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
}


class Module:
    """A source file. Raises SyntaxError when it is not Python."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.lines = source.splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            self.tree = ast.parse(source)
        self.parent: dict[ast.AST, ast.AST] = {}
        self.named: dict[str, list[ast.AST]] = defaultdict(list)
        self.top: dict[str, Scope] = {}
        self.classes: list[ast.ClassDef] = []
        self.imports: dict[str, tuple[str, str | None]] = {}
        self.star_imports: list[str] = []
        self._read_tree()

    def _read_tree(self) -> None:
        parent, named = self.parent, self.named
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            kind = node.__class__
            for field in _CHILD_FIELDS[kind]:  # written out, since most of the time of a study passes here
                value = getattr(node, field, None)
                for child in value if value.__class__ is list else (value,):
                    if child.__class__ in _CHILD_FIELDS:
                        parent[child] = node
                        stack.append(child)
            naming_field = NAMING_FIELD.get(kind)
            if naming_field is not None:
                named[getattr(node, naming_field)].append(node)
                if isinstance(node, Scope):
                    self._read_scope(node)
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str):
                    named[node.value].append(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._read_import(node)

    def _read_scope(self, node: Scope) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes.append(node)
        if self.scope(node) is None:
            self.top[node.name] = node

    def _read_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds `a`; `import a.b as c` binds the whole.
                bound = alias.asname or alias.name.partition(".")[0]
                self.imports[bound] = (alias.name if alias.asname else bound, None)
            return
        origin = ".".join(part for part in (self._package(node.level), node.module or "") if part)
        for alias in node.names:
            if alias.name == "*":
                self.star_imports.append(origin)
            else:
                self.imports[alias.asname or alias.name] = (origin, alias.name)

    def _package(self, level: int) -> str:
        """The package that a relative import of `level` dots starts from; empty for an absolute one."""
        if level == 0:
            return ""
        folders = self.path.split("/")[:-1]
        return ".".join(folders[: len(folders) - level + 1])

    # ---- moving about in the tree

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.parent.get(node)) is not None:
            node = above
            yield node

    def scope(self, node: ast.AST) -> Scope | None:
        """The innermost function or class whose body (or parameter list) contains `node`."""
        child = node
        for above in self.ancestors(node):
            if isinstance(above, Scope) and not _is_outside(above, child):
                return above
            child = above
        return None

    def function(self, node: ast.AST) -> Function | None:
        scope = self.scope(node)
        return scope if isinstance(scope, Function) else None

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose methods (at any depth) or body `node` stands."""
        scope = self.scope(node)
        while scope is not None and not isinstance(scope, ast.ClassDef):
            scope = self.scope(scope)
        return scope

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node

    def qualname(self, node: ast.AST) -> str:
        """Dotted name of the function or class around `node`, e.g. `Scheduler.run`; empty at module level."""
        names: list[str] = []
        scope = self.scope(node)
        while scope is not None:
            names.append(scope.name)
            scope = self.scope(scope)
        return ".".join(reversed(names))

    def text(self, node: ast.AST, limit: int = 0) -> str:
        """Source of `node` on one line; longer than `limit` characters (if given) is cut with an ellipsis."""
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        lines = self.lines[first - 1 : last]
        lines[-1] = lines[-1][: getattr(node, "end_col_offset", None)]
        lines[0] = lines[0][getattr(node, "col_offset", 0) :]
        if first != last and any(b"#" in line for line in lines):
            text = " ".join(ast.unparse(node).split())  # without the comments
        else:
            text = " ".join(line.strip().decode(errors="replace") for line in lines)
            text = text.replace("( ", "(").replace(" )", ")") if first != last else text
        return text if not limit or len(text) <= limit else text[: limit - 1] + "…"


def _is_outside(scope: Scope, child: ast.AST) -> bool:
    """Decorators, bases and return annotations belong to the scope around."""
    if child in scope.decorator_list:
        return True
    if isinstance(scope, ast.ClassDef):
        return child in scope.bases or child in scope.keywords
    return child is scope.returns


def is_store(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def terminal_name(node: ast.AST) -> str:
    """Last identifier of a name, attribute chain or call: `a.b.c()` -> `c`; empty for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def parameters(function: Function | ast.Lambda) -> list[str]:
    """Names of all parameters that can be given by position, then of those by keyword only."""
    args = function.args
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]

"""What one occurrence of a setting is used for: climb from the value to the statement that consumes it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal

from fullbore.explain.source.branches import (
    answers_yes_or_no,
    is_arithmetic_module,
    is_truth,
    outline,
    reads_nothing_else,
    refuses,
)
from fullbore.explain.source.module import Module, terminal_name

Role = Literal["defines", "defaults", "derives", "validates", "guards", "sizes", "passes on"]

CONVERSIONS = {"int", "bool", "float", "cast", "deepcopy", "copy", "Optional"}
ALLOCATIONS = {
    *("range", "zeros", "empty", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "repeat"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "bytearray", "deque", "Queue", "Pool"),
    *("Semaphore", "BoundedSemaphore", "ThreadPoolExecutor", "ProcessPoolExecutor"),
}
LOGGING = {
    *("debug", "info", "warning", "warn", "error", "exception", "critical", "log", "print"),
    *("debug_once", "info_once", "warning_once"),
}
BUILTINS = {
    "min",
    "max",
    "abs",
    "round",
    "sum",
    "len",
    "str",
    "list",
    "tuple",
    "set",
    "divmod",
    "pow",
    "sorted",
    "repr",
}

OPTION_CALLS = {"add_argument", "option", "Option", "add_option", "Argument"}
# Methods that hand out the value of an environment variable object.
GETTERS = {"get", "value", "get_value"}


@dataclass(frozen=True)
class Flow:
    """Where a value goes next. `derived` is the computation's source text, or empty for the value itself.

    kind "store": into the name or attribute `target`; "argument": `target` is an argument (or keyword) of `call`;
    "return": out of `function`.
    """

    kind: Literal["store", "argument", "return"]
    target: ast.AST
    derived: str = ""
    call: ast.Call | None = None
    is_bound: bool = False  # the computation only bounds the value (min, max)
    mixed: str = ""  # the condition that joins a test of the setting with others, or empty
    element: int | None = None  # "return" of a tuple: the value's position in it


@dataclass
class Use:
    role: Role = "passes on"
    condition: str = ""
    runs: str = ""
    into: str = ""
    flows: list[Flow] = field(default_factory=list)


class Climb:
    """One walk up from a value; `use` is what was found."""

    def __init__(self, module: Module, value: ast.AST) -> None:
        self.module = module
        self.use = Use()
        self._derived = ""
        self._is_bound = True
        self._mixed = ""
        node: ast.AST | None = value
        while node is not None:
            node = self._step(node, module.parent[node])

    # ---- expressions

    def _step(self, node: ast.AST, above: ast.AST) -> ast.AST | None:
        """Takes in what `above` does with `node`; returns where to go on, None at the end."""
        match above:
            case ast.Compare() | ast.Await() | ast.Starred():
                return above
            case ast.BoolOp():
                return self._join(node, above)
            case ast.UnaryOp():
                return self._compute(above) if isinstance(above.op, ast.USub) else above
            case ast.BinOp():
                return self._binary(node, above)
            case ast.IfExp():
                return self._conditional(node, above)
            case ast.Attribute():
                return above if above.attr in GETTERS else self._compute(above)
            case ast.keyword():
                return above
            case ast.Call():
                return self._call(node, above)
            case ast.Subscript():
                return self._subscript(node, above)
            case ast.Slice():
                self._set_role("sizes")
                return self._compute(above)
            case ast.NamedExpr():
                if node is above.value:
                    self._flow_to(above.target)
                return above
            case ast.comprehension():
                return self._comprehension(node, above)
            case ast.JoinedStr() | ast.FormattedValue():
                return above
            case ast.Tuple() | ast.List() | ast.Set():
                return self._element(node, above)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._compute(above)
            case ast.arguments():
                self._parameter_default(node, above)
                return None
            case ast.stmt():
                self._statement(node, above)
                return None
        return None  # dict entries, lambdas, patterns: handed on to something not followed

    def _compute(self, above: ast.AST) -> ast.AST:
        self._derived = self.module.text(above, 200)
        self._is_bound &= terminal_name(above) in ("min", "max")
        return above

    def _set_role(self, role: Role) -> None:
        """The first role met decides, except that a fork or a check outranks what happened on the way."""
        if self.use.role == "passes on" or role in ("guards", "validates"):
            self.use.role = role

    def _join(self, node: ast.AST, above: ast.BoolOp) -> ast.AST:
        """`setting or fallback` is still the setting; `setting and other` is not it alone."""
        others = [each for each in above.values if each is not node]
        is_fallback = isinstance(above.op, ast.Or) and node is above.values[0]
        if not is_fallback and not all(reads_nothing_else(self.module, each, node) for each in others):
            self._mixed = self.module.text(above, 200)
        return above

    def _binary(self, node: ast.AST, above: ast.BinOp) -> ast.AST:
        other = above.right if node is above.left else above.left
        if isinstance(above.op, ast.Mult) and isinstance(other, (ast.List, ast.Tuple)):
            self._set_role("sizes")
        return self._compute(above)

    def _conditional(self, node: ast.AST, above: ast.IfExp) -> ast.AST | None:
        if node is not above.test:
            return above
        self._set_role("guards")
        self.use.condition = self.module.text(above.test)
        self.use.runs = f"{self.module.text(above.body, 120)} (else {self.module.text(above.orelse, 120)})"
        return above if is_truth(above.body) and is_truth(above.orelse) else None

    def _call(self, node: ast.AST, call: ast.Call) -> ast.AST | None:
        name = terminal_name(call.func)
        if node is call.func:
            return call
        if name in CONVERSIONS or name == "isinstance":
            return call
        if name == "setattr" and len(call.args) == 3 and node is call.args[2]:
            self._flow_to(call.args[1])
            return None
        if (isinstance(call.func, ast.Attribute) and name in LOGGING) or name == "print":
            return None
        if name in OPTION_CALLS and isinstance(node, ast.keyword) and node.arg == "default":
            self._set_role("defaults")
            self.use.into = "default of the command-line option"
            return None
        if isinstance(self.module.parent.get(call), ast.Raise):
            self._set_role("validates")
            return None
        if name in ALLOCATIONS:
            self._set_role("sizes")
        self.use.flows.append(Flow("argument", node, self._derived, call, self._is_bound, self._mixed))
        is_builtin = isinstance(call.func, ast.Name) and name in BUILTINS
        if is_builtin or name in ALLOCATIONS or is_arithmetic_module(call.func):
            return self._compute(call)
        self.use.into = self.use.into or f"{self.module.text(call.func, 80)}(…)"
        return None

    def _subscript(self, node: ast.AST, above: ast.Subscript) -> ast.AST | None:
        return self._compute(above)

    def _comprehension(self, node: ast.AST, above: ast.comprehension) -> ast.AST | None:
        if node is above.iter:
            return self._compute(self.module.parent[above])
        self._set_role("guards")
        self.use.condition = self.module.text(node)
        self.use.runs = self.module.text(self.module.parent[above], 120)
        return None

    def _element(self, node: ast.AST, above: ast.Tuple | ast.List | ast.Set) -> ast.AST | None:
        statement = self.module.parent[above]
        if isinstance(statement, ast.Compare):
            return above
        if isinstance(statement, ast.Assign) and isinstance(above, ast.Tuple):
            position = above.elts.index(node) if node in above.elts else -1
            for target in statement.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == len(above.elts) and position >= 0:
                    self._flow_to(target.elts[position])
            return None
        function = self.module.function(statement)
        if isinstance(statement, ast.Return) and isinstance(above, ast.Tuple) and function and node in above.elts:
            position = above.elts.index(node)
            self.use.flows.append(Flow("return", function, self._derived, mixed=self._mixed, element=position))
            self.use.into = f"the result of {function.name}"
            return None
        return above if isinstance(statement, (ast.BinOp, ast.Starred)) else None

    def _parameter_default(self, node: ast.AST, above: ast.arguments) -> None:
        self._set_role("defaults")
        positional = [*above.posonlyargs, *above.args]
        pairs = list(zip(positional[len(positional) - len(above.defaults) :], above.defaults, strict=True))
        pairs += [(arg, default) for arg, default in zip(above.kwonlyargs, above.kw_defaults, strict=True) if default]
        for arg, default in pairs:
            if default is node:
                self._flow_to(arg)

    def _flow_to(self, target: ast.AST) -> None:
        if isinstance(target, (ast.Name, ast.Attribute, ast.arg)):
            self.use.flows.append(Flow("store", target, self._derived, is_bound=self._is_bound, mixed=self._mixed))
            self.use.into = self.use.into or self.module.text(target, 80)

    # ---- statements

    def _statement(self, node: ast.AST, statement: ast.stmt) -> None:
        match statement:
            case ast.If() | ast.While() if node is statement.test:
                self._branch(statement)
            case ast.Assert():
                self._set_role("validates")
                self.use.condition = self.module.text(statement.test)
                self.use.runs = "AssertionError unless it holds"
            case ast.Raise():
                self._set_role("validates")
            case ast.Match():
                self._set_role("guards")
                self.use.condition = f"match {self.module.text(statement.subject)}"
                self.use.runs = f"one of {len(statement.cases)} cases"
            case ast.Assign():
                self._assignment(statement.targets)
            case ast.AnnAssign() if node is statement.value:
                self._assignment([statement.target])
            case ast.AugAssign() if node is statement.value:
                self._derived = self.module.text(statement, 200)
                self._assignment([statement.target])
            case ast.Return():
                self._return(statement)
            case ast.For() | ast.AsyncFor() if node is statement.iter:
                self.use.runs = f"loop over {self.module.text(statement.iter, 80)}"

    def _branch(self, statement: ast.If | ast.While) -> None:
        self.use.condition = self.module.text(statement.test)
        self.use.runs = outline(self.module, statement.body)
        if isinstance(statement, ast.If) and refuses(statement.body) and not statement.orelse:
            self._set_role("validates")
            return
        self._set_role("guards")
        function = self.module.function(statement)
        if function is None:
            return
        returns = [child for part in (*statement.body, *statement.orelse) for child in ast.walk(part)]
        if any(isinstance(child, ast.Return) for child in returns) and answers_yes_or_no(function):
            self.use.flows.append(Flow("return", function, mixed=f"{function.name}(…)"))
        for child in statement.body:
            if isinstance(child, ast.Assign) and is_truth(child.value):
                names = [each for each in child.targets if isinstance(each, ast.Name)]
                self.use.flows.extend(Flow("store", name, mixed=self._mixed or name.id) for name in names)

    def _assignment(self, targets: list[ast.expr]) -> None:
        if self._derived:
            self._set_role("derives")
        for target in targets:
            self._flow_to(target)
            if isinstance(target, ast.Subscript):
                self.use.into = self.module.text(target, 80)

    def _return(self, statement: ast.Return) -> None:
        function = self.module.function(statement)
        if self._derived:
            self._set_role("derives")
        if function is not None:
            self.use.flows.append(Flow("return", function, self._derived, is_bound=self._is_bound, mixed=self._mixed))
            self.use.into = f"the result of {function.name}"

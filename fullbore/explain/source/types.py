"""What class an expression is an instance of, as far as annotations, assignments and naming tell."""

from __future__ import annotations

import ast
import re

from fullbore.explain.source.index import Definition, Index
from fullbore.explain.source.module import Function, Module, is_store, parameters, terminal_name

MAX_STEPS = 8  # of following one expression to the next
WRAPPERS = {"Optional", "Annotated", "Final", "ClassVar", "Union", "Type", "type", "Required"}


class Types:
    """Answers `type_of(module, expression)` with a class of the package, or None when it cannot tell."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: dict[ast.expr, Definition | None] = {}
        self._owners: dict[str, set[Definition]] = {}

    def type_of(self, module: Module, expr: ast.expr, steps: int = MAX_STEPS) -> Definition | None:
        if expr not in self._known:
            if steps == 0:
                return None
            self._known[expr] = None  # a name defined by itself ends here
            self._known[expr] = self._infer(module, expr, steps - 1)
        return self._known[expr]

    def _infer(self, module: Module, expr: ast.expr, steps: int) -> Definition | None:
        match expr:
            case ast.Name():
                return self._of_name(module, expr, steps)
            case ast.Attribute():
                return self._of_attribute(module, expr, steps)
            case ast.Call():
                return self._of_call(module, expr, steps)
            case ast.BoolOp() | ast.IfExp():
                parts = expr.values if isinstance(expr, ast.BoolOp) else [expr.body, expr.orelse]
                return self._first(module, parts, steps)
            case ast.Await() | ast.NamedExpr():
                return self.type_of(module, expr.value, steps)
        return None

    def _first(self, module: Module, parts: list[ast.expr], steps: int) -> Definition | None:
        return next((found for part in parts if (found := self.type_of(module, part, steps))), None)

    # ---- names

    def _of_name(self, module: Module, name: ast.Name, steps: int) -> Definition | None:
        scope = module.scope(name)
        while scope is not None:
            if isinstance(scope, Function):
                found = self._parameter(module, scope, name.id) or self._assigned(module, scope, name.id, steps)
                if found is not None or name.id in parameters(scope):
                    return found
            scope = module.scope(scope)
        named = self._index.named_class(module, name)
        return named or self._assigned(module, module.tree, name.id, steps)

    def _parameter(self, module: Module, function: Function, name: str) -> Definition | None:
        args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for position, arg in enumerate(args):
            if arg.arg == name:
                if arg.annotation is not None:
                    return self.annotated(module, arg.annotation)
                cls = module.class_of(function)
                if position == 0 and cls is not None and module.scope(function) is cls:
                    return Definition(module, cls)
        return None

    def _assigned(self, module: Module, within: ast.AST, name: str, steps: int) -> Definition | None:
        """From `name = value` or `name: Type` in a function, or at the top level of the module."""
        scope = within if isinstance(within, Function) else None
        for node in module.named.get(name, ()):
            if not (isinstance(node, ast.Name) and is_store(node)) or module.scope(node) is not scope:
                continue
            found = self._of_assignment(module, module.parent[node], steps)
            if found is not None:
                return found
        return None

    def _of_assignment(self, module: Module, statement: ast.AST, steps: int) -> Definition | None:
        if isinstance(statement, ast.AnnAssign):
            found = self.annotated(module, statement.annotation)
            if found is not None or statement.value is None:
                return found
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and statement.value is not None:
            return self.type_of(module, statement.value, steps)
        return None

    def annotated(self, module: Module, annotation: ast.expr | None) -> Definition | None:
        """The class of the package that an annotation names: `X`, `"X"`, `X | None`, `Optional[X]`."""
        match annotation:
            case ast.Name() | ast.Attribute():
                return self._index.named_class(module, annotation)
            case ast.Constant(value=str(text)):
                match = re.fullmatch(r"(?:Optional\[)?([A-Za-z_]\w*)\]?(?: *\| *None)?", text.strip())
                return self._index.named_class(module, ast.Name(id=match.group(1))) if match else None
            case ast.BinOp(op=ast.BitOr()):
                return self.annotated(module, annotation.left) or self.annotated(module, annotation.right)
            case ast.Subscript() if terminal_name(annotation.value) in WRAPPERS:
                inner = annotation.slice
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return next((found for part in parts if (found := self.annotated(module, part))), None)
        return None

    # ---- attributes

    def _of_attribute(self, module: Module, expr: ast.Attribute, steps: int) -> Definition | None:
        mod = self._index.imported_module(module, expr.value)
        if mod is not None:
            return self._index.resolve(mod, expr.attr) or self._assigned(mod, mod.tree, expr.attr, steps)
        owner = self.type_of(module, expr.value, steps)
        if owner is None:
            return None
        for cls in self._index.lineage(owner):
            found = self._attribute_in(cls, expr.attr, steps)
            if found is not None:
                return found
        # What an object with dynamic attributes hands out is taken to be one more of its kind (nested settings).
        return owner if self.is_dynamic(owner) and not self.owns(owner, expr.attr) else None

    def _attribute_in(self, cls: Definition, name: str, steps: int) -> Definition | None:
        """Type of the attribute `name` from the class body, from `self.name = ...`, or from a property."""
        module = cls.module
        for node in module.named.get(name, ()):
            if isinstance(node, Function) and module.scope(node) is cls.node:
                return self.annotated(module, node.returns)
            if is_store(node) and module.class_of(node) is cls.node:
                in_body = isinstance(node, ast.Name) and module.scope(node) is cls.node
                on_self = isinstance(node, ast.Attribute) and terminal_name(node.value) == "self"
                found = self._of_assignment(module, module.parent[node], steps) if in_body or on_self else None
                if found is not None:
                    return found
        return None

    def is_dynamic(self, cls: Definition) -> bool:
        """The class answers any attribute (`__getattr__`), so what it holds is not visible in its body."""
        return self._index.method(cls, "__getattr__") is not None

    def owners(self, attribute: str) -> set[Definition]:
        """Classes that declare or assign an attribute, method or property of that name."""
        if attribute not in self._owners:
            self._owners[attribute] = {
                owner
                for module in self._index.modules_with(attribute)
                for node in module.named.get(attribute, ())
                if (owner := self._owner_of_definition(module, node)) is not None
            }
        return self._owners[attribute]

    def _owner_of_definition(self, module: Module, node: ast.AST) -> Definition | None:
        cls = module.class_of(node)
        if cls is None:
            return None
        in_body = (isinstance(node, Function) or is_store(node)) and module.scope(node) is cls
        on_self = isinstance(node, ast.Attribute) and is_store(node) and terminal_name(node.value) in ("self", "cls")
        if on_self and isinstance(node, ast.Attribute):
            return self.type_of(module, node.value) or Definition(module, cls)
        return Definition(module, cls) if in_body else None

    def owns(self, cls: Definition, attribute: str) -> bool:
        """The class, or a base of it in this package, declares or assigns the attribute."""
        return any(
            self._owner_of_definition(each.module, node) == each
            for each in self._index.lineage(cls)
            for node in each.module.named.get(attribute, ())
        )

    # ---- calls

    def _of_call(self, module: Module, call: ast.Call, steps: int) -> Definition | None:
        func = call.func
        cls = self._index.named_class(module, func)
        if cls is not None:
            return cls
        if isinstance(func, ast.Attribute):
            # Constructors by another name: Settings.from_cli_args(...).
            built = self._index.named_class(module, func.value)
            owner = built or self.type_of(module, func.value, steps)
            method = self._index.method(owner, func.attr) if owner else None
            if method is not None:
                returned = self._returned(method, steps)
                return returned or (owner if built and func.attr.startswith(("from_", "create", "parse")) else None)
        function = self.called_function(module, func)
        return self._returned(function, steps) if function else None

    def called_function(self, module: Module, func: ast.expr) -> Definition | None:
        """The plain function that `func` names: defined around the call, in the module, or imported."""
        found = None
        if isinstance(func, ast.Name):
            found = self._nested(module, func) or self._index.resolve(module, func.id)
        elif isinstance(func, ast.Attribute):
            mod = self._index.imported_module(module, func.value)
            found = self._index.resolve(mod, func.attr) if mod else None
        return found if found is not None and isinstance(found.node, Function) else None

    def _nested(self, module: Module, name: ast.Name) -> Definition | None:
        scope = module.scope(name)
        while scope is not None:
            if isinstance(scope, Function):
                for node in module.named.get(name.id, ()):
                    if isinstance(node, Function) and module.scope(node) is scope:
                        return Definition(module, node)
            scope = module.scope(scope)
        return None

    def _returned(self, function: Definition, steps: int) -> Definition | None:
        node = function.node
        if not isinstance(node, Function) or steps <= 0:
            return None
        found = self.annotated(function.module, node.returns)
        if found is not None or node.returns is not None:
            return found
        returns = [child for child in ast.walk(node) if isinstance(child, ast.Return) and child.value is not None]
        values = [child.value for child in returns if child.value is not None]
        return self._first(function.module, values[:3], steps)


def snake_case(name: str) -> str:
    """`ServerArgs` -> `server_args`, the usual name of an instance."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

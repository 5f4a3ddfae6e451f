"""Account for every other occurrence of the name: keywords, names as text, and what is no use of the setting."""

from __future__ import annotations

import ast
import re

from fullbore.explain.source.carriers import Local, Reach
from fullbore.explain.source.index import Index
from fullbore.explain.source.module import Function, Module, is_store, terminal_name
from fullbore.explain.source.places import Certainty, Mention
from fullbore.explain.source.scopes import condition_above, name_line
from fullbore.explain.source.setting import Setting
from fullbore.explain.source.trace import Trace
from fullbore.explain.source.uses import Climb, Role

ENVIRONMENT_READS = re.compile(r"env", re.IGNORECASE)


class Leftovers:
    """Second half of a trace: occurrences of the setting's own name that no flow has reached."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        self._trace = trace
        self._name = setting.name
        self._is_environment = setting.is_environment
        self._is_declared = bool(setting.declarations)

    def collect(self) -> None:
        """Takes in names as text, objects of unknown class, keywords and same-named variables, in that order."""
        self._texts()
        self._trace.run()
        if self._trace.index.narrowed:
            return  # a very common word: what only shares it says nothing
        self._unknown_objects()
        self._keywords()
        self._trace.run()
        self._unknown_objects()  # flows of the last step may have shown more holders
        self._same_named()
        self._trace.run()

    def _nodes(self, kind: type[ast.AST]) -> list[tuple[Module, ast.AST]]:
        modules = self._trace.index.modules_with(self._name)
        return [
            (module, node)
            for module in modules
            for node in module.named.get(self._name, ())
            if isinstance(node, kind) and node not in self._trace.findings.covered
        ]

    def _guess(self, module: Module) -> Certainty:
        """Certainty of an occurrence on an object whose class is unknown."""
        return Certainty.LIKELY if self._trace.holders.foreign_owners(self._name, module.path) else Certainty.CERTAIN

    # ---- attributes of objects whose class is unknown

    def _unknown_objects(self) -> None:
        paths = self._trace.index.paths_with(self._name)
        for module, node in list(self._trace.holders.attributes(self._name, paths)):
            guess = self._guess(module)
            cls = self._trace.types.type_of(module, node.value)
            if node in self._trace.findings.covered or (cls is not None and self._trace.types.owns(cls, self._name)):
                continue
            text = module.text(node, 60)
            doubt = "others have such an attribute" if guess else "only the setting has this name"
            why = f"{text} ({doubt})"
            self._trace.take(module, node, Reach(why, guess))

    # ---- the name as text

    def _texts(self) -> None:
        for module, node in self._nodes(ast.Constant):
            if isinstance(node, ast.Constant) and not isinstance(module.parent.get(node), ast.Expr):
                self._text(module, node, Reach(f'"{self._name}" as text', self._guess(module)))

    def _text(self, module: Module, node: ast.Constant, reach: Reach) -> None:
        above = module.parent[node]
        if isinstance(above, ast.Call) and node in above.args:
            self._text_in_call(module, node, above, reach)
        elif isinstance(above, ast.Subscript) and not is_store(above):
            self._trace.take(module, above, reach, named_at=node)
        elif isinstance(above, (ast.Subscript, ast.Dict)):
            self._text_as_key(module, node, above, reach)
        elif isinstance(above, ast.keyword) and above.arg == "dest":
            self._trace.findings.note(module, node, reach, "defines", "command-line option")
        elif isinstance(above, ast.Compare):
            use = Climb(module, node).use
            role: Role = "validates" if _warns(use.runs) else use.role
            place = self._trace.findings.note(module, node, reach, role, use.into)
            place.condition, place.runs = use.condition, use.runs
        else:
            self._trace.findings.note(module, node, reach, "passes on", "a list of names")

    def _text_in_call(self, module: Module, node: ast.Constant, call: ast.Call, reach: Reach) -> None:
        name = terminal_name(call.func)
        position = call.args.index(node)
        if (name == "getattr" and position == 1) or (name in ("get", "pop") and position == 0):
            self._trace.take(module, call, self._on_object(module, call, reach), named_at=node)
        elif name == "hasattr" and position == 1:
            self._trace.take(module, call, reach, named_at=node)
        elif name in ("setattr", "setdefault", "setenv"):
            self._trace.write(module, node, reach)
        elif position == 0 and ENVIRONMENT_READS.search(module.text(call.func)):
            place = self._trace.take(module, call, Reach("environment variable"), named_at=node)
            if place.role == "passes on" and not self._is_declared:
                place.role = "defines"
        elif isinstance(module.parent[call], ast.ClassDef | Function):
            self._trace.findings.note(module, node, reach, "validates", f"@{module.text(call.func)}")
        else:
            self._trace.findings.note(module, node, reach, "passes on", f"{module.text(call.func, 80)}(…)")

    def _on_object(self, module: Module, call: ast.Call, reach: Reach) -> Reach:
        """The reach of `getattr(x, "name")`, by what is known about `x`."""
        if terminal_name(call.func) == "getattr" and self._trace.holders.classes(self._name):
            return self._trace.holders.reach_of(module, call.args[0], self._name) or reach
        return Reach("environment variable") if self._is_environment else reach

    def _text_as_key(self, module: Module, node: ast.Constant, above: ast.Subscript | ast.Dict, reach: Reach) -> None:
        if isinstance(above, ast.Subscript):
            self._trace.write(module, node, reach)
            return
        value = above.values[above.keys.index(node)] if node in above.keys else None
        if value is not None and not self._has_covered(value):
            place = self._trace.findings.note(module, node, reach, "passes on", f"an entry: {module.text(value, 80)}")
            place.condition = condition_above(module, node)
        else:
            self._trace.findings.note(module, node, reach, "passes on", "an entry of a mapping")

    # ---- keywords

    def _keywords(self) -> None:
        for module, node in self._nodes(ast.keyword):
            call = module.parent[node]
            if isinstance(node, ast.keyword) and isinstance(call, ast.Call):
                self._keyword(module, node, call)

    def _keyword(self, module: Module, node: ast.keyword, call: ast.Call) -> None:
        """`call(name=value)`: hands the setting on, or sets it to something else."""
        trace, into = self._trace, f"{module.text(call.func, 80)}(…)"
        if self._has_covered(node.value) or terminal_name(node.value) == self._name:
            trace.findings.note(module, node, Reach("keyword"), "passes on", into)
            return
        landings = trace.calls.landings(module, call, node)
        certainty = Certainty.CERTAIN
        if landings and not any(self._sets_it(landing.target.node, landing.name) for landing in landings):
            certainty = Certainty.SAME_NAME
        elif not landings:
            certainty = self._guess(module)
        role: Role = "defaults" if trace.asks_if_unset(module, node, node.value) else "derives"
        place = trace.findings.note(module, node, Reach("keyword", certainty), role, module.text(node, 120))
        place.condition = condition_above(module, node)

    def _sets_it(self, target: ast.AST, name: str) -> bool:
        return name == self._name and any(cls.node is target for cls in self._trace.holders.classes(self._name))

    def _has_covered(self, value: ast.AST) -> bool:
        return any(child in self._trace.findings.covered for child in ast.walk(value))

    # ---- variables and parameters of the same name

    def _same_named(self) -> None:
        reach = Reach("same name; not seen to get the setting", Certainty.SAME_NAME)
        for module, node in [*self._nodes(ast.arg), *self._nodes(ast.Name)]:
            scope = module.scope(node)
            if node in self._trace.findings.covered:
                continue
            if isinstance(node, ast.arg):
                self._trace.add(Local(module, scope if isinstance(scope, Function) else None, node.arg), reach)
            elif isinstance(node, ast.Name) and not isinstance(scope, ast.ClassDef):
                self._trace.take(module, node, reach)


def mentions(index: Index, trace: Trace, name: str) -> list[Mention]:
    """Every line with the name in it that holds no place, with the reason."""
    listed = {(place.file, place.line) for place in trace.findings.places}
    listed |= {(use.file, use.line) for derived in trace.findings.derived for use in derived.uses}
    listed |= {(derived.file, derived.line) for derived in trace.findings.derived}
    found = []
    for path in index.paths_with(name):
        module = index.module(path)
        pattern = re.compile(rb"(?<!\w)" + name.encode() + rb"(?!\w)")
        for number, line in enumerate(index.files[path].splitlines(), 1):
            if pattern.search(line) and (path, number) not in listed:
                found.append(Mention(path, number, _reason(module, trace, name, number)))
    return found


def _reason(module: Module | None, trace: Trace, name: str, number: int) -> str:
    if module is None:
        return "the file is not valid Python"
    here = [node for node in module.named.get(name, ()) if name_line(node) == number]
    for node in here:
        if isinstance(node, ast.Attribute):
            cls = trace.types.type_of(module, node.value)
            return f"attribute of {cls.name if cls else 'another object'}, which is not seen to get the setting"
        if isinstance(node, ast.Name) and isinstance(module.scope(node), ast.ClassDef):
            return f"field of {module.qualname(node)}, which is not seen to get the setting"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return "a function or class of this name"
        return "a variable of this name, not seen to get the setting"
    return "comment, docstring or message"


def _warns(runs: str) -> bool:
    return bool(re.search(r"\b(warning|error|raise)\b", runs))

"""Follow one setting through a package: from where it is defined, under every name its value is given."""

from __future__ import annotations

import ast
import heapq
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from fullbore.explain.source.calls import Calls, Landing
from fullbore.explain.source.carriers import Carrier, Holder, Local, Reach, Result
from fullbore.explain.source.findings import Findings
from fullbore.explain.source.holders import MAX_FILES, Holders
from fullbore.explain.source.index import Definition, Index
from fullbore.explain.source.module import Function, Module, is_store, terminal_name
from fullbore.explain.source.places import Certainty, Place
from fullbore.explain.source.scopes import condition_above, is_computed, is_reached, is_variable_of, name_line
from fullbore.explain.source.types import Types
from fullbore.explain.source.uses import Climb, Flow, Role

MAX_CARRIERS = 1500  # names followed in all
MAX_HOPS = 6  # functions and objects that the setting itself is followed through
MAX_DERIVED_HOPS = 2  # functions and objects that a computed value is followed through


class Trace:
    """A work list of names that hold the setting; `findings` has the results after `add(...)` and `run()`."""

    def __init__(self, index: Index, name: str) -> None:
        self.index = index
        self.name = name
        self.types = Types(index)
        self.calls = Calls(index, self.types)
        self.holders = Holders(index, self.types, name)
        self.findings = Findings()
        self.carriers: set[Carrier] = set()
        self._queue: list[tuple[bool, int, int, Carrier, Reach]] = []
        self._ticket = count()
        self._call_sites: dict[ast.AST, list[tuple[Module, ast.Call, Reach]]] = defaultdict(list)
        self._answers: dict[ast.AST, Flow] = {}

    def add(self, carrier: Carrier, reach: Reach) -> None:
        """Queues a name that holds the setting; sure and uncomputed values are followed first."""
        if carrier not in self.carriers and not self.is_cut_short:
            self.carriers.add(carrier)
            entry = (reach.derived is not None, int(reach.certainty), next(self._ticket), carrier, reach)
            heapq.heappush(self._queue, entry)

    @property
    def is_cut_short(self) -> bool:
        """More than MAX_CARRIERS names get the value; the rest is not followed."""
        return len(self.carriers) >= MAX_CARRIERS

    def run(self) -> None:
        while self._queue:
            *_, carrier, reach = heapq.heappop(self._queue)
            match carrier:
                case Holder():
                    self._follow_holder(carrier, reach)
                case Local():
                    self._follow_local(carrier, reach)
                case Result():
                    self._follow_result(carrier, reach)

    # ---- where a name that holds the setting is used

    def _follow_holder(self, holder: Holder, reach: Reach) -> None:
        self.holders.add(holder, reach)
        if holder.name == self.name:
            for cls, field in self.holders.fields(holder.cls, holder.name):
                if field not in self.findings.covered:
                    text = cls.module.text(cls.module.statement(field), 120)
                    self.findings.note(cls.module, field, reach, "passes on", f"field of {cls.name}: {text}")
        for module, node in self.holders.attributes(holder.name, self.holders.paths(holder)):
            found = self.holders.reach_of(module, node.value, holder.name)
            if found is not None and node not in self.findings.covered:
                self.take(module, node, found)

    def _follow_local(self, local: Local, reach: Reach) -> None:
        module = local.module
        for node in module.named.get(local.name, ()):
            if node in self.findings.covered:
                continue
            if isinstance(node, ast.arg) and local.line == 0 and module.scope(node) is local.function:
                self.findings.note(module, node, reach, "passes on", f"parameter of {module.qualname(node)}")
            elif isinstance(node, ast.Name) and self._is_this(local, node):
                self.take(module, node, reach)
        if local.function is None:
            for other in self._importers(local):
                self.add(Local(other, None, local.name), reach)

    def _is_this(self, local: Local, node: ast.Name) -> bool:
        """The variable itself with the value in it; an assignment only if it is a default or of the setting's name."""
        is_ours = is_variable_of(local.module, local.function, node)
        if not is_ours or not is_reached(local.module, local.function, local.line, node):
            return False
        return not is_store(node) or node.id == self.name or self.asks_if_unset(local.module, node, None)

    def _importers(self, local: Local) -> Iterator[Module]:
        """Modules that import a module-level name."""
        if len(self.index.paths_with(local.name)) <= MAX_FILES:
            for module in self.index.modules_with(local.name):
                origin, attribute = module.imports.get(local.name, ("", None))
                if attribute and local.module.path.removesuffix(".py").endswith(origin.replace(".", "/")):
                    yield module

    def _follow_result(self, result: Result, reach: Reach) -> None:
        function, node = result.function, result.function.node
        around = function.module.class_of(node)
        cls = Definition(function.module, around) if around is not None else None
        if cls and any(terminal_name(each).endswith("property") for each in node.decorator_list):
            self.add(Holder(cls, node.name), reach)
            return
        for module, call in self._calls_of(function, cls):
            is_sure = dict(self.calls.targets(module, call.func)).get(function)
            if is_sure or (is_sure is not None and len(self.index.definitions(node.name)) == 1):
                next_reach = replace(reach, entered=None)
                self._take_result(module, call, next_reach if is_sure else next_reach.doubted(), result.element)

    def _take_result(self, module: Module, call: ast.Call, reach: Reach, element: int | None) -> None:
        """A call's value, or of a tuple the variable that its element is unpacked into."""
        if element is None:
            self.take(module, call, reach)
            return
        statement = module.parent[call]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else []
            if element < len(names) and not any(isinstance(each, ast.Starred) for each in names):
                place = self.findings.note(module, names[element], reach, "passes on", module.text(names[element], 80))
                self._flow(module, Flow("store", names[element]), reach, place)

    def _calls_of(self, function: Definition, cls: Definition | None) -> Iterator[tuple[Module, ast.Call]]:
        """Calls of a function of that name; of a method with a common name only in the files of its class."""
        name = function.node.name
        paths = self.index.paths_with(name)
        if cls is not None and len(paths) > MAX_FILES:
            paths = sorted({relative.module.path for relative in self.index.family(cls)})
        for path in paths:
            module = self.index.module(path)
            for node in module.named.get(name, ()) if module is not None else ():
                call = module.parent.get(node) if module is not None else None
                if module and isinstance(call, ast.Call) and call.func is node and call not in self.findings.covered:
                    yield module, call

    # ---- one occurrence

    def take(self, module: Module, node: ast.AST, reach: Reach, named_at: ast.AST | None = None) -> Place:
        """Records what an occurrence of the setting does, and follows where its value goes.

        `named_at` is the node that spells the name, where that is not the value itself (`getattr(x, "name")`).
        """
        self.findings.covered.add(node)
        if is_store(node) or isinstance(getattr(node, "ctx", None), ast.Del):
            return self.write(module, node, reach)
        use = Climb(module, node).use
        place = self.findings.note(module, named_at or node, reach, use.role, use.into)
        place.condition, place.runs = use.condition, use.runs
        if use.role == "derives" and not use.condition:
            place.condition = condition_above(module, node)
        for flow in use.flows:
            self._flow(module, flow, reach, place)
        return place

    def write(self, module: Module, node: ast.AST, reach: Reach) -> Place:
        """An assignment to the setting: a default where it was unset, otherwise a change."""
        statement = module.statement(node)
        is_declaration = isinstance(statement, ast.AnnAssign) and isinstance(module.parent[statement], ast.ClassDef)
        is_default = self.asks_if_unset(module, node, getattr(statement, "value", None))
        role: Role = "defines" if is_declaration else "defaults" if is_default else "derives"
        place = self.findings.note(module, node, reach, role, module.text(statement, 120))
        place.condition = condition_above(module, node)
        return place

    def asks_if_unset(self, module: Module, node: ast.AST, value: ast.expr | None) -> bool:
        """The branch around asks whether what is assigned here is still None or empty (a flag is never empty)."""
        name = rf"[\w.()]*\b{re.escape(terminal_name(node) or self.name)}\b"
        condition = condition_above(module, node)
        if re.search(rf"{name} is None", condition):
            return True
        is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool)
        return not is_flag and bool(re.search(rf"\bnot {name}(?! *[<>=])", condition))

    # ---- where its value goes next

    def _flow(self, module: Module, flow: Flow, reach: Reach, place: Place) -> None:
        is_local = isinstance(flow.target, ast.Name)
        keeps_name = is_local or terminal_name(flow.target) == self.name
        reach = replace(reach, hops=reach.hops + (not keeps_name))
        if reach.hops > (MAX_HOPS if reach.derived is None else MAX_DERIVED_HOPS):
            return
        if reach.derived is not None and flow.derived and not flow.is_bound:
            return
        if reach.certainty is Certainty.SAME_NAME and not is_local:
            return  # a variable of the same name is looked at in its own function only
        flow = self._leaving(flow, reach)
        match flow.kind:
            case "store":
                self._store(module, flow, reach, place)
            case "argument" if flow.call is not None:
                for landing in self.calls.landings(module, flow.call, flow.target):
                    self._land(module, flow, flow.call, landing, reach)
            case "return":
                self._answer(module, flow, reach)

    def _leaving(self, flow: Flow, reach: Reach) -> Flow:
        """A condition that joins the setting with others counts as the setting while it stays in its function.

        Beyond (an attribute of another name, an argument, a result) it is a value computed from the setting.
        """
        mixed = flow.mixed or reach.mixed
        is_here = isinstance(flow.target, ast.Name) or terminal_name(flow.target) == self.name
        answers_caller = flow.kind == "return" and reach.entered is flow.target
        if not mixed or flow.derived or is_here or answers_caller:
            return replace(flow, mixed=mixed)
        return replace(flow, derived=mixed)

    def _computed(self, module: Module, flow: Flow, reach: Reach, name: str) -> Reach:
        """The reach of a value on its way into `name`: a new computed value if the flow computes one."""
        if not flow.derived or reach.derived is not None:
            return replace(reach, mixed=flow.mixed)
        position = self.findings.computed(module, flow.target, name, flow.derived)
        return replace(reach, derived=position, hops=0, mixed="")

    def _store(self, module: Module, flow: Flow, reach: Reach, place: Place) -> None:
        target = flow.target
        name = target.arg if isinstance(target, ast.arg) else module.text(target, 80)
        self.findings.note_target(module, target, name, reach, place)
        reach = self._computed(module, flow, reach, name)
        if isinstance(target, ast.Attribute):
            cls = self.types.type_of(module, target.value)
            if cls is not None:
                self._store_attribute(module, cls, target, reach.named(f"{cls.name}.{target.attr}"))
        elif isinstance(target, ast.arg):
            self.add(Local(module, module.function(target), target.arg), reach.named(target.arg))
        elif isinstance(target, ast.Name):
            self._store_name(module, target, reach)

    def _store_attribute(self, module: Module, cls: Definition, target: ast.Attribute, reach: Reach) -> None:
        """An attribute that is also counted up or down is a value of its own that starts as the setting."""
        name = target.attr
        if name != self.name and reach.derived is None:
            others = [(owner, node) for owner, node in self.holders.stores(cls, name) if node is not target]
            if any(isinstance(owner.parent[node], ast.AugAssign) for owner, node in others):
                value = getattr(module.statement(target), "value", target)
                text = f"starts as {module.text(value, 60)}, then changes"
                reach = self._computed(module, Flow("store", target, text), reach, f"{cls.name}.{name}")
            elif any(is_computed(owner, node) for owner, node in others):
                reach = replace(reach, mixed=f"{cls.name}.{name}, which is set elsewhere too")
        self.add(Holder(cls, name), reach)

    def _store_name(self, module: Module, target: ast.Name, reach: Reach) -> None:
        scope = module.scope(target)
        if isinstance(scope, ast.ClassDef):
            self.add(Holder(Definition(module, scope), target.id), reach.named(f"{scope.name}.{target.id}"))
            return
        others = [
            node
            for node in module.named.get(target.id, ())
            if is_store(node) and module.scope(node) is scope and node is not target and is_computed(module, node)
        ]
        if others and not reach.mixed and reach.derived is None:
            reach = replace(reach, mixed=f"{target.id}, which is also set on line {name_line(others[0])}")
        self.add(Local(module, scope, target.id, target.lineno), reach.named(target.id))

    def _land(self, module: Module, flow: Flow, call: ast.Call, landing: Landing, reach: Reach) -> None:
        """The value arrives in a parameter, or in a field of an object that is being built."""
        target, name = landing.target, landing.name
        arrived = self._computed(module, flow, reach, name).named(f"{name} of {_callable_name(target)}")
        if not landing.is_sure:
            arrived = arrived.doubted()
        if not isinstance(target.node, Function):
            self._enter_field(target, name, arrived)
            return
        self._call_sites[target.node].append((module, call, reach))
        self.add(Local(target.module, target.node, name), replace(arrived, entered=target.node))
        answer = self._answers.get(target.node)
        if answer is not None:
            self._continue_from_call(module, call, reach, answer)

    def _enter_field(self, cls: Definition, name: str, reach: Reach) -> None:
        for owner, node in self.holders.fields(cls, name):
            if node not in self.findings.covered and owner in self.index.lineage(cls):
                self.findings.note(owner.module, node, reach, "passes on", f"field of {owner.name}")
        self.add(Holder(cls, name), reach)

    def _answer(self, module: Module, flow: Flow, reach: Reach) -> None:
        """The function returns the value: to the calls that brought it in, or (its own reading) to all its callers."""
        function = flow.target
        assert isinstance(function, Function)
        if reach.entered is not function:
            reach = replace(self._computed(module, flow, reach, f"{function.name}()"), entered=None)
            self.add(Result(Definition(module, function), flow.element), reach.named(f"result of {function.name}"))
        elif function not in self._answers:
            self._answers[function] = flow
            for caller, call, caller_reach in list(self._call_sites[function]):
                self._continue_from_call(caller, call, caller_reach, flow)

    def _continue_from_call(self, module: Module, call: ast.Call, reach: Reach, answer: Flow) -> None:
        """A call that handed the value in gets it back, or gets an answer that depends on it."""
        assert isinstance(answer.target, Function)
        if call in self.findings.covered or (answer.derived and reach.derived is not None):
            return
        name = answer.target.name
        answered = self._computed(module, replace(answer, target=call), reach.named(f"answer of {name}"), f"{name}()")
        self._take_result(module, call, answered, answer.element)


def _callable_name(target: Definition) -> str:
    """A constructor goes by the name of its class."""
    cls = target.module.class_of(target.node)
    return cls.name if cls is not None and target.name == "__init__" else target.name

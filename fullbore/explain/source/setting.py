"""Find where a setting is defined: field of a settings class, command-line option or environment variable."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass, field

from fullbore.explain.source.index import Definition, Index
from fullbore.explain.source.module import Module, is_store, terminal_name
from fullbore.explain.source.package import Package, SourceError, is_test
from fullbore.explain.source.types import snake_case
from fullbore.explain.source.uses import OPTION_CALLS

MAX_FILES_OF_NAME = 700  # a word in more files is not looked up in all of them
SETTINGS_CLASS = re.compile(r"(Args|Arguments|Config|Configuration|Settings|Options)$")


@dataclass
class Setting:
    """`name` in the source, the classes that define it, and the nodes that declare it (fields, options)."""

    name: str
    classes: list[Definition] = field(default_factory=list)
    declarations: list[tuple[Module, ast.AST]] = field(default_factory=list)

    @property
    def is_environment(self) -> bool:
        return self.name.isupper()


def find_setting(package: Package, index: Index, flag: str) -> Setting:
    """The setting that `flag` names: `--pp-size`, `pp_size`, an alias of either, or an environment variable.

    Raises:
        SourceError: nothing in the package has that name; the message offers close matches.
    """
    plain = flag.strip().lstrip("-").partition("=")[0]
    name = plain.replace("-", "_")
    setting = _declared_as(index, name)
    if setting is None or not setting.declarations:
        setting = _declared_by_option(index, plain) or setting
    if setting is None:
        close = _close_matches(package, name)
        hint = f"close: {', '.join(close)}" if close else "give an option, a field or an environment variable of it"
        raise SourceError(f"{package.name} {package.version} has no setting {flag!r}; {hint}.")
    return setting


def _declared_as(index: Index, name: str) -> Setting | None:
    if not name.isidentifier():
        return None
    setting, fields = Setting(name), []
    for module in _declaring_modules(index, name):
        for node in module.named.get(name, ()):
            scope = module.scope(node)
            if isinstance(node, ast.Name) and is_store(node) and isinstance(scope, ast.ClassDef):
                fields.append((module, node, Definition(module, scope)))
            elif setting.is_environment and _declares_environment(module, node):
                setting.declarations.append((module, node))
    options = _options(index, name)
    weights = [_weight(module, node, cls, options) for module, node, cls in fields]
    for (module, node, cls), weight in zip(fields, weights, strict=True):
        if weight == max(weights):
            setting.classes.append(cls)
            setting.declarations.append((module, node))
    setting.declarations += options
    if setting.classes and len(index.paths_with(name)) > MAX_FILES_OF_NAME:
        names = {relative.name for cls in setting.classes for relative in index.descendants(cls)}
        index.narrow(name, names | {snake_case(each) for each in names})
    return setting if setting.declarations or _is_anywhere(index, name) else None


def _declaring_modules(index: Index, name: str) -> list[Module]:
    """Modules that can declare the name: all that have it, or (a very common word) those with a field of that name."""
    paths = index.paths_with(name)
    if len(paths) > MAX_FILES_OF_NAME:
        field_line = re.compile(rb"^[ \t]+" + name.encode() + rb"[ \t]*:.*", re.MULTILINE)
        paths = [path for path in paths if any(map(_may_be_field, field_line.findall(index.files[path])))]
    return [module for path in paths if (module := index.module(path)) is not None]


def _may_be_field(line: bytes) -> bool:
    """A parameter on a line of its own (`name: str = "",`) ends with a comma outside all brackets; no field does."""
    code = line.partition(b"#")[0].rstrip()
    is_open = code.count(b"[") > code.count(b"]") or code.count(b"(") > code.count(b")")
    return is_open or not code.endswith(b",")


def _is_anywhere(index: Index, name: str) -> bool:
    """No declaration, but an attribute, parameter or keyword of that name, or (environment) a lookup by that text."""
    kinds = (ast.Attribute, ast.arg, ast.keyword)
    return any(
        isinstance(node, kinds) or (name.isupper() and isinstance(module.parent.get(node), (ast.Call, ast.Subscript)))
        for module in index.modules_with(name)
        for node in module.named.get(name, ())
    )


def _declares_environment(module: Module, node: ast.AST) -> bool:
    """A module-level name of the variable, or its entry in a table of variables."""
    if isinstance(node, ast.Name):
        return is_store(node) and module.scope(node) is None
    above = module.parent.get(node)
    return isinstance(node, ast.Constant) and isinstance(above, ast.Dict) and node in above.keys


def _options(index: Index, name: str) -> list[tuple[Module, ast.AST]]:
    """`add_argument("--name", ...)`, `option("--name")` and the like, also with `dest="name"`."""
    found: list[tuple[Module, ast.AST]] = []
    spelled = "--" + name.replace("_", "-")
    for text in dict.fromkeys((spelled, f"--{name}", name)):
        is_dest = text == name
        quoted = re.compile((rb"dest\s*=\s*" if is_dest else b"") + rb"[\"']" + text.encode() + rb"[\"']")
        paths = [path for path, data in sorted(index.files.items()) if text.encode() in data and quoted.search(data)]
        modules = [module for path in paths if (module := index.module(path)) is not None]
        for module in modules:
            for node in module.named.get(text, ()):
                call = _option_call(module, node)
                given = isinstance(module.parent.get(node), ast.keyword)
                if call is not None and (given if is_dest else _is_option_of(call, name)):
                    found.append((module, node))
    return found


def _option_call(module: Module, node: ast.AST) -> ast.Call | None:
    """The call that declares a command-line option under this text, positional or as `dest`."""
    above = module.parent.get(node) if isinstance(node, ast.Constant) else None
    if isinstance(above, ast.keyword):
        above = module.parent[above] if above.arg == "dest" else None
    return above if isinstance(above, ast.Call) and terminal_name(above.func) in OPTION_CALLS else None


def _is_option_of(call: ast.Call, name: str) -> bool:
    """The option sets `name`: by its `dest`, by the field its default is taken from, or by any of its spellings."""
    named = _named_target(call)
    return named == name if named else name in _spellings(call)


def _named_target(call: ast.Call) -> str | None:
    given = {each.arg: each.value for each in call.keywords}
    if isinstance(given.get("dest"), ast.Constant):
        return str(ast.literal_eval(given["dest"]))
    default = given.get("default")
    return default.attr if isinstance(default, ast.Attribute) else None


def _spellings(call: ast.Call) -> list[str]:
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return [text.lstrip("-").replace("-", "_") for text in texts if text.startswith("--")]


def _weight(module: Module, node: ast.AST, cls: Definition, options: list[tuple[Module, ast.AST]]) -> int:
    """How much a class field looks like the definition of a setting rather than a copy of it."""
    statement = module.parent[node]
    weight = 0
    if any(module is other for other, _ in options):
        weight += 4  # registered on the command line next to it
    if isinstance(statement, ast.AnnAssign):
        annotation = statement.annotation
        weight += 1
        if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
            weight += 3 if terminal_name(annotation.value) not in ("Union", "Literal", "dict", "Dict", "tuple") else 0
    if SETTINGS_CLASS.search(cls.name):
        weight += 2
    if is_test(module.path):
        weight -= 5
    return weight


def _declared_by_option(index: Index, plain: str) -> Setting | None:
    """An alias: `--pipeline-parallel-size` registered together with `--pp-size` or as an alias of that field."""
    text = "--" + plain.replace("_", "-")
    for path, data in sorted(index.files.items()):
        module = index.module(path) if text.encode() in data else None
        for node in module.named.get(text, ()) if module is not None else ():
            name = _option_target(module, node) if module is not None else None
            setting = _declared_as(index, name) if name else None
            if setting is not None and setting.declarations:
                return setting
    return None


def _option_target(module: Module, node: ast.AST) -> str | None:
    """The field that an option sets, for the text of one of its spellings."""
    call = _option_call(module, node)
    if call is not None:
        return _named_target(call) or next(iter(_spellings(call)), None)
    statement = module.statement(node)
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None


def _close_matches(package: Package, name: str) -> list[str]:
    """Names of fields, options and environment variables that are spelled much like `name`."""
    if name.isupper():
        pattern = re.compile(rb"[\"']([A-Z][A-Z0-9_]{3,})[\"']")
    else:
        pattern = re.compile(rb"(?:[\"']--([a-z][\w-]+)[\"'])|(?:^    ([a-z]\w+) *: )", re.MULTILINE)
    known: set[str] = set()
    for path, data in package.files.items():
        if not is_test(path):
            known.update(b"".join(match.groups(b"")).decode().replace("-", "_") for match in pattern.finditer(data))
    part = [each for each in sorted(known) if len(name) > 4 and name in each]
    return list(dict.fromkeys([*difflib.get_close_matches(name, sorted(known), 4, 0.75), *part]))[:5]

"""All modules of a package, parsed only when asked for, and name resolution between them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fullbore.explain.source.module import Function, Module, Scope
from fullbore.explain.source.package import Package

WORD_BYTES = {bytes([code]) for code in b"_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}

_IDENTIFIER = re.compile(rb"\w+")  # of bytes: ASCII letters, digits and underscores
_NAMES_OF_SETTINGS = (b"args", b"arguments", b"cfg", b"conf", b"config", b"options", b"opts", b"settings")
_WORDS_WITHOUT_TABLE = 100


class Definition(NamedTuple):
    """A function or class and the module that it stands in."""

    module: Module
    node: Scope

    @property
    def name(self) -> str:
        return self.node.name


class Index:
    """Lookups over a package; `unreadable` lists the files that do not parse, `narrowed` says what was not read."""

    def __init__(self, package: Package) -> None:
        self.files = package.files
        self.unreadable: list[str] = []
        self.narrowed = ""
        self._hints: set[str] = set()
        self._all_paths: dict[str, list[str]] = {}
        self._modules: dict[str, Module | None] = {}
        self._paths_with: dict[str, list[str]] = {}
        self._paths_defining: dict[str, list[str]] = {}
        self._table: defaultdict[bytes, list[str]] = defaultdict(list)
        self._definitions: dict[str, list[Definition]] = {}
        self._bases: dict[Definition, list[Definition]] = {}
        self._children: dict[Definition, list[Definition]] = {}
        self._path_of = {dotted: path for path in self.files for dotted in _dotted_names(path, self.files)}

    # ---- files

    def module(self, path: str) -> Module | None:
        """The parsed file, or None when it is not Python (noted in `unreadable`)."""
        if path not in self._modules:
            try:
                self._modules[path] = Module(path, self.files[path])
            except (SyntaxError, ValueError, RecursionError):
                self._modules[path] = None
                self.unreadable.append(path)
        return self._modules[path]

    def paths_with(self, word: str) -> list[str]:
        """Files in whose text `word` occurs as a whole identifier, sorted."""
        if word not in self._paths_with:
            self._paths_with[word] = self._look_up(word.encode())
        return self._paths_with[word]

    def _look_up(self, word: bytes) -> list[str]:
        """A few words are looked for in the text of every file; with many, a table of all words is soon cheaper."""
        if len(self._paths_with) < _WORDS_WITHOUT_TABLE or not _IDENTIFIER.fullmatch(word):
            return sorted(path for path, data in self.files.items() if has_word(data, word))
        if not self._table:
            for path in sorted(self.files):
                for each in set(_IDENTIFIER.findall(self.files[path])):
                    self._table[each].append(path)
        return list(self._table.get(word, ()))

    def narrow(self, word: str, hints: set[str]) -> None:
        """From now on `word` is looked for only in files with one of `hints` in them, or of an earlier call's.

        And in those where it is an attribute of what is called arguments or configuration.
        """
        hints = hints - {word}  # a class Device says nothing about files with `device` in them
        is_known = word in self._all_paths
        kept = set(self._paths_with[word]) if is_known else set()
        every = self._all_paths.setdefault(word, self.paths_with(word))
        if not is_known:
            attributes = [each + b"." + word.encode() for each in _NAMES_OF_SETTINGS]
            kept = {path for path in every if any(_has_end(self.files[path], each) for each in attributes)}
        new_texts = [hint.encode() for hint in (hints - self._hints if is_known else self._hints | hints)]
        self._hints |= hints
        rest = (path for path in every if path not in kept)
        kept |= {path for path in rest if any(has_word(self.files[path], text) for text in new_texts)}
        self._paths_with[word] = [path for path in every if path in kept]
        self.narrowed = (
            f"{word} is in {len(every)} files; only the {len(kept)} that mention its class, or the word as a setting, "
            "were read."
        )

    def modules_with(self, word: str) -> Iterator[Module]:
        for path in self.paths_with(word):
            module = self.module(path)
            if module is not None:
                yield module

    # ---- names

    def paths_defining(self, name: str) -> list[str]:
        """Files with a function or class of that name in them, by their text."""
        if name not in self._paths_defining:
            heads = (b"def " + name.encode(), b"class " + name.encode())
            found = self.paths_with(name)
            self._paths_defining[name] = [
                path for path in found if any(has_word(self.files[path], head) for head in heads)
            ]
        return self._paths_defining[name]

    def definitions(self, name: str) -> list[Definition]:
        """Every function and class of that name in the package."""
        if name not in self._definitions:
            paths = self.paths_defining(name)
            modules = [self.module(path) for path in paths]
            self._definitions[name] = [
                Definition(module, node)
                for module in modules
                if module is not None
                for node in module.named.get(name, ())
                if isinstance(node, Scope)
            ]
        return self._definitions[name]

    def resolve(self, module: Module, name: str, _seen: frozenset[str] = frozenset()) -> Definition | None:
        """What a bare name means at the top level of `module`, followed through imports."""
        node = module.top.get(name)
        if node is not None:
            return Definition(module, node)
        if module.path in _seen:
            return None
        seen = _seen | {module.path}
        origin, attribute = module.imports.get(name, ("", None))
        if attribute is not None:
            return self._resolve_in(origin, attribute, seen)
        for starred in module.star_imports:
            found = self._resolve_in(starred, name, seen)
            if found is not None:
                return found
        return None

    def _resolve_in(self, dotted: str, name: str, seen: frozenset[str]) -> Definition | None:
        path = self._path_of.get(dotted)
        if path is None or name.encode() not in self.files[path]:
            return None
        module = self.module(path)
        return self.resolve(module, name, seen) if module is not None else None

    def imported_module(self, module: Module, expr: ast.expr) -> Module | None:
        """The module of this package that `expr` (`mod`, `pkg.mod`) names in `module`."""
        dotted = self._dotted_import(module, expr)
        path = self._path_of.get(dotted) if dotted else None
        return self.module(path) if path else None

    def _dotted_import(self, module: Module, expr: ast.expr) -> str | None:
        if isinstance(expr, ast.Attribute):
            above = self._dotted_import(module, expr.value)
            return f"{above}.{expr.attr}" if above else None
        if not isinstance(expr, ast.Name) or expr.id not in module.imports:
            return None
        origin, attribute = module.imports[expr.id]
        return origin if attribute is None else f"{origin}.{attribute}"

    # ---- classes

    def bases(self, cls: Definition) -> list[Definition]:
        if cls not in self._bases:
            self._bases[cls] = []
            if isinstance(cls.node, ast.ClassDef):
                found = [self.named_class(cls.module, base) for base in cls.node.bases]
                self._bases[cls] = [base for base in found if base is not None and base != cls]
        return self._bases[cls]

    def named_class(self, module: Module, expr: ast.expr) -> Definition | None:
        """The class of this package that an expression such as `Name` or `mod.Name` denotes."""
        if isinstance(expr, ast.Subscript):
            expr = expr.value
        found = None
        if isinstance(expr, ast.Name):
            found = self.resolve(module, expr.id)
        elif isinstance(expr, ast.Attribute):
            owner = self.imported_module(module, expr.value)
            found = self.resolve(owner, expr.attr) if owner else None
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None

    def lineage(self, cls: Definition) -> list[Definition]:
        """The class and all its bases in this package, nearest first."""
        found = [cls]
        for each in found:
            found.extend(base for base in self.bases(each) if base not in found)
        return found

    def children(self, cls: Definition) -> list[Definition]:
        """The classes that derive from `cls` directly."""
        if cls not in self._children:
            pattern = re.compile(rb"class\s+\w+\s*\([^)]*\b" + cls.name.encode() + rb"\b")
            self._children[cls] = [
                candidate
                for path in self.paths_with(cls.name)
                if pattern.search(self.files[path]) and (module := self.module(path)) is not None
                for node in module.classes
                if cls in self.bases(candidate := Definition(module, node))
            ]
        return self._children[cls]

    def descendants(self, cls: Definition) -> list[Definition]:
        """The class and all that derive from it."""
        below = [cls]
        for each in below:
            below.extend(child for child in self.children(each) if child not in below)
        return below

    def family(self, cls: Definition) -> set[Definition]:
        """Classes that can share an instance with `cls`: its bases, what derives from it, and their other bases."""
        return {relative for each in self.descendants(cls) for relative in self.lineage(each)}

    def method(self, cls: Definition, name: str) -> Definition | None:
        """The method or property that an instance of `cls` uses under `name`."""
        for owner in self.lineage(cls):
            for node in owner.node.body:
                if isinstance(node, Function) and node.name == name:
                    return Definition(owner.module, node)
        return None


def _has_end(data: bytes, text: bytes) -> bool:
    """`text` occurs in `data`, and no identifier goes on after it."""
    start = data.find(text)
    while start >= 0:
        end = start + len(text)
        if data[end : end + 1] not in WORD_BYTES:
            return True
        start = data.find(text, end)
    return False


def has_word(data: bytes, word: bytes) -> bool:
    """`word` occurs in `data` as a whole identifier."""
    # Not a regular expression with word boundaries: that takes 20 times longer.
    start = data.find(word)
    while start >= 0:
        end = start + len(word)
        if data[start - 1 : start] not in WORD_BYTES and data[end : end + 1] not in WORD_BYTES:
            return True
        start = data.find(word, end)
    return False


def _dotted_names(path: str, files: dict[str, bytes]) -> list[str]:
    """Names that a file can be imported by: from the archive's root, and from its topmost package."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    tops = [k for k in range(len(parts)) if "/".join([*parts[: k + 1], "__init__.py"]) in files]
    names = [".".join(parts)]
    if tops and tops[0] > 0:
        names.append(".".join(parts[tops[0] :]))
    return [name for name in names if name]

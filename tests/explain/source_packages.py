"""A small engine, written to a folder, in which one setting goes by many names."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "toyengine/__init__.py": '__version__ = "1.2.3"\n',
    "toyengine/args.py": """
import argparse
from dataclasses import dataclass


@dataclass
class ServerArgs:
    pp_size: int = 1
    ring_depth: int = 0  # @field
    batch_cap: int | None = None
    fast_path: bool = False

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ring-depth", "--depth-of-ring", type=int, default=ServerArgs.ring_depth)  # @option
        parser.add_argument("--cap", dest="batch_cap", type=int)  # @dest

    def check(self) -> None:
        assert self.ring_depth >= 0, "ring_depth must not be negative"  # @assert
        if self.ring_depth > 64:  # @refuse
            raise ValueError(f"too deep: {self.ring_depth}")  # @message
        if self.batch_cap is None:  # @cap-unset
            self.batch_cap = max(256 // self.pp_size, 1)  # @cap-default
        if self.fast_path and self.pp_size > 1:
            self.fast_path = False  # @fast-change


_GLOBAL_ARGS: ServerArgs = None


def get_args() -> ServerArgs:
    return _GLOBAL_ARGS
""",
    "toyengine/context.py": """
class Bag:
    def __getattr__(self, name):
        return object.__getattribute__(self, "_fields")[name]


_PARALLEL = Bag()


def get_parallel() -> Bag:
    return _PARALLEL
""",
    "toyengine/scheduler.py": """
from toyengine.args import ServerArgs, get_args
from toyengine.context import get_parallel
from toyengine.loops import LoopMixin
from toyengine.queue import Ring


class Scheduler(LoopMixin):
    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args
        self.depth = server_args.ring_depth  # @attribute
        self.ring = Ring(server_args.ring_depth, name="r")  # @constructor
        self.is_deep = self.server_args.ring_depth > 1 and server_args.pp_size > 1  # @mixed
        self.fast_path = server_args.fast_path and server_args.pp_size > 1  # @fast-copy

    def by_getattr(self):
        if getattr(self.server_args, "ring_depth", 0) == 3:  # @getattr
            return "three"
        return "other"

    def by_context(self):
        while get_parallel().ring_depth > 0:  # @context
            self.step()

    def by_alias(self):
        args = get_args()
        depth = args.ring_depth  # @alias
        if depth:  # @alias-guard
            self.step()
        depth = 5
        if depth:  # overwritten: not the setting any more
            self.step()

    def by_shadow(self, ring_depth_of):
        return [depth for depth in ring_depth_of]

    def step(self):
        return first_or_last(True, async_depth=self.server_args.ring_depth)  # @keyword

    def fast(self):
        if self.fast_path:  # @fast-guard
            return 1
        return 0
""",
    "toyengine/loops.py": """
from __future__ import annotations

from typing import TYPE_CHECKING

from toyengine.helpers import exchange_first

if TYPE_CHECKING:
    from toyengine.scheduler import Scheduler


class LoopMixin:
    def init_ring(self: Scheduler):
        self.loop_size: int = (  # @ring-target
            self.server_args.pp_size + self.server_args.ring_depth  # @ring
        )
        self.slots = [None] * self.loop_size  # @ring-use
        for slot in range(self.loop_size):  # @ring-loop
            self.slots[slot] = []

    def loop(self: Scheduler):
        if self.server_args.ring_depth > 0:  # @before
            self.exchange("slow")
        self.launch()
        if self.server_args.ring_depth == 0:  # @after
            self.exchange("slow")

    def helped_loop(self: Scheduler):
        early = exchange_first(
            self.batch,
            self.server_args.ring_depth,  # @positional
        )
        if early:  # @early
            self.exchange("slow")
        self.launch()
        if not early:  # @late
            self.exchange("slow")

    def mixin_attribute(self: Scheduler):
        return 1 if self.depth else 2  # @mixin-attribute
""",
    "toyengine/helpers.py": """
def exchange_first(batch, async_depth: int) -> bool:  # @parameter
    if async_depth > 0:  # @helper-guard
        return True
    return batch is None
""",
    "toyengine/queue.py": """
class Ring:
    def __init__(self, capacity, name):  # @constructor-parameter
        self.capacity = capacity  # @constructor-attribute
        self.name = name
        self.left = capacity

    def is_full(self, used):
        if used >= self.capacity:  # @constructor-guard
            return True
        return False

    def take(self):
        self.left -= 1
        return self.left > 0  # @running
""",
    "toyengine/unrelated.py": '''
class Lamp:
    """Its ring_depth is that of a lamp shade."""

    def __init__(self):
        self.ring_depth = 7  # @lamp

    def glow(self):
        if self.ring_depth > 3:  # @lamp-guard
            return "bright"


def polish(thing):
    if thing.ring_depth:  # @unknown
        return 1


def count(ring_depth):  # @same-name
    if ring_depth > 2:  # @same-name-guard
        return polish(ring_depth)
''',
    "toyengine/overrides.py": """
from toyengine.args import ServerArgs


def declare(target, **values):
    target.update(values)


def adjust(server_args: ServerArgs, memory: int):
    if memory < 10:
        declare(server_args, ring_depth=0)  # @override
    args = ServerArgs(pp_size=2, ring_depth=4)  # @construct
    names = ["pp_size", "ring_depth"]  # @listed
    table = {"ring_depth": server_args.ring_depth}  # @entry
    server_args.ring_depth = min(server_args.ring_depth, memory)  # @clamp
    return args, names, table
""",
    "toyengine/environment.py": """
import os

from toyengine import envs


def partition(layers):
    text = os.getenv("TOY_PARTITION", None)  # @env
    if text is not None:  # @env-guard
        parts = [int(part) for part in text.split(",")]  # @env-parts
        if sum(parts) != layers:  # @env-check
            raise ValueError("no")
    if envs.TOY_OVERLAP.get():  # @envs
        return 1
""",
    "toyengine/envs.py": """
class EnvBool:
    def __init__(self, default):
        self.default = default

    def get(self):
        return self.default


TOY_OVERLAP = EnvBool(False)  # @envs-define
""",
    "toyengine/worker.py": """
from functools import partial

from toyengine.args import ServerArgs


class Base:
    def __init__(self, args: ServerArgs):
        self._args = args

    @property
    def ring(self):
        return self._args.ring_depth  # @property

    def info(self):
        return self.name, self._args.ring_depth, 3  # @tuple

    def bounded(self, ring):
        return min(ring, 8)


class Worker(Base):
    def __init__(self, args: ServerArgs):
        super().__init__(args)
        name, ring, _ = self.info()  # @unpacked
        if ring == 9:  # @unpacked-guard
            self.start = partial(start, size=ring)  # @partial

    def run(self, buffers):
        if self.ring:  # @property-guard
            return [buffer for buffer in buffers if self._args.ring_depth]  # @comprehension
        value = 1 if self._args.ring_depth else 2  # @conditional
        match self._args.ring_depth:  # @match
            case 0:
                return value
        if (depth := self._args.ring_depth) > 2:  # @walrus
            return self.bounded(depth)
        return bytearray(self._args.ring_depth)  # @allocation


def start(size):  # @partial-parameter
    assert size, "empty"  # @partial-assert
""",
    "toyengine/test/helpers.py": """
def run(engine, ring_depth=1):  # @test-parameter
    return engine.start(ring_depth=ring_depth)  # @test-keyword
""",
    "toyengine/broken.py": "def ring_depth(:\n",
}


def write_package(folder: Path) -> Path:
    """Writes the package and the metadata that an unpacked wheel has next to it; returns the folder of both."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    info = folder / "toyengine-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyengine\nVersion: 9.9\n")
    return folder


def marks() -> dict[str, tuple[str, int]]:
    """File and line of every `# @name` comment in the package."""
    found = {}
    for file, text in FILES.items():
        for number, line in enumerate(text.lstrip("\n").splitlines(), 1):
            if "# @" in line:
                found[line.rpartition("# @")[2].strip()] = (file, number)
    return found

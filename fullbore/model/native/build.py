"""Compiles the C++ kernels at their first use on a machine and keeps the result in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from fullbore.errors import ModelError
from fullbore.model.cache import exclusive, kernels_folder, partial_folder
from fullbore.model.processor import processor_name

_SOURCES = Path(__file__).parent / "cpp"
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-pthread")
_TIMEOUT_S = 300.0


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, built if need be; None where there is no compiler (or one that fails, which is said once).

    Safe in several processes at once: one builds, the others wait. The environment variable FULLBORE_KERNELS=0 does
    without.
    """
    if os.environ.get("FULLBORE_KERNELS") == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (ModelError, OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or "").strip()
        _say(f"The CPU kernels could not be built ({output or error}); computing with torch's operations instead.")
        return None


def find_compiler() -> str | None:
    """`$CXX`, g++ or clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def _built(compiler: str) -> Path:
    """The library in the cache, made before if it is not there."""
    target = kernels_folder() / f"kernels-{_key(compiler)}.so"
    if target.exists():
        return target
    with exclusive(target):
        if target.exists():  # another process built it while we waited
            return target
        _say("Building the CPU kernels for this machine (once, takes some seconds) …")
        with partial_folder(target) as folder:
            built = folder / target.name
            command = [compiler, *_FLAGS, _native_flag(), "-o", str(built), str(_SOURCES / "kernels.cpp")]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
            built.rename(target)
    return target


def _native_flag() -> str:
    return "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"


def _key(compiler: str) -> str:
    """Changes with the sources, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256()
    for part in (*_FLAGS, compiler, version, processor_name()):
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _say(message: str) -> None:
    with suppress(OSError):  # where nothing can be said, it is built all the same
        print(message, file=sys.stderr, flush=True)

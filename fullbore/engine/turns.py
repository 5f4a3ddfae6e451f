"""How soon a thread that wakes gets a processor which others are using.

A pipeline waits for several threads that only hand messages on: the driver, and those that send and receive in the
stages. Where stages compute on all processors, Linux lets such a thread wait until somebody's turn is over, some
milliseconds each time. Since 6.12 a thread may ask for short turns; when it wakes, it interrupts those that take long
ones. Elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_TURN_NS = 100_000  # the least that Linux allows
_USUAL = 0  # asks for the system's own
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_SCHED_OTHER, _SCHED_BATCH = 0, 3  # the policies that have turns


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2). Of an ordinary thread, `runtime` is the length of its turns in ns."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_short_turns() -> None:
    """For the calling thread, and the threads and processes that it starts from now on."""
    _set_turn_ns(SHORT_TURN_NS)


def take_usual_turns() -> None:
    """The same, back to the system's own."""
    _set_turn_ns(_USUAL)


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads that are started in here take short turns; the calling one itself usual ones afterwards."""
    take_short_turns()
    try:
        yield
    finally:
        take_usual_turns()


def turn_ns(thread_id: int = 0) -> int | None:
    """How long a thread's turns are, 0: the calling one's; None where the system does not tell."""
    attributes = _attributes(thread_id)
    return None if attributes is None or not attributes.runtime else int(attributes.runtime)


def _set_turn_ns(turn: int) -> None:
    attributes = _attributes()
    if attributes is None or attributes.policy not in (_SCHED_OTHER, _SCHED_BATCH):
        return  # whoever chose another policy knows why
    attributes.runtime = turn
    attributes.flags = 0
    _system_call(0, 0, ctypes.byref(attributes), 0)


def _attributes(thread_id: int = 0) -> _Attributes | None:
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    is_known = _system_call(1, thread_id, ctypes.byref(attributes), size, 0)
    return attributes if is_known else None


def _system_call(which: int, *arguments: object) -> bool:
    numbers = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return False
    return bool(ctypes.CDLL(None).syscall(numbers[which], *arguments) == 0)

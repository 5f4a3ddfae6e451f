"""The life of a server: from a bound port to a clean exit."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from fullbore.errors import ConfigError, EngineDeadError
from fullbore.server.app import create_app
from fullbore.server.connection import CutWhenStopping
from fullbore.server.impatience import ImpatientProtocol
from fullbore.server.state import ServerState
from fullbore.server.warm_up import warm_up

# After the pipeline's death: time for waiting clients to get their error and for monitors to see /health at 503.
DEATH_NOTICE_S = 2.0
# After the last output: time for connections to be closed.
CLOSE_TIMEOUT_S = 2
MOST_FILES = 65_536
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that owns the address but does not listen yet: clients are refused until the model is loaded.

    Raises:
        ConfigError: the address is in use, not allowed, or not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine ({error}).") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"Cannot listen on {host} port {port} ({error.strerror}); choose another --port.") from error
    return sock


def allow_many_connections() -> None:
    """Raises the system's soft limit of open files, often 1024: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(
    state: ServerState, sock: socket.socket, stop_requested: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    """Serves until `stop_requested`; then refuses new requests, gives running ones their grace period, and returns.

    Raises:
        EngineDeadError: the pipeline died; all waiting clients have been told.
    """
    server = _Server(_uvicorn_config(state))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stop = asyncio.create_task(stop_requested.wait())
    while not (server.started or serving.done()):
        await asyncio.sleep(0.01)
    if serving.done():  # another server, bound at the same time, was first to listen
        raise ConfigError(f"Cannot listen: {serving.exception()}; choose another --port.")
    ends: set[asyncio.Future[Any]] = {serving, state.engine.death, stop}
    warming = asyncio.create_task(warm_up(state))
    await asyncio.wait({warming, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if warming.done():
        warming.result()
        on_ready()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    state.is_stopping = True
    warming.cancel()
    if state.engine.dead is not None:
        await asyncio.sleep(DEATH_NOTICE_S)
    else:
        await state.engine.stop(state.config.shutdown_grace_s)
    server.should_exit = True
    stop.cancel()
    await serving
    if state.engine.dead is not None:
        raise EngineDeadError(state.engine.dead.message)


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[], None]) -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set; a second signal ends the process at once.

    To be used in the main thread, inside a running loop. `on_stop` is called in it, at the first signal.
    """
    stop_requested = asyncio.Event()
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        restore()
        # In the loop. Python's own handler raises it wherever the program happens to be; a finaliser would drop it.
        raise KeyboardInterrupt

    def on_signal() -> None:
        stop_requested.set()
        restore()
        loop.add_signal_handler(signal.SIGINT, interrupt)
        on_stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop_requested
    finally:
        restore()


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        CutWhenStopping(create_app(state), state),
        lifespan="off",
        ws="none",
        http=ImpatientProtocol,
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


class _Server(uvicorn.Server):
    """uvicorn, with signals left to `serve`."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

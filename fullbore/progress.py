"""What the user sees while waiting: bars on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from fullbore.engine.messages import LoadProgress


class StartProgress:
    """How far the engine's start has come: fetching the model, then each stage's weights. A context manager.

    The first bar runs from the beginning to the end: processes take seconds to start before they can say anything.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[str] = set()

    def update(self, progress: LoadProgress) -> None:
        """Takes one step into account; may be called from any thread."""
        what = progress.what
        name = what[:1].upper() + what[1:] if progress.stage < 0 else f"Stage {progress.stage}: {what}"
        size = f"{progress.total_bytes / 1e6:.0f} MB" if progress.total_bytes else ""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, size="")
            self._print_line(f"{name} ... {size}")
        self._bars.update(
            self._tasks[name], completed=progress.done_bytes, total=progress.total_bytes or None, size=size
        )
        if 0 < progress.total_bytes <= progress.done_bytes and name not in self._finished:
            self._finished.add(name)
            self._print_line(f"{name} done")

    def _print_line(self, line: str) -> None:
        if not self._console.is_terminal:
            with suppress(OSError):  # where nothing can be written (a full disk), work goes on all the same
                self._console.print(line.rstrip(), highlight=False)

    def __enter__(self) -> StartProgress:
        self._bars.add_task("Starting", total=None, size="")
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for task in self._bars.tasks:
                self._bars.update(task.id, total=1, completed=1)  # also those that are not counted in bytes
        self._bars.stop()


class RequestProgress:
    """How many of a batch of requests are done, and tokens per second. A context manager."""

    def __init__(self, num_requests: int, is_shown: bool) -> None:
        self._bar = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens_per_s]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not is_shown,
        )
        self._task = self._bar.add_task("", total=num_requests, tokens_per_s=0.0)

    def advance(self, num_tokens: int) -> None:
        """One more request is done; `num_tokens` were generated in all so far."""
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        self._bar.update(self._task, advance=1, tokens_per_s=num_tokens / elapsed_s if elapsed_s else 0.0)

    def __enter__(self) -> RequestProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class WorkProgress:
    """How far a command's own work has come: one bar, gone at the end. A context manager.

    Args:
        what: what is being done; `update` may say something else.
        total: how much there is to do, as far as it is known yet.
        count: the column that says how much is done.
        plain: printed with the first step where there is no terminal.
        is_shown: False: nothing is shown anywhere.
    """

    def __init__(
        self,
        what: str,
        *,
        total: float | None = None,
        count: ProgressColumn | None = None,
        plain: str = "",
        is_shown: bool = True,
    ) -> None:
        self._console = Console(stderr=True)
        is_drawn = is_shown and self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            count or MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not is_drawn,
        )
        self._task = self._bar.add_task(what, total=total)
        self._plain = plain if is_shown and not is_drawn else ""

    def update(self, done: float, total: float | None = None, what: str | None = None) -> None:
        """`done` of `total`; None: as before."""
        if self._plain:
            self._console.print(self._plain, highlight=False, markup=False, soft_wrap=True)
            self._plain = ""
        if done < self._bar.tasks[0].completed:  # the next piece of work, with a time of its own
            self._bar.reset(self._task)
        self._bar.update(self._task, completed=done, total=total, description=what)

    def __enter__(self) -> WorkProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

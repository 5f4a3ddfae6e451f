"""What the user sees while waiting: bars on a terminal, plain lines elsewhere; always on standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from fullbore.engine.messages import LoadProgress


class StartProgress:
    """How far the engine's start has come: fetching the model, then each stage's weights. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[str] = set()

    def update(self, progress: LoadProgress) -> None:
        """Takes one step into account; may be called from any thread."""
        name = progress.what.capitalize() if progress.stage < 0 else f"Stage {progress.stage}: {progress.what}"
        is_new = name not in self._tasks
        if is_new:
            self._tasks[name] = self._bars.add_task(name, total=None)
        is_finished = progress.done_bytes >= progress.total_bytes and name not in self._finished
        if is_finished:
            self._finished.add(name)
        total_bytes = progress.total_bytes or None
        self._bars.update(self._tasks[name], completed=progress.done_bytes, total=total_bytes)
        if not self._console.is_terminal and (is_new or is_finished):
            size = f"{progress.total_bytes / 1e6:.0f} MB"
            self._console.print(f"{name}{' done' if is_finished else ' ...'} ({size})", highlight=False)

    def __enter__(self) -> StartProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

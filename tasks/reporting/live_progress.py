"""Show progress on a terminal: a bar of a campaign's runs, or a spinner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .progress import Reporter, log_to_run


def live_reporter() -> Reporter:
    """Return a reporter with a progress bar if standard error is a terminal, else plain lines."""
    console = Console(stderr=True)
    return LiveReporter(console) if console.is_terminal else Reporter()


class LiveReporter(Reporter):
    """Shows a progress bar of a campaign's runs on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Print `text` above the bar, and log it to the flow run."""
        log_to_run(text)
        self._console.print(text, highlight=False, markup=False)

    def start(self, runs: int) -> None:
        self.stop()
        columns = (
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("runs  {task.fields[usd]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(
            *columns, TextColumn("{task.description}"), console=self._console, transient=True
        )
        self._bar.add_task("starting", total=runs, usd="$0.0000")
        self._bar.start()

    def watch(self, what: str, done: int, usd: float | None) -> None:
        if self._bar is not None:
            spent = "price unknown" if usd is None else f"${usd:.4f}"
            self._bar.update(self._bar.task_ids[0], completed=done, description=what, usd=spent)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner with the text `what` on a terminal within the block."""
    console = console or Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield

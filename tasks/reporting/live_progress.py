"""Show progress on a terminal: a spinner with the current step of a campaign or a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text

from .progress import Reporter, log_to_run


def live_reporter() -> Reporter:
    """Return a reporter with a spinner if standard error is a terminal, else plain lines."""
    console = Console(stderr=True)
    return LiveReporter(console) if console.is_terminal else Reporter()


class LiveReporter(Reporter):
    """Shows the runs and dollars of a campaign beside a spinner."""

    def __init__(self, console: Console) -> None:
        self._console, self._status, self._runs = console, console.status("starting"), 0

    def say(self, text: str) -> None:
        """Print `text` above the spinner, and log it to the flow run."""
        log_to_run(text)
        self._console.print(text, highlight=False, markup=False)

    def start(self, runs: int) -> None:
        self._runs = runs
        self._status.start()

    def watch(self, what: str, done: int, usd: float | None) -> None:
        spent = "price unknown" if usd is None else f"${usd:.4f}"
        self._status.update(Text(f"{done}/{self._runs} runs  {spent}  {what}"))

    def stop(self) -> None:
        self._status.stop()


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner with the text `what` on a terminal within the block."""
    console = console or Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield

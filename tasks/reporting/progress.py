"""What a person sees: live progress while a flow runs, tables afterwards, Prefect artifacts for its page.

Progress is a line that is redrawn on a terminal and plain lines elsewhere; nothing here decides anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Row = Mapping[str, Any]

# Events that the flows send to Prefect: what automations and other programs follow.
RECOMMENDATION_CHANGED = "srift.recommendation.changed"  # another first choice for a goal
PROMOTION_REFUSED = "srift.promotion.refused"
DRIFTED = "srift.drift"  # the model in force is off on runs that it had not seen
MONEY_SHORT = "srift.money.short"  # most of what a month may cost is spent or held


class Reporter:
    """Plain lines to standard error (a flow run's log, a pipe)."""

    def say(self, text: str) -> None:
        """Log a finished step: to the flow run, else to standard error."""
        if not log_to_run(text):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def start(self, runs: int) -> None:
        """A campaign of `runs` begins."""

    def watch(self, what: str, done: int, usd: float | None) -> None:
        """`what` is under way, `done` runs have a record, `usd` dollars are spent (None: unknown price)."""

    def stop(self) -> None:
        """The campaign is over."""


class LiveReporter(Reporter):
    """A bar on a terminal: what is running, how many runs are left, dollars so far."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Print above the bar, and log to the flow run."""
        log_to_run(text)
        self._console.print(text, highlight=False, markup=False)

    def start(self, runs: int) -> None:
        """Show the bar, anew where there is one."""
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
        """Redraw the bar."""
        if self._bar is not None:
            spent = "price unknown" if usd is None else f"${usd:.4f}"
            self._bar.update(self._bar.task_ids[0], completed=done, description=what, usd=spent)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


_reporter: ContextVar[Reporter] = ContextVar("reporter")
_PLAIN = Reporter()


def reporter() -> Reporter:
    """Whoever shows progress here; plain lines unless `reporting_to` says otherwise."""
    return _reporter.get(_PLAIN)


@contextmanager
def reporting_to(other: Reporter) -> Iterator[None]:
    """Show progress through `other` within the block."""
    token = _reporter.set(other)
    try:
        yield
    finally:
        other.stop()
        _reporter.reset(token)


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[None]:
    """Show on a terminal that `what` is under way, until the block ends; nothing elsewhere."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def seconds_listed(seconds: Mapping[str, float]) -> str:
    """Phases and their seconds, longest first, for a line of progress."""
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{phase} {spent:.1f} s" for phase, spent in longest)


def log_to_run(text: str) -> bool:
    """Log to Prefect's run; False outside a run."""
    if "prefect" not in sys.modules:
        return False
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        get_run_logger().info(text)
    except MissingContextError:
        return False
    return True


def publish_artifacts(rows: Sequence[Row], changes: Sequence[Row], report: Path) -> None:
    """Attach the table, its changes and a link to the report page to the flow run."""
    from prefect.artifacts import (
        create_link_artifact,
        create_markdown_artifact,
        create_table_artifact,
    )

    create_link_artifact(key="report", link=report.as_uri(), link_text="report.html")

    shown = (
        "workload",
        "goal",
        "rank",
        "status",
        "cluster",
        "market",
        "hours",
        "usd",
        "p_meets_constraint",
        "reason",
    )
    create_table_artifact(
        key="recommendations", table=[{name: _plain(row[name]) for name in shown} for row in rows]
    )
    chosen_first = sorted(changes, key=lambda one: one["change"] not in ("choice", "goal"))
    text = (
        "\n".join(f"- {_change(change)}" for change in chosen_first)
        or "Nothing changed since the last publication."
    )
    create_markdown_artifact(key="what-changed", markdown=f"## What changed\n{text}\n")


def announce(event: str, about: str, said: str, **more: Any) -> None:
    """Send `event`, one of those above, to Prefect; `about` names what it is of, as `recommendation.ec2.vit.cheapest`.

    Its payload is `said`, a sentence, and `more`. A server that cannot be reached loses it, and nothing else.
    """
    from prefect.events import emit_event

    payload = {"said": said} | {name: _plain(value) for name, value in more.items()}
    emit_event(event=event, resource={"prefect.resource.id": f"srift.{about}"}, payload=payload)


def announce_changes(provider: str, changes: Sequence[Row]) -> None:
    """An event for each goal whose first choice is another than in the last publication, with the change's columns."""
    for change in changes:
        if change["change"] in ("choice", "goal"):
            about = f"recommendation.{provider}.{change['workload']}.{change['goal']}"
            announce(RECOMMENDATION_CHANGED, about, _change(change), **change)


def _change(change: Row) -> str:
    """`wide-mlp, cheapest 1.5: choice: 2xa spot, 1.2 h, $0.03 -> 1xb spot, 1.1 h, $0.04 (prices)`."""
    limits = (_plain(change[name]) for name in ("constraint_hours", "constraint_usd"))
    limit = next((one for one in limits if one is not None), None)
    goal = change["goal"] if limit is None else f"{change['goal']} {limit:g}"
    before, after = (_choice(change, prefix) for prefix in ("previous_", ""))
    return (
        f"{change['workload']}, {goal}: {change['change']}: {before} -> {after} ({change['cause']})"
    )


def _choice(change: Row, prefix: str) -> str:
    cluster = _plain(change[f"{prefix}cluster"])
    if not cluster:
        return str(_plain(change[f"{prefix}status"]) or "not in the table")
    usd = _plain(change[f"{prefix}usd"])
    return f"{cluster} {change[f'{prefix}market']}, {change[f'{prefix}hours']:.3g} h, " + (
        "price unknown" if usd is None else f"${usd:.4f}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else round(value, 4)
    return value if value is None or isinstance(value, int | str | bool) else str(value)

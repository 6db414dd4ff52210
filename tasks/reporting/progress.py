"""Report the progress and results of a flow as lines of text, Prefect artifacts and events."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

Row = Mapping[str, Any]

# Names of events for Prefect's automations and other programs.
RECOMMENDATION_CHANGED = "srift.recommendation.changed"
PROMOTION_REFUSED = "srift.promotion.refused"
DRIFTED = "srift.drift"
MONEY_SHORT = "srift.money.short"
_CLEAR_LINE = "\r\x1b[K"


class Reporter:
    """Writes messages to standard error and, on a terminal, a progress line."""

    _runs = _done = 0
    _artifact: Any = None

    def say(self, text: str) -> None:
        """Log `text` to the flow run and to standard error."""
        log_to_run(text)
        self._write(f"{text}\n")

    def start(self, runs: int) -> None:
        """Set the number of planned runs. In a flow, also create the progress artifact."""
        self._runs = runs
        if runs and self._artifact is None and _run_loggers():
            from prefect.artifacts import create_progress_artifact

            words = "measured runs, of the runs planned so far"
            with suppress(Exception):  # an error in Prefect must not end the measurements
                self._artifact = create_progress_artifact(0.0, key="measuring", description=words)

    def watch(self, what: str, run_count: int, usd: float | None) -> None:
        """Update the progress line (on a terminal) and the progress artifact (in a flow).

        what: the activity to show.
        run_count: the number of finished runs.
        usd: dollars spent so far; None if a price is unknown.
        """
        if sys.stderr.isatty():
            cost = "price unknown" if usd is None else f"${usd:.4f}"
            columns = shutil.get_terminal_size().columns - 1
            self._write(f"{run_count}/{self._runs} runs  {cost}  {what}"[:columns])
        if run_count != self._done:
            self._done = run_count
            self._show(100 * run_count / max(self._runs, run_count, 1))

    def stop(self) -> None:
        """Clear the progress line."""
        self._write("")

    def finish(self) -> None:
        """Set the progress artifact to 100 %, because no further run follows."""
        self._show(100.0)

    def _show(self, percent: float) -> None:
        if self._artifact is not None:
            from prefect.artifacts import update_progress_artifact

            with suppress(Exception):  # an error in Prefect must not end the measurements
                update_progress_artifact(self._artifact, percent)

    def _write(self, text: str) -> None:
        sys.stderr.write(_CLEAR_LINE + text if sys.stderr.isatty() else text)
        sys.stderr.flush()


@cache
def reporter() -> Reporter:
    return Reporter()


_OUTER: list[Any] = []  # the logger of the flow run that called `tell_all`


def log_to_run(text: str) -> None:
    """Log `text` to the current Prefect flow run, and to the outer flow run set by `tell_all`.

    Without a current flow run, nothing is logged.
    """
    for logger in _run_loggers().values():
        logger.info(text)


def tell_all() -> None:
    """Set the current flow run as the outer flow run.

    The outer flow run also receives the text that its sub-flows pass to `log_to_run`.
    """
    _OUTER[:] = [*_run_loggers().values()][-1:]


def _run_loggers() -> dict[str, Any]:
    """Return the loggers that `log_to_run` uses, as {flow run id: logger}."""
    if "prefect" not in sys.modules:
        return {}
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return {logger.extra["flow_run_id"]: logger for logger in (*_OUTER, get_run_logger())}
    except MissingContextError:
        return {}


def publish_summary(key: str, description: str, lines: Sequence[str]) -> None:
    """Attach `lines` to the Prefect flow run as Markdown paragraphs."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact("\n\n".join(lines), key=key, description=description)


def publish_table(key: str, description: str, rows: Sequence[Row]) -> None:
    """Attach `rows` to the Prefect flow run as a table."""
    from prefect.artifacts import create_table_artifact

    table = [{name: _plain(value) for name, value in row.items()} for row in rows]
    create_table_artifact(table, key=key, description=description)


def publish_artifacts(rows: Sequence[Row], changes: Sequence[Row]) -> None:
    """Attach the table and its changes to the Prefect flow run."""
    publish_table("recommendations", "Recommended clusters", rows)
    lines = list(map(_change, changes)) or ["Nothing changed."]
    publish_summary("what-changed", "Changes of the recommendations", lines)


def announce(event: str, about: str, message: str, **more: Any) -> None:
    """Send an event to Prefect.

    event: name of the event.
    about: name of the event's resource, such as `recommendation.ec2.vit.cheapest`.
    message: the text of notifications about the event.
    more: other values of the event's payload.
    """
    from prefect.events import emit_event

    payload = {"message": message} | {name: _plain(value) for name, value in more.items()}
    emit_event(event=event, resource={"prefect.resource.id": f"srift.{about}"}, payload=payload)


def announce_changes(provider: str, changes: Sequence[Row]) -> None:
    """Send a Prefect event for each goal whose first choice has changed.

    changes: rows of the published table recommendation_changes.
    """
    for change in changes:
        if change["change"] in ("choice", "goal"):
            about = f"recommendation.{provider}.{change['workload']}.{change['goal']}"
            announce(RECOMMENDATION_CHANGED, about, _change(change), **change)


def _change(change: Row) -> str:
    """Return a row of recommendation_changes as text, with the cause in parentheses.

    For example: `vit, fastest: choice: 1xg5.xlarge spot, 2 h, $0.8000 -> ... (prices)`.
    """
    row = {name: _plain(value) for name, value in change.items()}
    before, after = _choice(row, "previous_"), _choice(row, "")
    goal = goal_text(row)
    return f"{row['workload']}, {goal}: {row['change']}: {before} -> {after} ({row['cause']})"


def _choice(row: Row, prefix: str) -> str:
    if not row[f"{prefix}cluster"]:
        return str(row[f"{prefix}status"] or "not in the table")
    cluster, market, hours, usd = (
        row[f"{prefix}{name}"] for name in ("cluster", "market", "hours", "usd")
    )
    price = "price unknown" if usd is None else f"${usd:.4f}"
    return f"{cluster} {market}, {hours:.3g} h, {price}"


def goal_text(row: Row) -> str:
    """Return a goal with its limit as text, such as `cheapest_within_deadline 12 h`."""
    hours, usd = row["constraint_hours"], row["constraint_usd"]
    limit = "" if usd is None else f" ${usd:g}"
    if hours is not None:
        limit = f" {round(hours, 3):g} h"
    return f"{row['goal']}{limit}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else round(value, 4)
    return value if value is None or isinstance(value, int | str) else str(value)

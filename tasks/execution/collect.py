"""Reap machines that should be gone, and load what leases left in their mailboxes.

Used after every launch, before every refresh, and by `srift reap`. Every record is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from warehouse import append

from ..providers.base import NotSwept, ProviderError
from ..reporting.progress import reporter
from ..workspace.locking import alone, at_work_elsewhere
from ..workspace.workspace import PROVIDERS, Workspace, new_refresh_id, open_workspace, spends_money
from .claims import settle
from .job import Served
from .record_loader import Collected, load_lease

SWEPT_WITHIN = timedelta(hours=1)  # of anything that is bought


def collect(workspace: Workspace, refresh_id: str, now: datetime) -> Collected:
    """Load every lease that is over, then forget it. Loading twice adds nothing.

    Leases of a refresh at work in another process are left to that process: it counts their cost.
    """
    collected = Collected()
    with alone(workspace.home, "collect"):
        other = at_work_elsewhere(workspace.home)
        for lease in workspace.provider.ended():
            if other is None or not lease.lease_id.startswith(str(other.get("refresh_id", ""))):
                collected.add(load_lease(workspace, lease, refresh_id, now))
                workspace.provider.forget(lease.lease_id)
    return collected


def collect_launch(
    workspace: Workspace, served: Served, refresh_id: str, now: datetime
) -> Collected:
    """Load what one launch measured. A launch without machines left no mailbox: its rows are loaded
    directly.
    """
    if served.mailbox is None:
        rows = [{"ended_unix": now.timestamp()} | row for row in served.rows]
        with workspace.warehouse.transact() as connection:
            append.append_records(connection, rows, refresh_id=refresh_id, loaded_at=now)
    return collect(workspace, refresh_id, now)


def reap_now(provider: str | None = None) -> list[str]:
    """Reap and load; return a sentence for each thing that was ended or loaded. Raises NotSwept.

    Without a provider, every provider that this home has used is reaped, paid ones first. The
    failure of one does not stop the others.
    """
    done: list[str] = []
    unswept: list[NotSwept] = []
    failed: list[Exception] = []
    with _printed_on_error(done):
        for workspace in [open_workspace(provider)] if provider else _used():
            try:
                done += end_and_collect(workspace, datetime.now(UTC))
            except NotSwept as error:
                done += error.done
                unswept.append(error)
            except Exception as error:
                failed.append(error)
        if failed:
            done += map(str, [*unswept, *failed[1:]])
            raise failed[0]
    if unswept:
        name = unswept[0].provider if len(unswept) == 1 else ""
        reasons = {place: why for error in unswept for place, why in error.unswept.items()}
        raise NotSwept(name, reasons, done)
    return done


def _used() -> list[Workspace]:
    """Return workspaces of the providers that may have left something, paid ones first."""
    names = sorted(PROVIDERS, key=lambda name: not spends_money(name))
    return [one for one in map(open_workspace, names) if one.provider.was_used()]


def say_all(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        reporter().say(sentence)


@contextmanager
def _printed_on_error(done: Iterable[str]) -> Iterator[None]:
    """Print what was done if an error, or Ctrl-C, keeps it from being returned."""
    try:
        yield
    except BaseException:
        say_all(done)
        raise


def end_and_collect(workspace: Workspace, now: datetime) -> list[str]:
    """End leases past their deadline or without a controller, load ended ones, and return what was
    done.

    Raises NotSwept at the end if something could not be looked at.
    """
    unswept: list[NotSwept] = []
    try:
        done = workspace.provider.reap(now)
    except NotSwept as error:
        unswept, done = [error], error.done
    with _printed_on_error([*done, *map(str, unswept)]):
        workspace.warehouse.create()
        collected = collect(workspace, new_refresh_id(now), now)
        if not unswept:
            settle(workspace, now)
    done = [*done, *collected.notes]
    if collected.new:
        done.append(f"{collected.new} rows that had not been loaded are in the warehouse now")
    if unswept:
        raise NotSwept(workspace.provider.name, unswept[0].unswept, done)
    return done


def refuse_unless_swept(workspace: Workspace, now: datetime) -> None:
    """Raise ProviderError, before anything is bought, if a region was not swept within the last
    hour.
    """
    regions = workspace.provider.not_swept_since(now - SWEPT_WITHIN)
    if regions:
        raise ProviderError(
            f"nothing was bought: the reaper has not looked through {', '.join(regions)} within the"
            f" last hour; run `srift reap --provider {workspace.provider.name}`, then again"
        )

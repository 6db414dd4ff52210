"""Reap what should be dead, and load what leases left in their mailboxes: records, costs, machines.

Used after every launch, before every refresh, and by `srift reap`. Every record is loaded once.
NotSwept reports what could not be looked at, after all else is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from warehouse import append

from ..node.record import Item
from ..providers.base import EndedLease, NotSwept, ProviderError
from ..reporting.progress import reporter
from ..workspace.locking import alone, at_work_elsewhere
from ..workspace.workspace import PROVIDERS, Workspace, capabilities, new_refresh_id, open_workspace
from .claims import settle
from .job import Served
from .mailbox import machine_rows, read_object
from .outcomes import AttemptEnd, item_row, launch_row
from .record_loader import Collected, EndedLaunch, load_mailbox


def collect(workspace: Workspace, refresh_id: str, now: datetime) -> Collected:
    """Load every lease that is over, then forget it. Loading twice adds nothing.

    Leases of a refresh at work in another process are left to that process: it counts their cost.
    """
    collected = Collected()
    with alone(workspace.home, "collect"):
        other = at_work_elsewhere(workspace.home)
        for lease in workspace.provider.ended():
            if other is not None and lease.lease_id.startswith(str(other.get("refresh_id", ""))):
                continue
            collected.add(_load_lease(workspace, lease, refresh_id, now))
            _keep_rejected(lease, workspace.home / "rejected" / lease.lease_id)
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


def _load_lease(
    workspace: Workspace, lease: EndedLease, refresh_id: str, now: datetime
) -> Collected:
    run_setups = read_object(lease.mailbox / "controller" / "envelopes.json") or {}
    found = {
        file: read_object(file) for file in sorted(lease.mailbox.glob("controller/rows/*.json"))
    }
    rows = [row for row in found.values() if row]
    if lease.outcome == "reaped":
        rows += _interrupted_row(
            lease, run_setups
        )  # where the controller reported that run itself, its row comes first
    provider = workspace.provider.name
    rows += _refusal_rows(lease, run_setups or {"": {"provider": provider, "market": lease.market}})
    columns = asdict(lease) | {"provider": provider}
    del columns["mailbox"], columns["refusals"]
    launch = EndedLaunch(
        mailbox=lease.mailbox,
        run_setups=run_setups,
        rows=rows,
        lease=None if lease.outcome == "refused" else columns,
        machines=machine_rows(lease, provider),
    )
    bought_by = lease.lease_id.rpartition("-")[0] or refresh_id  # whoever brings it home
    loaded = load_mailbox(workspace.warehouse, launch, refresh_id=bought_by, now=now)
    loaded.usd = lease.usd or 0.0
    loaded.notes += [
        f"{file} could not be read, and its row is lost" for file, row in found.items() if not row
    ]
    return loaded


def _interrupted_row(lease: EndedLease, run_setups: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of the run under way when a lease was reaped: the first of its plan without
    a record.
    """
    recorded = {file.stem for file in lease.mailbox.glob("node-*/records/*.json")}
    planned = (
        Item(**item) for item in (read_object(lease.mailbox / "plan.json") or {}).get("items", ())
    )
    under_way = next(
        (item for item in planned if item.run_id not in recorded and item.run_id in run_setups),
        None,
    )
    if under_way is None:
        return []
    reason = "its controller was killed or its deadline passed, and the machines were reaped"
    return [
        item_row(
            lease.lease_id,
            under_way,
            run_setups,
            AttemptEnd(how="lost", reason=reason, interrupted=True),
        )
    ]


def _refusal_rows(lease: EndedLease, run_setups: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each request that was refused before the lease got its machines."""
    return [
        launch_row(lease.lease_id, lease.cluster, run_setups, "refused", reason)
        | {"run_id": f"{lease.lease_id}-refused-{number}"}
        for number, reason in enumerate(lease.refusals, 1)
    ]


def _keep_rejected(lease: EndedLease, folder: Path) -> None:
    """Copy rejected records out of the lease, for a person to look at."""
    rejected = lease.mailbox / "rejected"
    if rejected.is_dir():
        shutil.copytree(rejected, folder, dirs_exist_ok=True)


SWEPT_WITHIN = timedelta(hours=1)  # of anything that is bought


def reap_now(provider: str | None = None) -> list[str]:
    """Reap and load; return a sentence for each thing that was ended or loaded. Raises NotSwept.

    Without a provider, every provider that this home has used is reaped, paid ones first; the
    failure of one does not stop the others.
    """
    sentences: list[str] = []
    unswept: list[NotSwept] = []
    failed: list[Exception] = []
    workspaces = [open_workspace(provider)] if provider else _used()
    try:
        for workspace in workspaces:
            try:
                sentences += end_and_collect(workspace, datetime.now(UTC))
            except NotSwept as error:
                sentences += error.done
                unswept.append(error)
            except Exception as error:
                failed.append(error)
    except BaseException:
        say_all([*sentences, *map(str, unswept)])
        raise
    if failed:
        say_all([*sentences, *map(str, unswept), *map(str, failed[1:])])
        raise failed[0]
    if unswept:
        name = unswept[0].provider if len(unswept) == 1 else ""
        raise NotSwept(
            name, {key: why for one in unswept for key, why in one.unswept.items()}, sentences
        )
    return sentences


def _used() -> list[Workspace]:
    """Workspaces of the providers that may have left something, paid ones first."""
    found = [
        open_workspace(one)
        for one in sorted(PROVIDERS, key=lambda one: not capabilities(one).spends_money)
    ]
    return [one for one in found if one.provider.was_used()]


def say_all(sentences: Iterable[str]) -> None:
    """Print what was done, where an error or Ctrl-C keeps it from being returned."""
    for sentence in sentences:
        reporter().say(sentence)


def end_and_collect(workspace: Workspace, now: datetime) -> list[str]:
    """End leases past their deadline or without a controller, load ended ones, and return what was
    done.

    Raises NotSwept at the end if something could not be looked at. If the warehouse fails, prints
    what was ended before it raises.
    """
    unswept: dict[str, str] = {}
    try:
        ended = workspace.provider.reap(now)
    except NotSwept as error:
        ended, unswept = error.done, error.unswept
    try:
        workspace.warehouse.create()
        collected = collect(workspace, new_refresh_id(now), now)
        if not unswept:
            settle(workspace, now)
    except BaseException:
        say_all([*ended, *([str(NotSwept(workspace.provider.name, unswept))] if unswept else [])])
        raise
    sentences = [*ended, *collected.notes]
    if collected.new:
        sentences.append(f"{collected.new} rows that had not been loaded are in the warehouse now")
    if unswept:
        raise NotSwept(workspace.provider.name, unswept, sentences)
    return sentences


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

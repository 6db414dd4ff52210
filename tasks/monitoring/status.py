"""Report the running refresh, its machines and stale data.

The report reads the lease files and the published files. A lease is the record of a launch.
"""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.setup_table import Row, rows_of
from models.monitoring.drift import drift_sentence
from warehouse.database import WarehouseError, WarehouseMissing
from warehouse.export import STALE_AFTER_H, ledger_summary, read_published

from ..doctor.checks import examine_home
from ..doctor.findings import problems
from ..reporting.tables import cautions_in
from ..workspace.locking import at_work
from ..workspace.workspace import PROVIDERS, Workspace, open_workspace, provider_of, refresh_command
from .checks import alarm_sentences, ledger_sentence

_OF_LEASES = ("lease_id", "cluster", "started_at", "deadline_at", "controller_alive", "problem")
_AGES = ("published_at", "price_as_of", "newest_measurement_at")


def status_of(provider: str) -> dict[str, Any]:
    """Return the state of an installation, as `srift status --json` prints it."""
    workspace, now = open_workspace(provider), datetime.now(UTC)
    leases = workspace.provider.leases()
    table, stale = _table_status(workspace, now)
    ledger: dict[str, Any] = {}
    with suppress(WarehouseError):  # `stale` has a sentence about this error
        ledger = ledger_summary(workspace.published, provider)
    refresh = at_work(workspace.home)
    stale = problems(examine_home(workspace.settings, thorough=False)) + stale
    stale += [
        f"the process that launched lease {lease.lease_id} has died: run `srift reap`"
        for lease in leases
        if not lease.controller_alive
    ]
    stale += [f"lease {lease.lease_id}: {lease.problem}" for lease in leases if lease.problem]
    ended_leases = workspace.provider.ended()
    if ended_leases and refresh is None:
        stale.append(
            f"the records of {len(ended_leases)} ended leases are not loaded yet: run `srift reap`"
        )
    for other in sorted(set(PROVIDERS) - {provider}):
        if other_leases := provider_of(workspace.settings, other).leases():
            stale.append(
                f"{other} has {len(other_leases)} leases: see `srift status --provider {other}`"
            )
    return {
        "provider": provider,
        "at_work": refresh,
        "leases": [
            {name: getattr(lease, name) for name in _OF_LEASES}
            | {"usd_so_far": lease.usd_until(now)}
            for lease in leases
        ],
        "published": table,
        "report_page": str(workspace.report_page) if workspace.report_page.exists() else None,
        "ledger": ledger,
        "ledger_sentence": ledger_sentence(ledger),
        "drift": list(map(drift_sentence, _published_rows(workspace, "drift", drifting=True))),
        "alarms": alarm_sentences(_published_rows(workspace, "alarms")),
        "stale": stale,
        "limits": workspace.provider.limits(),
    }


def _table_status(workspace: Workspace, now: datetime) -> tuple[dict[str, Any] | None, list[str]]:
    """Return facts about the provider's published table, and sentences about stale contents.

    The facts are the number of rows, the model version, and the ages in hours of the table, its
    newest prices and its newest measurements. If the table cannot be read, or has no row of the
    provider, None is returned in place of the facts.
    """
    try:
        frame = read_published(workspace.published)
    except WarehouseMissing as error:
        return None, [str(error)]
    except WarehouseError:
        return None, []  # `examine_home` reports the damage
    frame = frame[frame["provider"] == workspace.provider.name]
    refresh = refresh_command(workspace.provider.name, "0")
    if not len(frame):
        return None, [f"nothing is published for {workspace.provider.name}: run `{refresh}`"]
    facts = {"rows": len(frame), "model_version": frame["model_version"].iloc[0] or None}
    stale = cautions_in(frame["reason"])
    for name in _AGES:
        newest = frame[name].max()
        age_h = (pd.Timestamp(now).tz_localize(None) - newest) / pd.Timedelta(hours=1)
        facts[f"{name}_h_ago"] = None if pd.isna(age_h) else age_h
        if age_h > STALE_AFTER_H:
            stale.append(f"the table's {name} is {age_h / 24:.1f} days old: run `{refresh}`")
    missing = sorted(set(workspace.settings.workloads) - set(frame["workload"]))
    stale += [f"workload {name} is not in the published table: run `{refresh}`" for name in missing]
    return facts, stale


def _published_rows(workspace: Workspace, name: str, **equal: object) -> list[Row]:
    """Return the rows of the workspace's provider in the published table or view `name`.

    Returns no rows if the published files cannot be read.

    equal: {column: value that the column must equal}.
    """
    conditions = {"provider": workspace.provider.name, **equal}
    try:
        return rows_of(read_published(workspace.published, name, conditions))
    except WarehouseError:
        return []

"""What is running, what it costs, what is stale: read from lease files and the published copy, never from a lock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.monitoring.regret_ledger import ledger_summary
from warehouse.database import WarehouseError, WarehouseMissing
from warehouse.export import STALE_AFTER_H, read_published

from ..doctor.report import trouble_of
from ..reporting.tables import cautions_in
from ..workspace.locking import at_work
from ..workspace.workspace import PROVIDERS, Workspace, open_workspace, provider_of, refresh_command
from .checks import alarm_sentences, drift_sentences, ledger_sentence

_AGED = {
    "published_at": "the published table is {days:.1f} days old: run `{refresh}`",
    "price_as_of": "the table's prices are {days:.1f} days old",
    "newest_measurement_at": "the table's newest measurement is {days:.1f} days old",
}


def status_of(provider: str) -> dict[str, Any]:
    """The refresh at work, the leases held with their dollars so far, the table's age, and what is stale or amiss."""
    workspace = open_workspace(provider)
    now = datetime.now(UTC)
    held = workspace.provider.leases()
    leases = [
        {
            "lease_id": lease.lease_id,
            "cluster": lease.cluster,
            "usd_so_far": lease.usd_until(now),
            "started_at": lease.started_at,
            "deadline_at": lease.deadline_at,
            "controller_alive": lease.controller_alive,
            "problem": lease.problem,
        }
        for lease in held
    ]
    published, stale = _published(workspace, now)
    ledger = _relation(workspace, "regret_ledger")
    orphans = [lease["lease_id"] for lease in leases if not lease["controller_alive"]]
    stale = trouble_of(workspace.settings) + stale
    stale += [f"lease {name} has lost its controller: run `srift reap`" for name in orphans]
    stale += [f"lease {lease.lease_id}: {lease.problem}" for lease in held if lease.problem]
    unloaded = workspace.provider.ended()
    if unloaded and at_work(workspace.home) is None:
        stale.append(f"{len(unloaded)} ended leases wait to be loaded: run `srift reap`")
    for other in sorted(set(PROVIDERS) - {provider}):
        if held_there := provider_of(workspace.settings, other).leases():
            stale.append(
                f"{other} holds leases, too ({len(held_there)}): `srift status --provider {other}` lists them"
            )
    return {
        "provider": provider,
        "at_work": at_work(workspace.home),
        "leases": leases,
        "published": published,
        "report_page": str(workspace.report_page) if workspace.report_page.exists() else None,
        "ledger": ledger_summary(ledger),
        "ledger_sentence": ledger_sentence(ledger),
        "drift": drift_sentences(workspace, _drifting(workspace)),
        "alarms": alarm_sentences(_relation(workspace, "alarms")),
        "stale": stale,
        "limits": workspace.provider.limits(),
    }


def _published(workspace: Workspace, now: datetime) -> tuple[dict[str, Any] | None, list[str]]:
    """Ages of the published table in hours, and sentences on what is stale about it."""
    try:
        frame = read_published(workspace.published)
    except WarehouseMissing as error:
        return None, [str(error)]
    except WarehouseError:
        return None, []  # damaged: `trouble_of` says so
    mine = frame[frame["provider"] == workspace.provider.name]
    if not len(mine):
        return None, [f"nothing has been published for provider {workspace.provider.name}"]
    moments = {name: mine[name].max() for name in _AGED}
    ages = {name: None if pd.isna(at) else _hours_since(at, now) for name, at in moments.items()}
    old = {name: age for name, age in ages.items() if age is not None and age > STALE_AFTER_H}
    refresh = refresh_command(workspace.provider.name, "0")
    stale = [_AGED[name].format(days=age / 24, refresh=refresh) for name, age in old.items()]
    missing = sorted(set(workspace.settings.workloads) - set(mine["workload"]))
    stale += cautions_in(mine["reason"])
    stale += [f"workload {name} is not in the published table: run `{refresh}`" for name in missing]
    version = mine["model_version"].iloc[0]
    facts = {
        "rows": len(mine),
        "model_version": None if pd.isna(version) or not version else version,
    }
    return facts | {f"{name}_h_ago": age for name, age in ages.items()}, stale


def _relation(workspace: Workspace, name: str) -> pd.DataFrame:
    """This provider's rows of a published relation; none where nothing that has it can be read."""
    try:
        return read_published(workspace.published, name, {"provider": workspace.provider.name})
    except WarehouseError:
        return pd.DataFrame(columns=["verdict", "regret", "within_interval", "drifting"])


def _drifting(workspace: Workspace) -> pd.DataFrame:
    found = _relation(workspace, "drift")
    return found[found["drifting"].astype(bool)]


def _hours_since(at: Any, now: datetime) -> float:
    moment = pd.Timestamp(at)
    moment = moment.tz_localize(UTC) if moment.tzinfo is None else moment
    return (now - moment.to_pydatetime()).total_seconds() / 3600.0

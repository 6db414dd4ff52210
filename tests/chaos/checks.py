"""The invariants that hold after every scenario; a sentence for each broken one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.controller import Campaigns
from tests.chaos.world import ChaosAws, sound

TAKEN = "Server.SpotInstanceTermination"
THROTTLED = {"throttling", "a launch of many tries"}  # their refusals use up the same few tries
ROUNDING_USD = 0.005  # moments that AWS tells are whole seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the warehouse holds: all rows by run id, and dollars by lease."""

    rows: dict[str, list[dict[str, Any]]]
    usd: dict[str, list[float | None]]
    outcomes: dict[str, str]


def kept(campaigns: Campaigns) -> Kept:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in campaigns.warehouse.select("raw_runs").to_dict("records"):
        rows.setdefault(str(row["run_id"]), []).append(row)
    usd: dict[str, list[float | None]] = {}
    outcomes: dict[str, str] = {}
    for lease in campaigns.warehouse.select("raw_leases").to_dict("records"):
        value = lease["usd"]
        usd.setdefault(lease["lease_id"], []).append(None if value != value else float(value))
        outcomes[lease["lease_id"]] = lease["outcome"]
    return Kept(rows=rows, usd=usd, outcomes=outcomes)


def complaints(campaigns: Campaigns) -> list[str]:
    """Empty where all is well."""
    world, what = campaigns.home.world, kept(campaigns)
    return [
        *campaigns.wrong,
        *machines(world),
        *records(world, what),
        *money(campaigns, what),
        *rows(campaigns, what),
        *devices(what),
        *false_alarms(world, what),
        *leftovers(campaigns),
    ]


def machines(world: ChaosAws) -> Iterator[str]:
    if world.overdue:
        yield f"alive past the deadline: {', '.join(sorted(world.overdue))}"
    if world.alive():
        names = ", ".join(machine.instance_id for machine in world.alive())
        yield f"alive after the last reaping: {names}"


def records(world: ChaosAws, what: Kept) -> Iterator[str]:
    """An uploaded record is in the warehouse once, as it was; a broken one is a failed row."""
    for (lease_id, run_id), contents in world.uploaded().items():
        found = what.rows.get(run_id, [])
        if len(found) != 1:
            yield f"record {run_id} of {lease_id} is {len(found)} times in the warehouse"
            continue
        row = found[0]
        status, ended = row["status"], round(row["measured_at"].timestamp(), 3)
        records_found = [json.loads(content) for content in contents if sound(content)]
        whole = [(one["status"], round(one["ended_unix"], 3)) for one in records_found]
        if whole and (status, ended) not in whole:
            yield f"record {run_id} of {lease_id} is {status} in the warehouse: {row['reason']}"
        if not whole and status == "measured":
            yield f"garbage of {run_id} was taken for a measurement"
    for run_id, found in what.rows.items():
        if len(found) > 1:
            yield f"{run_id} is {len(found)} times in the warehouse"
    for lease_id, usd in what.usd.items():
        if len(usd) > 1:
            yield f"lease {lease_id} is {len(usd)} times in the ledger"


def money(campaigns: Campaigns, what: Kept) -> Iterator[str]:
    """By the bill of the world: within the caps, and nothing of it missing in the ledger."""
    world = campaigns.home.world
    billed = {
        lease_id: world.usd(lease_id)
        for lease_id in {machine.tags["srift:lease"] for machine in world.instances.values()}
    }
    for refresh_id, cap in campaigns.caps.items():
        spent = sum(
            usd for lease_id, usd in billed.items() if lease_id.startswith(f"{refresh_id}-")
        )
        if spent > cap:
            yield f"{refresh_id} spent ${spent:.3f} of ${cap:.3f}"
    if sum(billed.values()) > campaigns.scenario.month_usd:
        yield f"the month spent ${sum(billed.values()):.3f} of ${campaigns.scenario.month_usd:.3f}"
    for lease_id, usd in billed.items():
        recorded = (what.usd.get(lease_id) or [0.0])[0]
        if recorded is None or recorded < usd - ROUNDING_USD:
            yield f"lease {lease_id} cost ${usd:.4f}, and the ledger says {recorded}"


def rows(campaigns: Campaigns, what: Kept) -> Iterator[str]:
    """What was not measured has a row with a reason; so has every refused attempt."""
    world = campaigns.home.world
    for lease_id, (launch, outcome) in campaigns.served.items():
        lease_rows = [
            row for found in what.rows.values() for row in found if row["lease_id"] == lease_id
        ]
        if "NotFound" in outcome.rpartition("(")[2] and not THROTTLED & {*campaigns.scenario.kinds}:
            yield f"{lease_id} was given up for what it had only just made: {outcome}"
        planned = {f"{lease_id}-{number:03d}" for number in range(len(launch.items))}
        measured = {
            row["run_id"].partition("-again-")[0]
            for row in lease_rows
            if row["status"] == "measured"
        }
        explained = any(row["status"] != "measured" for row in lease_rows) or outcome.startswith(
            "time"
        )
        if not planned <= measured and not explained:
            missing = len(planned - measured)
            yield f"{lease_id} ended {outcome!r}: {missing} runs are not explained"
        lost = [
            machine
            for machine in world.instances.values()
            if machine.tags["srift:lease"] == lease_id and machine.reason == TAKEN
        ]
        unexplained = planned - {row["run_id"] for row in lease_rows}
        if any(TAKEN in row["reason"] for row in lease_rows if row["status"] == "refused"):
            lost = []  # before it ran: its rung's row says so
        if (
            lost
            and unexplained
            and all(row["status"] != "interrupted" for row in lease_rows)
            and outcome[:4] != "time"
        ):
            yield f"{lease_id} lost {lost[0].instance_id} to the spot market, and no row says so"
        for row in lease_rows:
            if row["status"] != "measured" and not row["reason"]:
                yield f"{row['run_id']} is {row['status']} without a reason"
    for lease_id in set(world.refused):
        lease_rows = [
            row for found in what.rows.values() for row in found if row["lease_id"] == lease_id
        ]
        if not any(row["status"] in ("refused", "failed") for row in lease_rows):
            yield f"{lease_id} was refused, and no row says so"
    for lease_id in campaigns.started.keys() - campaigns.served.keys():
        machines = [
            machine
            for machine in world.instances.values()
            if machine.tags["srift:lease"] == lease_id
        ]
        if machines and lease_id not in what.outcomes:
            yield f"{lease_id} had machines when its controller was killed, and no row tells of it"


def devices(what: Kept) -> Iterator[str]:
    """What a processor did in place of a GPU counts as no measurement."""
    for run_id, found in what.rows.items():
        row = found[0]
        if row["status"] == "measured" and "cpu" in row["device_names"] and not row["wrong_device"]:
            yield f"{run_id} was measured on a processor where a GPU was bought, and counts"


def false_alarms(world: ChaosAws, what: Kept) -> Iterator[str]:
    """Nobody is called silent who could be heard."""
    dumb = {"hangs", "mute", "uploads fail"} & {
        trouble.kind for node in world.nodes.values() for trouble in node.troubles
    }
    for found in what.rows.values():
        reason = found[0]["reason"]
        if "fell silent" in reason and not dumb:
            yield f"{found[0]['run_id']}: {reason}, and every machine had spoken"


def leftovers(campaigns: Campaigns) -> Iterator[str]:
    provider, account = campaigns.home.provider, campaigns.home.world.account
    if provider.leases() or provider.ended():
        left = [lease.lease_id for lease in (*provider.leases(), *provider.ended())]
        yield f"leases that are not loaded and forgotten: {left}"
    if account.templates or account.groups or account.placements:
        yield "groups or templates were left in the account"

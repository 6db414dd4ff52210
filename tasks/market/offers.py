"""Snapshots of instance types, workloads and prices: what is on offer now, or was last; and the facts of workloads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.cluster import InstanceType, Offer
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Workload
from warehouse import append, reads
from warehouse.database import WarehouseMissing

from ..providers.base import ProviderError
from ..workspace.workspace import Workspace, capabilities, refresh_command


def note_definitions(workspace: Workspace, now: datetime) -> None:
    """Write down today's definitions of workloads and instance types: what measured others is history.

    Where the provider does not answer, those noted before stay: another source of the same facts would make history of
    every measurement. The package's fill in what was never noted.
    """
    try:
        types = workspace.provider.instance_types()
    except ProviderError:
        noted = set(
            reads.mart(workspace.warehouse, "instance_types", provider=workspace.provider.name)[
                "name"
            ]
        )
        packaged = workspace.provider.packaged_types()
        types = [one for one in packaged if one.name not in noted]
    with workspace.warehouse.transact() as connection:
        append.note_workloads(
            connection,
            [
                {"workload": w.name, "digest": w.digest, "samples": w.samples}
                for w in workspace.workloads
            ],
            provider=workspace.provider.name,
            noted_at=now,
        )
        append.note_instance_types(
            connection, [asdict(t) | {"digest": t.digest} for t in types], noted_at=now
        )


def snapshot_offers(
    workspace: Workspace, refresh_id: str, now: datetime, *, buying: bool = True
) -> str:
    """Store the offers of this moment; says what was done. Without an answer the last snapshot stays in use.

    One that came with the package takes its place where it is no older. Whether a campaign could buy at these prices
    is said where something is to be bought.
    """
    try:
        offers, source = workspace.provider.offers(now), ""
    except ProviderError as error:
        offers = _to_store(workspace)
        if not offers:
            last = current_offers(workspace)
            kept = (
                f"the last snapshot stays in use{_as_of(last)}"
                if last
                else "and none were ever known"
            )
            return f"prices: {error}; {kept}"
        source = f"; {error}, so they are those that came with the package{_as_of(offers)}"
    rows = [
        {
            "provider": offer.instance_type.provider,
            "instance_type": offer.instance_type.name,
            "market": offer.market,
            "zone": offer.zone,
            "region": offer.region,
            # as everybody pays: own prices are applied where offers are read, so that a change of them counts at once
            "usd_per_hour": offer.public_usd_per_hour if offer.own_price else offer.usd_per_hour,
            "interruptions_per_hour": offer.interruptions_per_hour,
            "interruption_source": offer.interruption_source or None,
            "price_as_of": offer.price_as_of,
        }
        for offer in offers
    ]
    with workspace.warehouse.transact() as connection:
        append.append_offers(connection, rows, snapshot_id=refresh_id, as_of=now)
    unpriced = sum(offer.usd_per_hour is None for offer in offers)
    types = len({offer.instance_type.name for offer in offers})
    said = f"prices: {len(offers)} offers of {types} instance types" + (
        f", {unpriced} unpriced" if unpriced else ""
    )
    hint = (
        nothing_to_buy(offers, workspace.settings.campaign.market)
        if buying and workspace.can_launch
        else ""
    )
    return "; ".join(filter(None, [said + source, hint]))


def nothing_to_buy(offers: Sequence[Offer], market: str) -> str:
    """Why a campaign can measure nothing, where no offer of its market has a price; else empty."""
    if any(offer.market == market and offer.usd_per_hour is not None for offer in offers):
        return ""
    if not offers:
        return (
            "no instance type is on offer, so nothing can be measured: state one with cores, memory_gib, "
            "bandwidth_gbps and a price under [local.instance_types.NAME] in srift.toml, or for EC2 more under [ec2] "
            "instance_types"
        )
    key, other = (
        ("spot_usd_per_hour", "on-demand") if market == "spot" else ("usd_per_hour", "spot")
    )
    stated = all(capabilities(offer.instance_type.provider).simulated for offer in offers)
    return (
        f"no instance type has a price on the {market} market, so nothing can be measured: "
        + (f"give one a {key}, or " if stated else "")
        + f'set market = "{other}" under [campaign]'
    )


def listed(workspace: Workspace, wanted: OffersWanted) -> list[dict[str, Any]]:
    """A row an offer that is `wanted`, of the newest snapshot, else of the package, else of the provider; in order.

    `usd_per_hour` is of one machine with all that comes with it, None where unknown. `interrupted_a_day` is the chance
    that a spot machine is interrupted within a day, None on demand. Raises ProviderError where no offers are known or
    none is wanted.
    """
    stored = current_offers(workspace) if workspace.warehouse.exists() else []
    offers = stored or _to_store(workspace) or workspace.provider.offers(datetime.now(UTC))
    if not offers:
        raise ProviderError(
            f"no offers of {workspace.provider.name} are known: `{refresh_command(workspace.provider.name, '0')}`"
            " asks for them"
        )
    chosen = [_row(offer) for offer in wanted.among(offers)]
    column, descending = wanted.sort.removeprefix("-"), wanted.sort.startswith("-")
    frame = pd.DataFrame(chosen).sort_values(column, ascending=not descending, kind="stable")
    return [chosen[at] for at in frame.index]


def _row(offer: Offer) -> dict[str, Any]:
    return {
        "instance_type": offer.instance_type.name,
        "devices": offer.instance_type.devices,
        "device": offer.instance_type.device,
        "device_memory_gib": offer.instance_type.device_memory_gib,
        "cores": offer.instance_type.cores,
        "memory_gib": offer.instance_type.memory_gib,
        "bandwidth_gbps": offer.instance_type.bandwidth_gbps,
        "market": offer.market,
        "region": offer.region,
        "zone": offer.zone,
        "usd_per_hour": offer.total_usd_per_hour,
        "interrupted_a_day": -math.expm1(-24 * offer.interruptions_per_hour)
        if offer.market == "spot"
        else None,
        "price_as_of": offer.price_as_of,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OffersWanted:
    """Which offers: each of `filters` is a column of `listed` and what its text must hold, in any case; where some are
    called exactly so, those alone.

    Listed by the column `sort`, from the largest with a - before it; unknown values come last.
    """

    filters: tuple[tuple[str, str], ...] = ()
    sort: str = "usd_per_hour"

    def among(self, offers: Sequence[Offer]) -> list[Offer]:
        """The offers that have all of it. Raises ProviderError where none of some has, naming the nearest right one."""
        rows = [_row(offer) for offer in offers]
        asked = [(column, text, _exact(rows, column, text)) for column, text in self.filters]
        chosen = [
            one
            for one, row in zip(offers, rows, strict=True)
            if all(_holds(row, *by) for by in asked)
        ]
        if offers and not chosen:
            provider = offers[0].instance_type.provider
            raise ProviderError(
                f"none of {len(rows)} offers of {provider} has {self._unmet(rows, provider)}"
            )
        return chosen

    def _unmet(self, rows: Sequence[Mapping[str, Any]], provider: str) -> str:
        """What none of `rows` has, with the nearest that some have; the filters, where each is met by some."""
        alone = [one for one in self.filters if not any(_holds(row, *one) for row in rows)]
        said = []
        for column, text in alone:
            known = {str(row[column]) for row in rows}
            few = (
                None
                if len(known) <= _FEW
                else f"`srift offers --provider {provider}` lists what there is"
            )
            said.append(f"{column} {text!r}: {nearest_names(text, known, otherwise=few)}")
        return (
            "; ".join(said)
            or " and ".join(f"{column} {text!r}" for column, text in self.filters) + " together"
        )


COLUMNS = (
    *(
        "instance_type",
        "devices",
        "device",
        "device_memory_gib",
        "cores",
        "memory_gib",
        "bandwidth_gbps",
    ),
    *("market", "region", "zone", "usd_per_hour", "interrupted_a_day", "price_as_of"),
)
_FEW = 12  # names that an error lists


def _exact(rows: Sequence[Mapping[str, Any]], column: str, text: str) -> bool:
    """Whether there is one of exactly that name: L4 is not L40S."""
    return any(text.lower() == str(row[column]).lower() for row in rows)


def _holds(row: Mapping[str, Any], column: str, text: str, exact: bool = False) -> bool:
    name = str(row[column]).lower()
    return text.lower() == name if exact else text.lower() in name


def offers_now(workspace: Workspace, now: datetime) -> list[Offer]:
    """The provider's offers; where it does not answer, those of the last snapshot or of the package. Stores nothing.

    Raises ProviderError where none of them knows any.
    """
    try:
        return workspace.provider.offers(now)
    except ProviderError:
        offers = _to_store(workspace) or (
            current_offers(workspace) if workspace.warehouse.exists() else []
        )
        if not offers:
            raise
        return offers


def current_offers(workspace: Workspace) -> list[Offer]:
    """The newest snapshot as offers of known instance types; none before the first."""
    kinds = reads.mart(workspace.warehouse, "instance_types", provider=workspace.provider.name)
    columns = InstanceType.__dataclass_fields__
    types = {
        row["name"]: InstanceType(**{name: _known(row[name]) for name in columns})
        for row in rows_of(kinds)
    }
    frame = reads.offers(workspace.warehouse, workspace.provider.name)
    moments = {moment: _moment(moment) for moment in frame["price_as_of"].unique()}
    found = [
        Offer(
            instance_type=types[row["instance_type"]],
            market=row["market"],
            zone=row["zone"],
            region=row["region"],
            usd_per_hour=_known(row["usd_per_hour"]),
            interruptions_per_hour=row["interruptions_per_hour"] or 0.0,
            price_as_of=moments[row["price_as_of"]],
            interruption_source=_known(row["interruption_source"]) or "",
        )
        for row in rows_of(frame)
        if row["instance_type"] in types
    ]
    return workspace.provider.billed(found)


def _to_store(workspace: Workspace) -> list[Offer]:
    """Offers that came with the package, where they are no older than the last snapshot and differ from it."""
    offers = workspace.provider.packaged_offers()
    if not offers or not workspace.warehouse.exists():
        return offers
    last = current_offers(workspace)
    newest = max((offer.price_as_of for offer in last), default=None)
    if newest is not None and max(offer.price_as_of for offer in offers) < newest:
        return []
    return [] if {_key(offer) for offer in last} == {_key(offer) for offer in offers} else offers


def _key(offer: Offer) -> tuple[object, ...]:
    return offer.instance_type.name, offer.market, offer.region, offer.zone, offer.usd_per_hour


def _as_of(offers: Sequence[Offer]) -> str:
    return f" (prices of {max(offer.price_as_of for offer in offers):%Y-%m-%d})" if offers else ""


def _known(value: Any) -> Any:
    """None for what a frame holds where nothing is known."""
    return None if value is None or value != value else value


def _moment(value: object) -> datetime:
    as_of = pd.Timestamp(str(value)).to_pydatetime()
    return as_of if as_of.tzinfo else as_of.replace(tzinfo=UTC)


def with_facts(workloads: Sequence[Workload], known: pd.DataFrame) -> list[Workload]:
    """The workloads with what the mart `workloads` knows of them; facts of another digest are another workload's."""
    facts = {(row["workload"], row["digest"]): row for row in rows_of(known) if "digest" in row}
    kinds = {
        "parameters": int,
        "gradient_bytes": int,
        "flops_per_sample": float,
        "checkpoint_bytes": int,
    }

    def with_own_facts(workload: Workload) -> Workload:
        row = facts.get((workload.name, workload.digest), {})
        values: dict[str, Any] = {
            name: kind(row[name]) for name, kind in kinds.items() if pd.notna(row.get(name))
        }
        return replace(workload, **values)

    return [with_own_facts(one) for one in workloads]


def with_known_facts(workspace: Workspace, workload: Workload) -> Workload:
    """`workload` with what the warehouse knows of it; as it is before the first refresh."""
    try:
        known = reads.mart(
            workspace.warehouse,
            "workloads",
            provider=workspace.provider.name,
            workload=workload.name,
        )
    except WarehouseMissing:
        return workload
    return with_facts([workload], known)[0]

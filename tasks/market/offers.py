"""Store snapshots of instance types, workloads and prices, and read the newest offers.

An offer is an instance type at a price in one market and zone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.cluster import InstanceType, Offer
from models.domain.setup_table import rows_of
from models.domain.workload import Workload
from warehouse import append
from warehouse.database import rows_of_query

from ..providers.base import ProviderError
from ..workspace.workspace import Workspace

_OF_TYPE = ("devices", "device", "device_memory_gib", "cores", "memory_gib", "bandwidth_gbps")
_OF_OFFER = ("market", "region", "zone")
_FACTS = {
    "parameters": int,
    "gradient_bytes": int,
    "flops_per_sample": float,
    "checkpoint_bytes": int,
    "layers": int,
    "hidden": int,
    "sequence": int,
}
Filters = Sequence[tuple[str, str]]  # (column, text) pairs, see `filter_offers`


def note_definitions(workspace: Workspace, now: datetime) -> None:
    """Store the definitions (fields and digests) of workloads and instance types in the warehouse.

    If the provider does not answer, the instance types that ship with Srift are stored. Types that
    the warehouse already has are then skipped.
    """
    name = workspace.provider.name
    try:
        types = workspace.provider.instance_types()
    except ProviderError:
        # Stored definitions stay. A packaged definition could have another digest, and then earlier
        # measurements of the type would no longer count.
        known_names = set(workspace.mart("instance_types")["name"])
        packaged_types = {offer.instance_type for offer in workspace.provider.packaged_offers()}
        types = [kind for kind in packaged_types if kind.name not in known_names]
    workloads = [
        {"workload": workload.name, "digest": workload.digest, "samples": workload.samples}
        | {name: getattr(workload, name) for name in _FACTS if name != "checkpoint_bytes"}
        for workload in workspace.workloads
    ]
    with workspace.warehouse.transact() as connection:
        append.note_workloads(connection, workloads, provider=name, noted_at=now)
        rows = [asdict(kind) | {"digest": kind.digest} for kind in types]
        append.note_instance_types(connection, rows, noted_at=now)


def ask_offers(workspace: Workspace, now: datetime) -> list[Offer]:
    """Return the provider's current offers.

    Raises ProviderError if the provider does not answer.
    """
    return workspace.provider.offers(now)


def snapshot_offers(
    workspace: Workspace,
    refresh_id: str,
    now: datetime,
    ask: Callable[..., list[Offer]] = ask_offers,
) -> str:
    """Store the current offers and return a sentence about them.

    If the provider does not answer, the offers that ship with Srift are stored, unless the
    warehouse has the same or newer offers.

    ask: the function that returns the current offers. A flow passes a Prefect task with retries.
    """
    source = ""
    try:
        offers = ask(workspace, now)
    except ProviderError as error:
        offers = _packaged_offers(workspace)
        if not offers:
            return f"prices: {error}; the last snapshot, if there is one, stays in use"
        source = f"; {error}, so these are packaged offers of {_newest(offers):%Y-%m-%d}"
    rows = [
        {
            "provider": offer.instance_type.provider,
            "instance_type": offer.instance_type.name,
            **{name: getattr(offer, name) for name in (*_OF_OFFER, "interruptions_per_hour")},
            # Store the public price. `current_offers` applies the user's own prices and discounts,
            # so that a changed discount takes effect at once.
            "usd_per_hour": offer.public_usd_per_hour if offer.price_note else offer.usd_per_hour,
            "interruption_source": offer.interruption_source or None,
            "price_as_of": offer.price_as_of,
        }
        for offer in offers
    ]
    with workspace.warehouse.transact() as connection:
        append.append(connection, "raw_offers", rows, snapshot_id=refresh_id, as_of=now)
    types = {offer.instance_type.name for offer in offers}
    return f"prices: {len(offers)} offers of {len(types)} instance types{source}"


def filter_offers(offers: Sequence[Offer], filters: Filters) -> list[Offer]:
    """Return the offers that pass all filters.

    filters: (column, text) pairs, such as ("region", "us-east-1"). If any offer has exactly this
        text in the column, only offers with exactly this text pass. Otherwise, offers that contain
        the text pass: ("region", "us-") accepts "us-east-1". Case is ignored.

    Raises:
        ProviderError: if there are offers, but none passes.
    """
    if not offers:
        return []
    frame = pd.DataFrame([_row(offer) for offer in offers])
    mask = pd.Series(True, index=frame.index)
    for column, text in filters:
        values = frame[column].astype(str).str.lower()
        exact = values == text.lower()
        mask &= exact if exact.any() else values.str.contains(text.lower(), regex=False)
    if not mask.any():
        conditions = " and ".join(f"{column} {text!r}" for column, text in filters)
        raise ProviderError(f"none of {len(offers)} offers has {conditions}: see `srift offers`")
    return [offer for offer, good in zip(offers, mask, strict=True) if good]


def list_offers(workspace: Workspace, filters: Filters) -> list[dict[str, Any]]:
    """Return the newest known offers that pass `filters`, as rows, cheapest first.

    Besides the fields of an offer and its instance type, a row has the keys:

    usd_per_hour: includes the machine's volume and public IP address. Offers without a price are
        last.
    interrupted_a_day: probability that a spot machine is interrupted within a day; None for
        on-demand machines.

    Raises:
        ProviderError: if no offers are known or no offer passes the filters.
    """
    offers = current_offers(workspace) or offers_now(workspace, datetime.now(UTC))
    rows = [_row(offer) for offer in filter_offers(offers, filters)]
    return sorted(rows, key=lambda row: row["usd_per_hour"] or math.inf)


def _row(offer: Offer) -> dict[str, Any]:
    risk = -math.expm1(-24 * offer.interruptions_per_hour) if offer.market == "spot" else None
    return {
        "instance_type": offer.instance_type.name,
        **{name: getattr(offer.instance_type, name) for name in _OF_TYPE},
        **{name: getattr(offer, name) for name in _OF_OFFER},
        "usd_per_hour": offer.total_usd_per_hour,
        "interrupted_a_day": risk,
        "price_as_of": offer.price_as_of,
        "price_source": offer.price_source,
    }


def offers_now(workspace: Workspace, now: datetime) -> list[Offer]:
    """Return the provider's current offers without storing them.

    If the provider does not answer, the result is the newer of two lists: the last snapshot in the
    warehouse, and the offers that ship with Srift.

    Raises:
        ProviderError: if the provider does not answer and there are neither packaged nor stored
            offers.
    """
    try:
        return workspace.provider.offers(now)
    except ProviderError:
        if offers := _packaged_offers(workspace) or current_offers(workspace):
            return offers
        raise


def current_offers(workspace: Workspace) -> list[Offer]:
    """Return the newest offers in the warehouse, with the account's own prices and discounts.

    Offers of instance types without a definition in the warehouse are left out.
    """
    query = "from {} where provider = $provider"
    params = {"provider": workspace.provider.name}
    with workspace.warehouse.read() as connection:
        rows = rows_of_query(connection, query.format("offers"), params)
        type_rows = rows_of_query(connection, query.format("instance_types"), params)
    types = {
        row["name"]: InstanceType(**{name: row[name] for name in InstanceType.__dataclass_fields__})
        for row in type_rows
    }
    offers = [
        Offer(
            instance_type=types[row["instance_type"]],
            **{column: row[column] for column in _OF_OFFER},
            usd_per_hour=row["usd_per_hour"],
            interruptions_per_hour=row["interruptions_per_hour"] or 0.0,
            price_as_of=row["price_as_of"].replace(tzinfo=UTC),
            interruption_source=row["interruption_source"] or "",
        )
        for row in rows
        if row["instance_type"] in types
    ]
    return workspace.provider.billed(offers)


def _packaged_offers(workspace: Workspace) -> list[Offer]:
    """Return the offers that ship with Srift; [] if the warehouse has the same or newer offers."""
    offers, last = workspace.provider.packaged_offers(), current_offers(workspace)
    if offers and last and (_newest(offers) < _newest(last) or set(offers) == set(last)):
        return []
    return offers


def _newest(offers: Sequence[Offer]) -> datetime:
    return max(offer.price_as_of for offer in offers)


def with_facts(workload: Workload, facts: pd.DataFrame) -> Workload:
    """Return `workload` with measured or imported facts added, such as its parameter count.

    Facts that the workload already has are not replaced.

    facts: rows of the mart `workloads`, with the facts. Rows with another digest describe other
        versions of the workload, and are ignored.
    """
    for row in rows_of(facts):
        if (row["workload"], row["digest"]) == (workload.name, workload.digest):
            new_facts = {
                name: kind(row[name])
                for name, kind in _FACTS.items()
                if pd.notna(row.get(name)) and getattr(workload, name) is None
            }
            return replace(workload, **new_facts)
    return workload

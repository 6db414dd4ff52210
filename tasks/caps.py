"""The caps of one moment: what the ledger says was spent, what leases still commit, and what a launch may therefore do.

Asked before every launch. On EC2 the campaign's cap and the month's are hard: the launch's worst case must fit under
both. On this machine money is illustrative, and the campaign's own estimate decides (`Tally.affords`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

import pandas as pd

from models import caps as pure
from models.campaign import Launch
from models.caps import Allowance, Cap
from models.cloud import Offer, parse_cluster
from warehouse import reads
from warehouse.database import WarehouseMissing

from .installation import Installation
from .jobs import START_UP_S
from .prices import current_offers
from .providers.base import EndedLease, Lease
from .providers.ec2_ladder import SPOT_MARGIN
from .providers.ec2_request import ADDRESS_USD_PER_HOUR, VOLUME_USD_PER_GIB_HOUR
from .tally import Tally

# Of the deadline on EC2, beside the work: machines may take ten minutes to report themselves, torchrun two more.
EC2_START_UP_S = 720.0
EC2_LEAST_START_UP_S = 300.0  # with less, money would be spent on machines that end before they could have measured
# For measuring again what a machine's host disturbed, part of what a launch is expected to take: hosts take processors
# away for minutes, which costs nothing here and is paid for on EC2.
_LOCAL_PATIENCE, _EC2_PATIENCE = 1.0, 0.25
# And part of what is left of the campaign: a host that always takes must not end it.
_CAMPAIGN_PATIENCE = 1 / 3
# A launch may climb the whole ladder: spot and on demand in every zone, of which no region has more than six.
LATE_S = pure.late_s(2 * 6)


@runtime_checkable
class Closing(Protocol):
    """A provider whose leases may be over, and paid for, before what they measured is here."""

    def closed(self) -> list[EndedLease]:
        """Leases that are over and not forgotten."""


def allowance(
    here: Installation, launch: Launch, tally: Tally, now: datetime, offers: Sequence[Offer] | None = None
) -> Allowance:
    """How long `launch` may last, or why it may not be made. `offers`: the newest prices, where they are at hand."""
    if here.provider.name == "local":
        wished_s = (2 + _LOCAL_PATIENCE) * launch.est_s + START_UP_S
        return Allowance(deadline_s=wished_s, worst_usd=launch.est_usd)
    known = current_offers(here) if offers is None else offers
    caps, unknown = caps_of(here, tally, now, known)
    if unknown:
        return Allowance(deadline_s=0.0, worst_usd=0.0, refusal=unknown)
    price = pure.dearest_usd_per_hour(launch.cluster, known, _spot_margin(here))
    return pure.allow(
        None if price is None else price + len(launch.cluster.members) * _beside(here),
        wished_s=2 * launch.est_s + EC2_START_UP_S,
        least_s=launch.est_s + EC2_LEAST_START_UP_S,
        caps=caps,
        late=LATE_S,
    )


def patience_s(here: Installation, launch: Launch, tally: Tally, deadline_s: float) -> float:
    """Seconds that `launch` may put into measuring again what was disturbed, and still end in time."""
    local = here.provider.name == "local"
    spare_s = deadline_s - launch.est_s - (START_UP_S if local else EC2_START_UP_S)
    share = _LOCAL_PATIENCE if local else _EC2_PATIENCE
    left_s = tally.stop_of(launch) - time.monotonic() - launch.est_s
    return max(0.0, min(share * launch.est_s, _CAMPAIGN_PATIENCE * tally.left_s, spare_s, left_s))


def caps_of(here: Installation, tally: Tally, now: datetime, offers: Sequence[Offer]) -> tuple[list[Cap], str]:
    """The campaign's cap and the month's (UTC); and, instead, why nobody can say what is left of them."""
    spent, unknown = spent_this_month(here, now)
    dearest = pure.dearest_by_type(offers, _spot_margin(here))
    worst = {lease.lease_id: _worst(here, lease, dearest) for lease in here.provider.leases()}
    closed = here.provider.closed() if isinstance(here.provider, Closing) else here.provider.ended()
    worst |= {lease.lease_id: lease.usd for lease in closed}  # over, and not in the ledger yet
    nameless = [lease_id for lease_id, usd in worst.items() if usd is None]
    if nameless:
        unknown = unknown or f"lease {nameless[0]} costs an amount that nobody knows: end it with `srift reap`"
    committed = {lease_id: usd for lease_id, usd in worst.items() if usd is not None}
    mine = sum(usd for lease_id, usd in committed.items() if lease_id.startswith(f"{tally.refresh_id}-"))
    month = here.settings.ec2.max_usd_per_month
    return [
        Cap(name="this campaign's cap", usd=tally.cap_usd, spent_usd=tally.usd, committed_usd=mine),
        Cap(
            name="[ec2] max_usd_per_month",
            usd=month,
            spent_usd=spent,
            committed_usd=sum(committed.values()),
        ),
    ], unknown


def spent_this_month(here: Installation, now: datetime) -> tuple[float, str]:
    """Dollars of this provider's refreshes that ended in `now`'s month, and why that is unknown where it is.

    A refresh that began in the month before counts for both: rather too much than too little.
    """
    try:
        spend = reads.mart(here.warehouse, "spend", provider=here.provider.name)
    except WarehouseMissing:
        return 0.0, ""
    start = pd.Timestamp(pure.month_start(now)).tz_localize(None)
    recent = spend[pd.to_datetime(spend["ended_at"]) >= start]
    unknown = recent[recent["usd"].isna()]["refresh_id"].tolist()
    if unknown:
        why = f"what refresh {unknown[0]} spent this month is not known, so nothing more is launched until the next one"
        return float("inf"), f"{why} (AWS's bill tells; the ledger does not)"
    return float(recent["usd"].sum()), ""


def _spot_margin(here: Installation) -> float | None:
    """How far above what was seen a spot price is bid for where on-demand, which bounds it, is not considered."""
    return None if "on-demand" in here.settings.ec2.markets else SPOT_MARGIN


def _beside(here: Installation) -> float:
    """Dollars an hour of a machine's volume and public address, at most."""
    return here.settings.ec2.volume_gib * VOLUME_USD_PER_GIB_HOUR + ADDRESS_USD_PER_HOUR


def _worst(here: Installation, lease: Lease, dearest: dict[str, float]) -> float | None:
    """Dollars of a lease that is held to its very end, at the highest price of its types; None where none is known."""
    names = parse_cluster(lease.cluster)
    prices = [dearest.get(name) for name in names]
    known = sum(price for price in prices if price is not None)
    rate = max(lease.usd_per_hour or 0.0, 0.0 if None in prices else known)
    lasts_s = (lease.deadline_at - lease.started_at).total_seconds()
    return pure.worst_usd(rate + len(names) * _beside(here), lasts_s, LATE_S) if rate > 0 else None

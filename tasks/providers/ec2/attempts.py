"""A launch asks for the cluster in its own market first, then on demand. Pure.

Each attempt is one fleet over all zones, or one fleet a group if the cluster has several types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from models.domain.cluster import Cluster, Offer

SPOT_MARGIN = 1.25  # a bid is at most this multiple of the known spot price
LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, and a minute at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal machines of a cluster, asked for with one fleet. `first`: rank of the first."""

    number: int
    first: int
    size: int
    type_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ZonePrice:
    """The cluster at the prices of one zone. `bids`: highest price an hour of each member."""

    cluster: Cluster
    bids: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The cluster in one market. `places`: zone -> the cluster there; all machines share a zone."""

    market: str
    places: Mapping[str, ZonePrice]

    @property
    def cluster(self) -> Cluster:
        return next(iter(self.places.values())).cluster

    @property
    def groups(self) -> list[Group]:
        """Groups in rank order."""
        found: list[Group] = []
        first = 0
        for name, run in groupby(
            self.cluster.members, key=lambda member: member.instance_type.name
        ):
            size = len(list(run))
            found.append(Group(number=len(found), first=first, size=size, type_name=name))
            first += size
        return found

    def __str__(self) -> str:
        return f"{self.cluster.name} {self.market} in {', '.join(self.places)}"


_Prices = Mapping[tuple[str, str, str], Offer]


def attempts(
    cluster: Cluster, offers: Iterable[Offer], zones: Iterable[str], markets: Sequence[str]
) -> list[Attempt]:
    """Attempts for `cluster`, each over the `zones` that have a price for every type."""
    prices = _prices(offers, cluster)
    wanted = [cluster.members[0].market]
    if "on-demand" in markets and wanted == ["spot"]:
        wanted.append("on-demand")
    found = []
    for market in wanted:
        places = {
            zone: place
            for zone in sorted(zones)
            if (place := _place(cluster, market, zone, prices)) is not None
        }
        if places:
            found.append(Attempt(market=market, places=places))
    return found


def _prices(offers: Iterable[Offer], cluster: Cluster) -> _Prices:
    """Priced offers of the cluster's region by (type, market, zone); on demand the zone is ""."""
    found: dict[tuple[str, str, str], Offer] = {}
    for offer in (*cluster.members, *offers):
        if offer.region == cluster.members[0].region and offer.usd_per_hour is not None:
            zone = offer.zone if offer.market == "spot" else ""
            found.setdefault((offer.instance_type.name, offer.market, zone), offer)
    return found


def _place(cluster: Cluster, market: str, zone: str, prices: _Prices) -> ZonePrice | None:
    members, bids = [], []
    for member in cluster.members:
        name = member.instance_type.name
        offer = prices.get((name, market, zone if market == "spot" else ""))
        if offer is None:
            return None
        members.append(replace(offer, zone=zone))
        bids.append(_bid(offer, prices.get((name, "on-demand", ""))))
    return ZonePrice(cluster=Cluster(members=tuple(members)), bids=tuple(bids))


def _bid(offer: Offer, on_demand: Offer | None) -> float:
    """The highest price an hour: for spot the margin above the public price, at most on demand's.

    A market compares bids with public prices. An own price above that counts: nothing is cheaper
    than its worst case.
    """
    usd = offer.list_usd_per_hour or 0.0
    if offer.market == "spot":
        most = SPOT_MARGIN * usd
        listed = on_demand.list_usd_per_hour if on_demand is not None else None
        usd = max(usd, most if listed is None else min(most, listed))
    return max(usd, offer.worst_usd_per_hour or 0.0)


def repriced(
    cluster: Cluster, spot: Mapping[tuple[str, str], float | None], at: datetime
) -> Cluster:
    """The cluster at the public spot prices of now, before own prices apply."""
    members = []
    for offer in cluster.members:
        usd = spot.get((offer.instance_type.name, offer.zone))
        if offer.market == "spot" and usd is not None:
            offer = replace(
                offer, usd_per_hour=usd, public_usd_per_hour=None, own_price="", price_as_of=at
            )
        members.append(offer)
    return Cluster(members=tuple(members))

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
    """Equal machines, asked for with one fleet. `first`: rank of the first.

    `bids`: zone -> highest price an hour of one machine.
    """

    name: str
    first: int
    size: int
    type_name: str
    bids: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The cluster in one market; all machines share a zone. `clusters`: at each zone's prices."""

    market: str
    clusters: Mapping[str, Cluster]
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    def __str__(self) -> str:
        cluster = next(iter(self.clusters.values()))
        return f"{cluster.name} {self.market} in {', '.join(self.clusters)}"


_Prices = Mapping[tuple[str, str, str], Offer]


def attempts(
    cluster: Cluster, offers: Iterable[Offer], zones: Iterable[str], markets: Sequence[str]
) -> list[Attempt]:
    """Attempts for `cluster`, each over the `zones` that have a price for every type."""
    prices: dict[tuple[str, str, str], Offer] = {}  # by type, market and zone; on demand "" is all
    for offer in (*cluster.members, *offers):
        if offer.region == cluster.members[0].region and offer.usd_per_hour is not None:
            zone = offer.zone if offer.market == "spot" else ""
            prices.setdefault((offer.instance_type.name, offer.market, zone), offer)
    wanted = [cluster.members[0].market]
    if "on-demand" in markets and wanted == ["spot"]:
        wanted.append("on-demand")
    found = (_attempt(cluster, market, sorted(zones), prices) for market in wanted)
    return [attempt for attempt in found if attempt.clusters]


def _attempt(cluster: Cluster, market: str, zones: Iterable[str], prices: _Prices) -> Attempt:
    names = [member.instance_type.name for member in cluster.members]
    clusters = {}
    for zone in zones:
        keys = [(name, market, zone if market == "spot" else "") for name in names]
        if all(key in prices for key in keys):
            members = tuple(replace(prices[key], zone=zone) for key in keys)
            clusters[zone] = Cluster(members=members)
    groups = list[Group]()
    for name, run in groupby(range(len(names)), key=names.__getitem__):
        ranks = list(run)
        group = Group(
            name=f"{market}.{len(groups)}",
            first=ranks[0],
            size=len(ranks),
            type_name=name,
            bids={
                zone: _bid(there.members[ranks[0]], prices.get((name, "on-demand", "")))
                for zone, there in clusters.items()
            },
        )
        groups.append(group)
    return Attempt(market=market, clusters=clusters, groups=tuple(groups))


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

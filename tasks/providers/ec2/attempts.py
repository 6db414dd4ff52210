"""A launch asks for the cluster in its own market first, then on demand. Pure.

Each attempt is one fleet over all zones, or one fleet a group if the cluster has several types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def __str__(self) -> str:
        cluster = next(iter(self.clusters.values()))
        return f"{cluster.name} {self.market} in {', '.join(self.clusters)}"


def attempts(
    cluster: Cluster, offers: Iterable[Offer], zones: Iterable[str], markets: Sequence[str]
) -> list[Attempt]:
    """Attempts for `cluster`, each over the `zones` that have a price for every type."""
    region, zones = cluster.members[0].region, sorted(zones)
    prices: dict[tuple[str, str, str], Offer] = {}  # by type, market and zone
    for offer in (*cluster.members, *offers):
        if offer.region == region and offer.usd_per_hour is not None:
            for zone in [offer.zone] if offer.market == "spot" else zones:
                key = offer.instance_type.name, offer.market, zone
                prices.setdefault(key, replace(offer, zone=zone))
    wanted = [cluster.members[0].market]
    if "on-demand" in markets and wanted == ["spot"]:
        wanted.append("on-demand")
    names = [member.instance_type.name for member in cluster.members]
    found = []
    for market in wanted:
        here = [zone for zone in zones if all((name, market, zone) in prices for name in names)]
        groups, first = list[Group](), 0
        for name, run in groupby(names):
            bids = {
                zone: _bid(prices[name, market, zone], prices.get((name, "on-demand", zone)))
                for zone in here
            }
            size = len(list(run))
            group = Group(
                name=f"{market}.{len(groups)}", first=first, size=size, type_name=name, bids=bids
            )
            groups.append(group)
            first += size
        clusters = {
            zone: Cluster(members=tuple(prices[name, market, zone] for name in names))
            for zone in here
        }
        if clusters:
            found.append(Attempt(market=market, clusters=clusters, groups=tuple(groups)))
    return found


def _bid(offer: Offer, on_demand: Offer | None) -> float:
    """The highest price an hour: for spot the margin above the public price, at most on demand's.

    A market compares bids with public prices. An own price above that counts: nothing is cheaper
    than its worst case.
    """
    usd = offer.list_usd_per_hour or 0.0
    if offer.market == "spot":
        listed = on_demand.list_usd_per_hour if on_demand is not None else None
        usd = max(usd, min(SPOT_MARGIN * usd, listed or float("inf")))
    return max(usd, offer.worst_usd_per_hour or 0.0)

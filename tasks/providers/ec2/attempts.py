"""Plan the attempts of a launch: in the cluster's market first, then on-demand.

An attempt sends one CreateFleet request for each group of machines of one instance type. The
request lists all zones in which the machines may be launched. This module does not call AWS.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from models.domain.cluster import Cluster, Offer

SPOT_MARGIN = 1.25  # maximum spot bid, as a multiple of the current spot price
LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, with a minimum of one minute


@dataclass(frozen=True, kw_only=True)
class Group:
    """Machines of one instance type with consecutive ranks, launched by one CreateFleet request.

    `first` is the rank of the first machine. `bids` maps each possible zone to the maximum price of
    one machine in dollars per hour.
    """

    name: str
    first: int
    size: int
    type_name: str
    bids: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt to launch the whole cluster in one market, with all machines in one zone.

    `clusters` maps each possible zone to a copy of the cluster with that zone's prices. `groups`
    are the cluster's machines in rank order, each group with machines of one instance type.
    """

    market: str
    clusters: Mapping[str, Cluster]
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        cluster = next(iter(self.clusters.values()))
        return f"{cluster.name} {self.market} in {', '.join(self.clusters)}"


def attempts(
    cluster: Cluster, offers: Iterable[Offer], zones: Iterable[str], markets: Sequence[str]
) -> list[Attempt]:
    """Return the attempts to launch `cluster`, in order.

    The first attempt uses the cluster's market. If this market is spot and `markets` includes
    "on-demand", an on-demand attempt follows. An attempt uses those `zones` in which all instance
    types of the cluster have a known price. An attempt without such a zone is left out. Prices come
    from the cluster's offers. If these lack a price, the first matching offer in `offers` is used.
    """
    region, zones = cluster.members[0].region, sorted(zones)
    prices: dict[tuple[str, str, str], Offer] = {}  # by type, market and zone
    for offer in (*cluster.members, *offers):
        if offer.region == region and offer.usd_per_hour is not None:
            for zone in [offer.zone] if offer.market == "spot" else zones:
                key = offer.instance_type.name, offer.market, zone
                prices.setdefault(key, replace(offer, zone=zone))
    names = [member.instance_type.name for member in cluster.members]
    wanted = [cluster.members[0].market]
    wanted += ["on-demand"] if "on-demand" in markets else []
    found = []
    for market in dict.fromkeys(wanted):
        clusters = {
            zone: Cluster(members=tuple(prices[name, market, zone] for name in names))
            for zone in zones
            if all((name, market, zone) in prices for name in names)
        }
        groups: list[Group] = []
        for name, run in groupby(names):
            group = Group(
                name=f"{market}.{len(groups)}",
                first=sum(earlier.size for earlier in groups),
                size=len(list(run)),
                type_name=name,
                bids={
                    zone: _bid(prices[name, market, zone], prices.get((name, "on-demand", zone)))
                    for zone in clusters
                },
            )
            groups.append(group)
        if clusters:
            found.append(Attempt(market=market, clusters=clusters, groups=tuple(groups)))
    return found


def _bid(offer: Offer, on_demand: Offer | None) -> float:
    """Return the maximum price of one machine of `offer`'s type, in dollars per hour.

    On-demand: the list price.
    Spot: SPOT_MARGIN times the current spot price, but at most the list price of `on_demand`, if
        known. It is never less than the current spot price.

    The account's discount is not subtracted, because EC2 compares bids with list prices. If the
    account's price in [ec2.prices] is higher, this price is returned. Spending caps then count what
    the account pays.
    """
    usd = offer.list_usd_per_hour or 0.0
    if offer.market == "spot":
        listed = on_demand and on_demand.list_usd_per_hour
        usd = max(usd, min(SPOT_MARGIN * usd, listed or float("inf")))
    return max(usd, offer.worst_usd_per_hour or 0.0)

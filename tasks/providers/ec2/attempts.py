"""Plan the attempts of a launch: first in the cluster's market (such as spot), then on-demand.

An attempt sends one CreateFleet request for each group of machines of the same instance type. The
request lists all zones in which the machines may be launched. This module does not call AWS.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from models.domain.cluster import Cluster, Offer
from models.domain.numeric import ROUNDING

from ..base import NoCapacity

SPOT_MARGIN = 1.25  # maximum spot bid, as a multiple of the current spot price
LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, with a minimum of one minute


@dataclass(frozen=True, kw_only=True)
class Group:
    """Machines of the same type with consecutive ranks. One CreateFleet request launches them.

    first: the rank of the first machine.
    bids: {possible zone: maximum price of one machine in dollars per hour}.
    """

    name: str
    first: int
    size: int
    type_name: str
    bids: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt to launch the whole cluster in one market, with all machines in one zone.

    clusters: {possible zone: copy of the cluster with the zone's prices}.
    groups: the groups of all machines of the cluster, in rank order.
    """

    market: str
    clusters: Mapping[str, Cluster]
    groups: Sequence[Group]


def attempts(
    cluster: Cluster,
    offers: Iterable[Offer],
    zones: Iterable[str],
    markets: Sequence[str],
    max_usd_per_hour: float = math.inf,
) -> list[Attempt]:
    """Return the attempts to launch `cluster`: first in its market, then on-demand.

    offers: prices in other zones and markets. If both `offers` and `cluster` have a price for a
        type, market and zone, the price of `cluster` is used.
    zones: the possible zones. An attempt uses only zones in which the prices of all its instance
        types are known. An attempt without such a zone is left out.
    markets: the permitted markets. If "on-demand" is missing, there is only the attempt in the
        cluster's market.
    max_usd_per_hour: the highest permitted sum of the machines' bids.

    Raises NoCapacity if prices are known, but the bids exceed `max_usd_per_hour` in every zone.
    """
    region, zones = cluster.region, sorted(zones)
    prices: dict[tuple[str, str, str], Offer] = {}  # by type, market and zone
    for offer in (*cluster.members, *offers):
        if offer.region == region and offer.usd_per_hour is not None:
            for zone in [offer.zone] if offer.market == "spot" else zones:
                key = offer.instance_type.name, offer.market, zone
                prices.setdefault(key, replace(offer, zone=zone))
    names = cluster.type_names
    found, least_usd = [], math.inf
    for market in dict.fromkeys([cluster.market, *({"on-demand"} & {*markets})]):
        bids = {
            zone: {
                name: _bid(prices[name, market, zone], prices.get((name, "on-demand", zone)))
                for name in names
            }
            for zone in zones
            if all((name, market, zone) in prices for name in names)
        }
        usd = {zone: sum(bid[name] for name in names) for zone, bid in bids.items()}
        least_usd = min([least_usd, *usd.values()])
        clusters = {
            zone: Cluster(members=tuple(prices[name, market, zone] for name in names))
            for zone in bids
            if usd[zone] <= max_usd_per_hour * (1 + ROUNDING)
        }
        groups: list[Group] = []
        for name, run in groupby(names):
            groups.append(
                Group(
                    name=f"{market}.{len(groups)}",
                    first=sum(earlier.size for earlier in groups),
                    size=len(list(run)),
                    type_name=name,
                    bids={zone: bids[zone][name] for zone in clusters},
                )
            )
        if clusters:
            found.append(Attempt(market=market, clusters=clusters, groups=groups))
    if not found and least_usd < math.inf:
        raise NoCapacity(
            f"the machines may now cost up to ${least_usd:.2f} per hour, but the spending"
            f" caps were checked for ${max_usd_per_hour:.2f}"
        )
    return found


def _bid(offer: Offer, on_demand: Offer | None) -> float:
    """Return the maximum price of one machine of `offer`'s type, in dollars per hour.

    An on-demand bid is the list price. A spot bid is SPOT_MARGIN times the current spot price, but
    at most the on-demand list price, and at least the current spot price.

    If [ec2.prices] of srift.toml has a price higher than this bid, that price is the bid. Discounts
    of the account do not lower the bid, because EC2 compares bids with list prices.

    on_demand: the on-demand offer of the same type in the same zone; None if unknown.
    """
    usd = offer.list_usd_per_hour or 0.0
    if offer.market == "spot":
        listed = on_demand and on_demand.list_usd_per_hour
        usd = max(usd, min(SPOT_MARGIN * usd, listed or float("inf")))
    return max(usd, offer.worst_usd_per_hour or 0.0)

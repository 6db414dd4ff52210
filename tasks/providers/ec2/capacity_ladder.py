"""The ladder: what is asked for next where machines are not to be had. Pure; the whole list is decided beforehand.

1. as asked; 2. the same market in the region's other zones, the cheapest first; 3. on demand, zone by zone. All of a
cluster lies in one zone. Spot machines of one type are one fleet, which may choose among all those zones: 1 and 2 are
one rung. Another type is another setup, for which the campaign shops anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import groupby

from models.domain.cluster import Cluster, Offer

SPOT_MARGIN = 1.25  # a spot price may rise so far above what was seen before we do not want it; bounds the worst case
LEAST_BILLED_S = 60.0  # EC2 bills Linux by the second, and a minute at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal machines, asked for at once. `first` is the rank of the first."""

    number: int
    first: int
    size: int
    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to have the cluster. `most_usd`: of each member its bid, the highest price an hour that would be paid.

    A market compares bids with what everybody pays: they are made of public prices, whatever the own ones are.
    `elsewhere`: the same in other zones, of which one fleet may choose; all machines lie in one zone all the same.
    """

    number: int
    cluster: Cluster
    most_usd: tuple[float, ...]
    elsewhere: tuple[Rung, ...] = ()

    @property
    def zone(self) -> str:
        """All machines lie here, or in one zone of `elsewhere`."""
        return self.cluster.members[0].zone

    @property
    def places(self) -> tuple[Rung, ...]:
        """The rung in each zone that it may lie in."""
        return (replace(self, elsewhere=()), *self.elsewhere)

    @property
    def zones(self) -> str:
        """As a sentence states them."""
        return " or ".join(place.zone for place in self.places)

    def located(self, zone: str) -> Rung:
        """The rung as it is in `zone`; as asked where it may not lie there."""
        found = next((place for place in self.places if place.zone == zone), self)
        return replace(found, number=self.number, elsewhere=())

    @property
    def markets(self) -> str:
        """As a lease states them."""
        return "+".join(sorted({offer.market for offer in self.cluster.members}))

    @property
    def groups(self) -> list[Group]:
        """One request each, in rank order."""
        found: list[Group] = []
        first = 0
        for _, run in groupby(
            self.cluster.members, key=lambda one: (one.instance_type.name, one.market)
        ):
            size = len(list(run))
            found.append(
                Group(number=len(found), first=first, size=size, offer=self.cluster.members[first])
            )
            first += size
        return found

    def __str__(self) -> str:
        return f"{self.cluster.name} {self.markets} in {self.zones}"


def ladder(
    cluster: Cluster,
    offers: Iterable[Offer],
    zones: Sequence[str],
    markets: Sequence[str],
    scores: Mapping[str, int] | None = None,
) -> tuple[list[Rung], list[str]]:
    """Rungs for `cluster`, and a sentence for each one that cannot be.

    `offers` are the prices known in its region; `zones` those that have a network of ours and every type of it;
    `markets` those that srift.toml allows. Zones of equal spot price come by `scores`, the better one first.
    """
    score = scores or {}
    prices = _prices(offers, cluster)
    asked = next((one.zone for one in cluster.members if one.zone in zones), None)
    wanted = [[offer.market for offer in cluster.members]]
    if "on-demand" in markets and "spot" in wanted[0]:
        wanted.append(["on-demand"] * len(cluster.members))
    rungs: list[Rung] = []
    missing: list[str] = []
    for zone in dict.fromkeys(
        one.zone for one in cluster.members if one.market == "spot" and one.zone not in zones
    ):
        missing.append(f"{zone} has no subnet of ours, or not every type of {cluster.name}")
    for market in wanted:
        found: list[Rung] = []
        for zone in sorted(zones):
            members = [
                _member(offer, which, zone, prices)
                for offer, which in zip(cluster.members, market, strict=True)
            ]
            priced = [one for one in members if one is not None and one.usd_per_hour is not None]
            if len(priced) < len(members):
                kinds = "+".join(sorted(set(market)))
                missing.append(f"{cluster.name} {kinds} in {zone} has no known price")
                continue
            found.append(_rung(priced, prices))
        better = score if "spot" in market else {}
        found.sort(
            key=lambda rung: (
                *(rung.zone != asked, rung.cluster.usd_per_hour or 0.0),
                *(-better.get(rung.zone, 0), rung.zone),
            )
        )
        rungs += _one_fleet(found)
    return [replace(rung, number=number) for number, rung in enumerate(rungs)], missing


def _one_fleet(found: Sequence[Rung]) -> list[Rung]:
    """Rungs of one market as one, where a single fleet buys all machines: it knows best which zone has them."""
    if len(found) < 2 or len(found[0].groups) > 1 or found[0].markets != "spot":
        return list(found)
    return [replace(found[0], elsewhere=tuple(found[1:]))]


def spot_ties(rungs: Sequence[Rung]) -> bool:
    """Whether zones have the same spot price, so that something else may order them."""
    prices = [rung.cluster.usd_per_hour for rung in rungs if "spot" in rung.markets]
    return len(set(prices)) < len(prices)


_Prices = Mapping[tuple[str, str, str], Offer]


def _prices(offers: Iterable[Offer], cluster: Cluster) -> _Prices:
    """Offers by (type, market, zone); on demand the zone is of no account. The cluster's own come first."""
    found: dict[tuple[str, str, str], Offer] = {}
    for offer in (*cluster.members, *offers):
        zone = offer.zone if offer.market == "spot" else ""
        known = found.get((offer.instance_type.name, offer.market, zone))
        if offer.region == cluster.members[0].region and (
            known is None or known.usd_per_hour is None
        ):
            found[offer.instance_type.name, offer.market, zone] = offer
    return found


def _member(offer: Offer, market: str, zone: str, prices: _Prices) -> Offer | None:
    found = prices.get((offer.instance_type.name, market, zone if market == "spot" else ""))
    return None if found is None else replace(found, zone=zone)


def _rung(members: Sequence[Offer], prices: _Prices) -> Rung:
    """On demand costs what it costs; a spot machine may become dearer by the margin, never dearer than on demand.

    In public prices; an own one counts where it is the dearer: a discount may be used up.
    """
    most = []
    for offer in members:
        usd = offer.list_usd_per_hour or 0.0
        if offer.market == "spot":
            listed = prices.get((offer.instance_type.name, "on-demand", ""))
            bound = listed.list_usd_per_hour if listed is not None else None
            usd = max(usd, min(SPOT_MARGIN * usd, bound or SPOT_MARGIN * usd))
        most.append(max(usd, offer.worst_usd_per_hour or 0.0))
    return Rung(number=0, cluster=Cluster(members=tuple(members)), most_usd=tuple(most))


def priced_anew(rung: Rung, spot: Mapping[tuple[str, str], float | None], at: datetime) -> Cluster:
    """The cluster with spot prices as they are now for everybody, where they are known: not billed yet."""

    def now(offer: Offer) -> Offer:
        usd = spot.get((offer.instance_type.name, offer.zone)) if offer.market == "spot" else None
        public = partial(
            replace, offer, usd_per_hour=usd, public_usd_per_hour=None, own_price="", price_as_of=at
        )
        return offer if usd is None else public()

    return Cluster(members=tuple(now(offer) for offer in rung.cluster.members))

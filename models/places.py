"""Which places are worth asking: where another sells the same machines, in the same market, no dearer and no riskier.

A place is a market in one zone. A cluster lies in one place, so one that another place beats in every type cannot win.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .cloud import Offer

Place = tuple[str, str, str]  # market, region, zone
Terms = Mapping[str, tuple[float, float]]  # instance type -> dollars an hour (inf: unknown), interruptions an hour

# Places of one market that are compared whole, beaten ones aside: each costs as much again as the first.
MOST_PLACES = 4


def worth_asking(offers: Sequence[Offer], *, most: int = MOST_PLACES) -> list[Offer]:
    """`offers` without those of beaten places, in the same order; of equal places the first by name stays.

    Where more than `most` of a market are left, those stay that are the cheapest for most types, and of the others only
    the types that are nowhere cheaper: a cluster of one type is still found where it costs least, one of several types
    might have cost less elsewhere.
    """
    sold: dict[Place, dict[str, tuple[float, float]]] = {}
    for offer in offers:
        usd = math.inf if offer.usd_per_hour is None else offer.usd_per_hour
        terms = sold.setdefault(_place(offer), {})
        name = offer.instance_type.name
        terms[name] = min((usd, offer.interruptions_per_hour), terms.get(name, (math.inf, math.inf)))
    whole: set[Place] = set()
    cheapest: set[tuple[Place, str]] = set()
    for market in {place[0] for place in sold}:
        mine = _unbeaten({place: terms for place, terms in sorted(sold.items()) if place[0] == market})
        by_type = _cheapest(mine)
        cheapest |= {(place, name) for name, place in by_type.items()}
        whole |= set(_most_often(by_type, mine)[:most])
    return [one for one in offers if _place(one) in whole or (_place(one), one.instance_type.name) in cheapest]


def _place(offer: Offer) -> Place:
    return offer.market, offer.region, offer.zone


def _unbeaten(places: Mapping[Place, Terms]) -> dict[Place, Terms]:
    """Those that no other beats; of two that beat each other the one that sorts first."""
    return {
        place: terms
        for place, terms in places.items()
        if not any(
            other != place and _beats(others, terms) and (other < place or not _beats(terms, others))
            for other, others in places.items()
        )
    }


def _beats(ours: Terms, theirs: Terms) -> bool:
    """Has `ours` every type of `theirs`, none dearer and none riskier?"""
    return all(
        name in ours and ours[name][0] <= usd and ours[name][1] <= hazard for name, (usd, hazard) in theirs.items()
    )


def _cheapest(places: Mapping[Place, Terms]) -> dict[str, Place]:
    """The place where each type costs least."""
    names = {name for terms in places.values() for name in terms}
    return {name: min((terms[name][0], place) for place, terms in places.items() if name in terms)[1] for name in names}


def _most_often(by_type: Mapping[str, Place], places: Iterable[Place]) -> list[Place]:
    """`places`, first those that are the cheapest for most types."""
    wins = Counter(by_type.values())
    return sorted(places, key=lambda place: (-wins[place], place))

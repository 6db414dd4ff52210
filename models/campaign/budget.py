"""Decide if a launch is permitted: its worst-case cost must fit under every dollar cap.

A launch is permitted if spent + committed + claimed + worst <= cap, for every cap. All amounts are
in dollars:

- `spent`: the recorded cost of earlier launches
- `committed`: the worst-case cost of launches whose final cost is not recorded yet
- `claimed`: the amount that other runs of `srift refresh` have reserved under the same cap
- `worst`: the worst-case cost of the launch itself

    billed = 60 ceil(deadline / 60) + LATE_S        maximum billed seconds
    worst  = price x billed / 3600 + fixed

`deadline` is the number of seconds from the request until machines shut themselves down. LATE_S is
the maximum number of seconds that are billed after the deadline. `price` is the highest possible
price in dollars per hour. `fixed` is the cost of downloads and uploads. If the longest useful
deadline is too expensive, a shorter deadline is used. The launch is refused if even the shortest
useful deadline is too expensive.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ..domain.cluster import Cluster, Offer

_MINUTE_S = 60.0  # machines stop themselves after whole minutes; AWS bills at least one minute
# The maximum number of seconds that are billed after the deadline. The timer of the deadline starts
# up to three minutes late. The shutdown takes up to one minute. A launch has at most eleven failed
# attempts, and each costs a minute.
LATE_S = 240.0 + 60.0 * 11


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A limit in dollars, and the amounts that already count against it.

    - `spent_usd`: the recorded cost of earlier launches
    - `committed_usd`: the worst-case cost of launches whose final cost is not recorded yet
    - `claimed_usd`: the amount that other runs of `srift refresh` have reserved
    - `claimed_by`: the names of these other runs
    """

    name: str
    usd: float
    spent_usd: float
    committed_usd: float
    claimed_usd: float = 0.0
    claimed_by: Sequence[str] = ()

    @property
    def left_usd(self) -> float:
        return max(0.0, self.usd - self.spent_usd - self.committed_usd - self.claimed_usd)

    def __str__(self) -> str:
        parts = f"{self.spent_usd:.2f} spent, {self.committed_usd:.2f} committed"
        if self.claimed_by:
            parts += f", {self.claimed_usd:.2f} claimed by {' and '.join(self.claimed_by)}"
        return f"{self.name} {self.usd:.2f} ({parts})"


class Allowance(NamedTuple):
    """The decision about a launch: permitted with a deadline and a worst-case cost, or refused.

    `refusal` is the reason if the launch is refused. It is empty if the launch is permitted.
    `max_usd_per_hour` is the highest total price of the machines in the worst case, without volumes
    and IP addresses. It is infinite on local hosts.
    """

    deadline_s: float = 0.0
    worst_usd: float = 0.0
    refusal: str = ""
    max_usd_per_hour: float = math.inf


def billed_s(deadline_s: float) -> float:
    """Return the maximum billed seconds of a machine with the deadline `deadline_s`."""
    return _MINUTE_S * math.ceil(deadline_s / _MINUTE_S) + LATE_S


def worst_usd(usd_per_hour: float, deadline_s: float) -> float:
    return usd_per_hour * billed_s(deadline_s) / 3600.0


def longest_s(usd_per_hour: float, left_usd: float) -> float:
    """Return the longest deadline in seconds whose worst-case cost is at most `left_usd`.

    The result is a whole number of minutes; 0 if no deadline is cheap enough.
    """
    minutes = max(0, math.floor((left_usd / usd_per_hour * 3600.0 - LATE_S) / _MINUTE_S))
    if minutes and worst_usd(usd_per_hour, minutes * _MINUTE_S) > left_usd:
        minutes -= 1  # a rounding error
    return minutes * _MINUTE_S


def dearest_usd_per_hour(
    cluster: Cluster, offers: Iterable[Offer], spot_margin: float | None = None
) -> float | None:
    """Return an upper bound of the cluster's price in dollars per hour.

    - Machines can come from any zone of the region, so the highest price in the region counts.
    - A spot price can rise to the on-demand price. If the on-demand price is unknown, a spot price
      can rise to the bid: `spot_margin` times the known spot price.
    - Discounts are ignored, because a savings plan can be used up.

    Returns None in two cases:

    - The price of a machine is unknown.
    - A spot price has no upper bound: its on-demand price is unknown and `spot_margin` is None.
    """
    known = [*offers, *cluster.members]
    total = 0.0
    for member in cluster.members:
        name, usd = member.instance_type.name, {"on-demand": 0.0, "spot": 0.0}
        for offer in known:
            if offer.instance_type.name == name and offer.region == member.region:
                usd[offer.market] = max(usd[offer.market], offer.worst_usd_per_hour or 0.0)
        dearest = usd["on-demand"]
        if member.market == "spot":
            bid = 1.0 if dearest else spot_margin or 0.0
            dearest = max(dearest, bid * usd["spot"])
        if member.usd_per_hour is None or not dearest:
            return None
        total += dearest
    return total


def dearest_by_type(offers: Iterable[Offer], spot_margin: float | None = None) -> dict[str, float]:
    """Return {instance type: the highest price of its offers in dollars per hour}.

    The price of a spot offer is multiplied by `spot_margin`, if given. Offers whose public price is
    unknown are ignored.
    """
    dearest: dict[str, float] = {}
    for offer in offers:
        if offer.worst_usd_per_hour is not None:
            bid = (spot_margin or 1.0) if offer.market == "spot" else 1.0
            name, price = offer.instance_type.name, bid * offer.worst_usd_per_hour
            dearest[name] = max(dearest.get(name, 0.0), price)
    return dearest


def allow(
    usd_per_hour: float | None,
    *,
    wished_s: float,
    least_s: float,
    caps: Sequence[Cap],
    once_usd: float = 0.0,
) -> Allowance:
    """Decide if a launch is permitted, and with which deadline.

    The deadline is the number of seconds from the request until the machines shut down. It is as
    long as every cap permits, but at most `wished_s`. The launch is refused if the deadline would
    be shorter than `least_s`, or if the price is unknown.

    usd_per_hour: the highest possible price of the launch; None means unknown.
    wished_s: the longest useful deadline in seconds.
    least_s: the shortest useful deadline in seconds.
    once_usd: the part of the cost that does not depend on the deadline, such as downloads.
    """
    if usd_per_hour is None or not 0 < usd_per_hour < math.inf:
        why = "its highest possible price is unknown, because an on-demand price is missing"
        return Allowance(refusal=why)
    tightest = min(caps, key=lambda cap: cap.left_usd)
    deadline_s = min(wished_s, longest_s(usd_per_hour, tightest.left_usd - once_usd))
    if deadline_s < least_s:
        needs = worst_usd(usd_per_hour, least_s) + once_usd
        why = f"it may cost up to ${needs:.2f}; ${tightest.left_usd:.2f} is left of {tightest}"
        return Allowance(refusal=why)
    worst = worst_usd(usd_per_hour, deadline_s) + once_usd
    return Allowance(deadline_s=deadline_s, worst_usd=worst)


def month_start(now: datetime) -> datetime:
    """Return the start of the month that contains `now`, in the time zone of `now`."""
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)

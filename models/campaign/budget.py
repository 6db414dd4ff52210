"""Whether a launch may be made: the very worst that it could cost fits under every cap. Decides
only, buys nothing.

    billed  = 60 ceil(deadline / 60) + late             seconds at most, from asking until the last machine is gone;
                                                         late: booting, ending, a minute of each
                                                         try before
    worst   = price billed / 3600                        at the dearest price that the launch may come to
    allowed <=> spent + committed + worst <= cap         for every cap

A deadline that is wished for is shortened to what the caps can pay, but not below the least that
makes sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..domain.cluster import Cluster, Offer

_MINUTE_S = 60.0  # in whole ones a machine counts to its own end, and AWS bills one at least
# It counts from when it has booted that far, and then has to shut down: three minutes and one are
# generous.
LATE_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """Dollars that must not be exceeded, those gone, and those that what is held may still cost.
    `name`: who set it.

    `claimed_usd` are left to others, `claimed_by`, who claimed them before.
    """

    name: str
    usd: float
    spent_usd: float
    committed_usd: float
    claimed_usd: float = 0.0
    claimed_by: Sequence[str] = ()

    @property
    def left_usd(self) -> float:
        """Dollars that a launch may cost at worst."""
        return max(0.0, self.usd - self.spent_usd - self.committed_usd - self.claimed_usd)

    def __str__(self) -> str:
        """As a sentence says it: `--max-usd 25.00 (3.10 spent, 1.20 committed)`."""
        parts = f"{self.spent_usd:.2f} spent, {self.committed_usd:.2f} committed"
        if self.claimed_by:
            parts += f", {self.claimed_usd:.2f} claimed by {' and '.join(self.claimed_by)}"
        return f"{self.name} {self.usd:.2f} ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How long a launch may last and what it may cost, or the reason why it may not be made."""

    deadline_s: float = 0.0
    worst_usd: float = 0.0
    refusal: str = ""


def late_s(tries: int = 1) -> float:
    """Seconds beyond the deadline: boot and end of one try, and the minute that each try before is
    billed at least.
    """
    return LATE_S + _MINUTE_S * max(0, tries - 1)


def billed_s(deadline_s: float, late: float = LATE_S) -> float:
    """Seconds that a machine with this deadline is paid for at most."""
    return _MINUTE_S * math.ceil(deadline_s / _MINUTE_S) + late


def worst_usd(usd_per_hour: float, deadline_s: float, late: float = LATE_S) -> float:
    """Dollars of machines that all end at the last moment."""
    return usd_per_hour * billed_s(deadline_s, late) / 3600.0


def longest_s(usd_per_hour: float, left_usd: float, late: float = LATE_S) -> float:
    """The longest deadline, in whole minutes, whose worst case costs at most `left_usd`; 0 where
    there is none.
    """
    minutes = max(0, math.floor((left_usd / usd_per_hour * 3600.0 - late) / _MINUTE_S))
    if (
        minutes and worst_usd(usd_per_hour, minutes * _MINUTE_S, late) > left_usd
    ):  # the last digit, against us
        minutes -= 1
    return minutes * _MINUTE_S


def dearest_usd_per_hour(
    cluster: Cluster, offers: Iterable[Offer], spot_margin: float | None = None
) -> float | None:
    """What `cluster` could come to an hour: spot rises as far as on-demand, and any zone of the
    region may be had.

    Where nothing is bought on demand, spot rises as far as is bid, `spot_margin` times what was
    seen. An own price below everybody's is not relied on: what a savings plan commits to may be
    used up. None where a price that bounds it is not known.
    """
    known: dict[tuple[str, str, str], list[float | None]] = {}
    for offer in (*offers, *cluster.members):
        key = (offer.instance_type.name, offer.region, offer.market)
        known.setdefault(key, []).append(offer.worst_usd_per_hour)
    total = 0.0
    for member in cluster.members:
        bound = known.get((member.instance_type.name, member.region, "on-demand"), [])
        prices = [price for price in bound if price is not None]
        if member.usd_per_hour is None:
            return None
        if member.market == "spot":
            spot = known[member.instance_type.name, member.region, "spot"]
            bid = 1.0 if prices else spot_margin
            prices += [] if bid is None else [bid * price for price in spot if price is not None]
        if not prices:
            return None
        total += max(prices)
    return total


def dearest_by_type(offers: Iterable[Offer], spot_margin: float | None = None) -> dict[str, float]:
    """Of each instance type, the highest price known anywhere, own or everybody's.

    On spot times `spot_margin`, as it may be bid.
    """
    dearest: dict[str, float] = {}
    for offer in offers:
        if offer.worst_usd_per_hour is not None:
            name, bid = (
                offer.instance_type.name,
                1.0 if offer.market != "spot" else spot_margin or 1.0,
            )
            dearest[name] = max(dearest.get(name, 0.0), bid * offer.worst_usd_per_hour)
    return dearest


def allow(
    usd_per_hour: float | None,
    *,
    wished_s: float,
    least_s: float,
    caps: Sequence[Cap],
    late: float = LATE_S,
) -> Allowance:
    """The longest deadline up to `wished_s` that every cap can pay; a refusal where that is less
    than `least_s`.

    `usd_per_hour` is the dearest that the machines may come to; unknown is refused.
    """
    if usd_per_hour is None or not usd_per_hour > 0 or not math.isfinite(usd_per_hour):
        why = "its price is not known (on demand, which bounds spot; see [ec2] markets), nor the worst case"
        return Allowance(refusal=why)
    tightest = min(caps, key=lambda cap: cap.left_usd)
    deadline_s = wished_s
    if worst_usd(usd_per_hour, wished_s, late) > tightest.left_usd:
        deadline_s = min(wished_s, longest_s(usd_per_hour, tightest.left_usd, late))
    if deadline_s < least_s:
        needs = worst_usd(usd_per_hour, least_s, late)
        why = f"at worst it would cost ${needs:.2f}, and only ${tightest.left_usd:.2f} are left of {tightest}"
        return Allowance(refusal=why)
    return Allowance(deadline_s=deadline_s, worst_usd=worst_usd(usd_per_hour, deadline_s, late))


def month_start(now: datetime) -> datetime:
    """The first moment of `now`'s calendar month, in its own time zone (UTC here)."""
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)

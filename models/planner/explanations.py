"""Why a setup won or lost, and why nothing is feasible, in numbers and plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..domain.cluster import Cluster, InstanceType, Offer
from ..domain.workload import Goal
from .enumeration import Refusal

Row = dict[str, Any]

_ITSELF = 0.05  # doublings that no print shows
_LEAST_CHANCE = 0.005  # that is not printed as 0 %
_WORSE = {"usd": "dollars", "hours": "hours"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a goal compared: its aim ("usd" or "hours"), what its constraint limits, to how much, among how many."""

    goal: Goal
    aim: str
    what: str | None
    limit: float | None
    clusters: int


def amount(value: float, what: str) -> str:
    """`1.93 h`, `2.5 min`, `$12.50`, `$0.0123` or `$0.000041`: small ones with two digits that count."""
    if what == "usd":
        return f"${value:,.{_decimals(value, what)}f}"
    scale, unit = _hours_unit(value)
    return f"{value * scale:.{_decimals(value, what)}f} {unit}"


def enough(value: float, what: str) -> str:
    """As `amount`, rounded up: a constraint as it is printed here is met by `value`."""
    scale = 1.0 if what == "usd" else _hours_unit(value)[0]
    step = 10.0 ** -_decimals(value, what) / scale
    return amount(math.ceil(value / step + 1e-6) * step, what)


def _hours_unit(hours: float) -> tuple[float, str]:
    """Units an hour, and the unit in which so many hours are printed."""
    return (1.0, "h") if hours >= 0.1 else (60.0, "min") if hours >= 1 / 60 else (3600.0, "s")


def _decimals(value: float, what: str) -> int:
    """Digits after the point."""
    if what == "hours" and value >= 1 / 60:
        return 2 if value >= 0.1 else 1
    shown = value if what == "usd" else value * 3600
    least, most = (4, 12) if what == "usd" else (1, 9)
    if shown >= 1 or shown <= 0:
        return 2 if what == "usd" else 1
    return min(max(1 - math.floor(math.log10(shown)), least), most)


def place(cluster: Cluster) -> str:
    """A cluster with its market: `2xlc.small (spot)`."""
    return f"{cluster.name} ({', '.join(sorted({offer.market for offer in cluster.members}))})"


def winner(row: Row, rival: Row | None, comparison: Comparison, nearest: float | None = None) -> str:
    """Why the first in rank is the first, what limits it, and how many doublings away the nearest measurement is."""
    best = "cheapest" if comparison.aim == "usd" else "fastest"
    if comparison.what is None or comparison.limit is None:
        among = f"{best} of {comparison.clusters} clusters"
    else:
        among = (
            f"of {comparison.clusters} clusters the {best} that meets {amount(comparison.limit, comparison.what)}"
            f" with at least {comparison.goal.p_required:.0%} probability (this one with"
            f" {row['p_meets_constraint']:.0%})"
        )
    parts = [f"{among}: {amount(row[comparison.aim], comparison.aim)}"]
    if rival is None:
        parts.append("no other came into question")
    else:
        parts.append(f"the next, {_place(rival)}, has {_difference(rival, row, comparison.aim)}")
    parts.append(f"the best with {row['p_best']:.0%} probability")
    parts.append(f"limited by {row['bottleneck']}")
    if nearest is not None:
        parts.append("measured itself" if nearest < _ITSELF else f"nearest measurement {nearest:.1f} doublings away")
    return "; ".join(parts)


def loser(row: Row, first: Row, comparison: Comparison) -> str:
    """Why a cluster is not the first: its distance in what was aimed at, or how often it misses the constraint."""
    other = "hours" if comparison.aim == "usd" else "usd"
    aimed = _difference(row, first, comparison.aim)
    if row["status"] == "misses_constraint" and comparison.what is not None and comparison.limit is not None:
        kind = "deadline" if comparison.what == "hours" else "budget"
        missed = 1 - row["p_meets_constraint"]
        return (
            f"misses the {kind} of {amount(comparison.limit, comparison.what)} with {missed:.0%} probability, where"
            f" {1 - comparison.goal.p_required:.0%} is allowed; it would have {aimed}"
        )
    if row[other] is None or first[other] is None:
        beside = "price unknown" if row["usd"] is None else "no price to compare with"
    else:
        beside = _difference(row, first, other)
    return f"{aimed} and {beside} against {_place(first)}; the best with {row['p_best']:.0%} probability"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBet:
    """The cluster with the best chance to meet a constraint that none meets surely enough."""

    cluster: Cluster
    chance: float
    hours: float
    usd: float


def infeasible(goal: Goal, what: str, nearest: str, needed: float, bet: BestBet) -> str:
    """What would make a goal feasible that nothing meets, and what has the best chance to meet it as it is."""
    asked = goal.hours if what == "hours" else goal.usd
    kind = "deadline" if what == "hours" else "budget"
    limit, least = amount(float(asked or 0.0), what), enough(needed, what)
    if limit == least:  # they differ by less than is printed
        limit = f"{float(asked or 0.0):.6g} h" if what == "hours" else f"${float(asked or 0.0):.6g}"
    said = (
        f"no cluster on offer meets {limit} with {goal.p_required:.0%} probability; the"
        f" nearest, {nearest}, would meet a {kind} of {least}"
    )
    if bet.chance < _LEAST_CHANCE:
        return said
    return (
        f"{said}; the best bet, {place(bet.cluster)}, meets {limit} with {bet.chance:.0%} probability, at an expected"
        f" {amount(bet.hours, 'hours')} and {amount(bet.usd, 'usd')}"
    )


def nothing_to_choose(setups: int, predicted: bool) -> str:
    """Why there is nothing to rank at all."""
    if setups == 0:
        return "there is no cluster on offer that can be had here; more instance types would make it feasible"
    if not predicted:
        return "no step time could be predicted for any cluster on offer; measuring one would make it feasible"
    return "no cluster on offer has a known price; a price would make it feasible"


def _place(row: Row) -> str:
    return f"{row['cluster']} ({', '.join(sorted({offer['market'] for offer in row['cluster_offers']}))})"


def _difference(row: Row, against: Row, what: str) -> str:
    """`+12 % dollars ($0.0123 against $0.0110)`."""
    mine, theirs = float(row[what]), float(against[what])
    change = 100 * (mine / theirs - 1) if theirs > 0 else 0.0
    if abs(change) < 0.05:
        return f"equal {_WORSE[what]} ({amount(mine, what)})"
    shown = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"{shown} % {_WORSE[what]} ({amount(mine, what)} against {amount(theirs, what)})"


_BYTES_PER_GIB = 2.0**30


def obstacle(
    totals: Sequence[int], offers: Sequence[Offer], *, fits: Refusal, peak_bytes: Callable[[str, int], float]
) -> str:
    """What keeps every machine among `offers` from training at any of the global batches `totals`, and what would help.

    Empty where it is neither memory nor division. `fits` says why a cluster can never be had; `peak_bytes` of
    (instance type, samples a device) is compared with the device's memory, NaN meaning unknown and allowed.
    """
    sold = {one.instance_type.name: one.instance_type for one in offers if not fits(Cluster(members=(one,)))}
    types = list(sold.values())
    least_bytes = {one.name: peak_bytes(one.name, 1) for one in types}
    roomy = [one for one in types if not least_bytes[one.name] > one.device_memory_gib * _BYTES_PER_GIB]
    if types and not roomy:
        return _too_small(types, min(least_bytes.values()))
    counts = sorted({one.devices for one in roomy})
    if not counts or any(total % many == 0 for total in totals for many in counts):
        return ""
    return (
        f"no machine on offer can share a global batch of {_either(totals)} equally among its devices"
        f" ({_either(counts)} on each); a global batch of {_either(_nearest(totals, counts))} would do"
    )


def _too_small(types: Sequence[InstanceType], least_bytes: float) -> str:
    most_gib = max(one.device_memory_gib for one in types)
    return (
        "no device on offer has the memory for even one sample of this workload: about"
        f" {least_bytes / _BYTES_PER_GIB:.3g} GiB are needed, and the largest has {most_gib:.3g} GiB; larger devices"
        " would do"
    )


def _nearest(totals: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The multiples of some count that lie between the totals, or else the next below and above them."""
    least, most = min(totals), max(totals)
    near = {one for total in totals for many in counts for one in (total // many * many, -(-total // many) * many)}
    between = sorted(one for one in near if least <= one <= most)
    below, above = [one for one in near if 0 < one < least], [one for one in near if one > most]
    return between or [*([max(below)] if below else []), min(above)]


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

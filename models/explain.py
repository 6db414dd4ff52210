"""Why a setup won or lost, in numbers and plain words. Judges nothing: the figures come from the ranked rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .cloud import Cluster
from .workload import Goal

Row = dict[str, Any]

_ITSELF = 0.05  # doublings that no print shows
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
    """`1.93 h`, `$0.0123` or `$12.50`."""
    if what == "hours":
        return f"{value:.2f} h" if value >= 0.1 else f"{value * 60:.1f} min"
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def enough(value: float, what: str) -> str:
    """As `amount`, rounded up: a constraint as it is printed here is met by `value`."""
    unit = (0.01 if value >= 0.1 else 0.1 / 60) if what == "hours" else (0.01 if value >= 1 else 1e-4)
    return amount(math.ceil(value / unit + 1e-6) * unit, what)


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
    parts.append(f"best in {row['p_best']:.0%} of draws")
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
            f"misses the {kind} of {amount(comparison.limit, comparison.what)} in {missed:.0%} of draws, where"
            f" {1 - comparison.goal.p_required:.0%} is allowed; it would have {aimed}"
        )
    if row[other] is None or first[other] is None:
        beside = "price unknown" if row["usd"] is None else "no price to compare with"
    else:
        beside = _difference(row, first, other)
    return f"{aimed} and {beside} against {_place(first)}; best in {row['p_best']:.0%} of draws"


def infeasible(goal: Goal, what: str, nearest: str, needed: float) -> str:
    """What would make a goal feasible that nothing meets."""
    asked = goal.hours if what == "hours" else goal.usd
    kind = "deadline" if what == "hours" else "budget"
    limit, least = amount(float(asked or 0.0), what), enough(needed, what)
    if limit == least:  # they differ by less than is printed
        limit = f"{float(asked or 0.0):.6g} h" if what == "hours" else f"${float(asked or 0.0):.6g}"
    return (
        f"no cluster on offer meets {limit} with {goal.p_required:.0%} probability; the"
        f" nearest, {nearest}, would meet a {kind} of {least}"
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

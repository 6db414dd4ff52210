"""What would a way of buying runs have cost, and how good were its choices, on setups that were all measured before.

    dollars = sum over launches of price x max(minimum, start + runs);     regret = objective of choice / best - 1

A choice that misses its constraint, or none, counts as a regret of 1. Policies see step times only as they buy them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from ..cloud import parse_cluster
from ..columns import read_setups
from ..identity import row_key, rows_of
from ..wants import Costs
from ..worth import MISS, Floats, Question

# Deadlines as multiples of the fastest setup's hours, budgets of the cheapest one's dollars.
LEVELS = (1.05, 1.25, 1.6, 2.2, 3.2, 5.0)
_EXACT = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """One workload's measured setups, one entry each: what is true, what an hour costs, and what is asked."""

    workload: str
    rows: pd.DataFrame  # measurement columns without what was measured
    clusters: tuple[str, ...]
    step_s: Floats
    usd_per_hour: Floats
    questions: tuple[Question, ...]


class Policy(Protocol):
    """A way of buying. Positions are those of the ground's setups; `choices` positions among each one's contenders."""

    def next(self) -> list[int]:
        """Setups of one cluster to measure now; empty to stop."""

    def tell(self, place: int, step_s: float) -> None:
        """What one of them measured."""

    def choices(self) -> list[int | None]:
        """What would be chosen now for each question; None where nothing can be."""


def ground_of(
    runs: pd.DataFrame, workload: str, *, usd: Mapping[str, float], devices: Mapping[str, int], batches: int, least: int
) -> Ground:
    """The setups of `workload` at the `batches` global batches with the most of them, at least `least` each.

    `usd` an hour by instance type. Rows that differ in nothing but the order of their machines are one setup, whose
    step time is their median. Questions at each global batch: cheapest, fastest, and both with constraints at LEVELS.
    """
    own = runs[runs["workload"] == workload]
    keyed = own.assign(
        key=[repr(row_key(row, devices)) for row in rows_of(own)], samples=read_setups(own, dict(devices)).samples
    )
    middle = keyed.groupby("key", sort=False)["step_s"].median()
    setups = keyed.drop_duplicates("key").reset_index(drop=True)
    counts = setups.groupby("samples").size().sort_values(ascending=False, kind="stable")
    picked = [size for size, count in counts.items() if count >= least][:batches]
    setups = setups[setups["samples"].isin(picked)].reset_index(drop=True)
    types = [parse_cluster(str(name)) for name in setups["cluster"]]
    step_s = np.array([float(middle[key]) for key in setups["key"]])
    price = np.array([sum(usd[name] for name in names) for names in types], dtype=float)
    asked: list[Question] = []
    for size in picked:
        asked += questions_at(np.flatnonzero((setups["samples"] == size).to_numpy()), step_s, price, f"{size:g}")
    return Ground(
        workload=workload,
        rows=setups.drop(columns=["step_s", "sync_s", "key", "samples"], errors="ignore"),
        clusters=tuple("+".join(sorted(names)) for names in types),
        step_s=step_s,
        usd_per_hour=price,
        questions=tuple(asked),
    )


def questions_at(
    places: np.ndarray[tuple[int, ...], np.dtype[np.intp]], step_s: Floats, price: Floats, batch: str
) -> list[Question]:
    """Every goal among the setups at `places`, which share a global batch; hours are those of 3,600 steps."""
    fastest, cheapest = float(step_s[places].min()), float((step_s * price)[places].min())
    goals: list[tuple[str, str, str | None, float]] = [
        ("cheapest", "usd", None, np.inf),
        ("fastest", "hours", None, np.inf),
    ]
    for level in LEVELS:
        goals.append((f"cheapest within {level:g} x the fastest", "usd", "hours", level * fastest))
        goals.append((f"fastest within {level:g} x the cheapest", "hours", "usd", level * cheapest))
    nothing = np.zeros(len(places))
    return [
        Question(
            name=f"{name} at {batch}",
            places=places,
            fixed_hours=nothing,
            hours_per_step_s=nothing + 1,
            usd_per_hour=price[places],
            luck=nothing,
            aim=aim,
            limited=limited,
            limit=limit * _EXACT,
        )
        for name, aim, limited, limit in goals
    ]  # fmt: skip


def regret(question: Question, step_s: Floats, chosen: int | None) -> float:
    """Of taking the contender at position `chosen`, against the best that meets the constraint. A miss counts as 1."""
    if chosen is None:
        return MISS
    hours = question.fixed_hours + question.hours_per_step_s * step_s[question.places]
    by = {"hours": hours, "usd": hours * question.usd_per_hour}
    objective = by[question.aim]
    meets = np.full(len(hours), True) if question.limited is None else by[question.limited] <= question.limit
    if not meets[chosen]:
        return MISS
    return float(objective[chosen] / objective[meets].min() - 1)


@dataclass(slots=True, kw_only=True)
class Bill:
    """Dollars for runs one after another. A run on the cluster of the one before it needs no start of its own."""

    costs: Costs
    usd: float = 0.0
    _cluster: str = ""
    _seconds: float = 0.0
    _launch_usd: float = 0.0

    def add(self, cluster: str, step_s: float, usd_per_hour: float) -> None:
        """One run: its start-up where the cluster is another, building the workload, warm-up and timed steps."""
        if cluster != self._cluster:
            self._cluster, self._seconds, self._launch_usd = cluster, 0.0, 0.0
        self._seconds += self.costs.run_s(step_s)
        now = self.costs.billed_s(self._seconds) / 3600 * usd_per_hour
        self.usd += now - self._launch_usd
        self._launch_usd = now


def replay(ground: Ground, policy: Policy, costs: Costs, *, before_usd: float = 0.0) -> pd.DataFrame:
    """Buy as `policy` says until it stops. Columns usd, runs, regret (mean over the questions), missed (part of them).

    The first row is what it would choose with nothing bought; `before_usd` was spent before.
    """
    bill, bought = Bill(costs=costs, usd=before_usd), 0
    curve = [_row(ground, policy, bill.usd, bought)]
    while places := policy.next():
        if len({ground.clusters[place] for place in places}) != 1:
            raise ValueError("one launch has one cluster")
        for place in places:
            bill.add(ground.clusters[place], ground.step_s[place], ground.usd_per_hour[place])
        for place in places:
            policy.tell(place, float(ground.step_s[place]))
        bought += len(places)
        curve.append(_row(ground, policy, bill.usd, bought))
    return pd.DataFrame(curve)


def _row(ground: Ground, policy: Policy, usd: float, runs: int) -> dict[str, float]:
    pairs = zip(ground.questions, policy.choices(), strict=True)
    found = np.array([regret(question, ground.step_s, chosen) for question, chosen in pairs])
    return {"usd": usd, "runs": runs, "regret": float(found.mean()), "missed": float((found == MISS).mean())}


def usd_until(curve: pd.DataFrame, most: float) -> float:
    """Dollars after which the mean regret is at most `most` and stays so; infinite where it never does."""
    above = np.flatnonzero(curve["regret"].to_numpy() > most)
    first = int(above[-1]) + 1 if len(above) else 0
    return float(curve["usd"].iloc[first]) if first < len(curve) else float("inf")


def at_dollars(curve: pd.DataFrame, usd: Sequence[float]) -> list[float]:
    """Mean regret once so many dollars are spent: that of the last row that they pay for (the first row's before)."""
    spent = curve["usd"].to_numpy()
    return [
        float(curve["regret"].iloc[max(0, int(np.searchsorted(spent, one * _EXACT, side="right")) - 1)]) for one in usd
    ]

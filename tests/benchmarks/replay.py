"""What would a way of buying runs have cost, and how good were its choices, on setups that were all measured before.

    dollars = sum over launches of price x max(minimum, start + runs)
    regret  = exp(loss of choice - least loss) - 1, the loss being that of the rule of choice

A choice that misses its constraint counts as a regret of 1 at most, none as 1. Policies see step times only as they buy
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pandas as pd

from models.campaign.candidates import PROFILE_BATCHES, Costs, Measurement, in_order
from models.campaign.value_of_information import Floats, OpenChoice, aim_and_meeting
from models.domain.cluster import Cluster
from models.domain.numeric import BoolArray
from models.domain.workload import Setup
from models.monitoring.backtest import described
from models.planner.choice_rule import misses, weighed
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from models.step_time.setup_arrays import read_setups

from .setups import measured_setups

# Deadlines as multiples of the fastest setup's hours, budgets of the cheapest one's dollars.
LEVELS = (1.05, 1.25, 1.6, 2.2, 3.2, 5.0)
_EXACT = 1 + 1e-9
MISS = (
    1.0  # regret of no choice at all, and the most that one which misses its constraint counts as
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """One workload's measured setups, one entry each: what is true, what an hour costs, and what is asked."""

    workload: str
    setups: tuple[Setup, ...]
    rows: pd.DataFrame  # the setups as measurement columns
    step_s: Floats
    usd_per_hour: Floats
    questions: tuple[OpenChoice, ...]

    def cluster(self, place: int) -> Cluster:
        """The machines of one setup."""
        return self.setups[place].cluster

    def purchase(self, order: Sequence[int], at_once: int) -> Purchase:
        """The first of `order`, and those after it that run on the same machines, at most `at_once` in all."""
        places = [one for one in order if self.cluster(one) == self.cluster(order[0])][:at_once]
        return Purchase(cluster=self.cluster(order[0]), places=tuple(places)) if places else NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Setups to measure now by one launch of `cluster`; none to stop. `anew`: on machines acquired for it."""

    cluster: Cluster | None
    places: tuple[int, ...]
    anew: bool = False


NOTHING = Purchase(cluster=None, places=())


class Policy(Protocol):
    """A way of buying. Positions are those of the ground's setups; `choices` positions among each one's decisions."""

    def next(self) -> Purchase:
        """What to buy now."""

    def tell(self, place: int, step_s: float) -> None:
        """What one of them measured."""

    def choices(self) -> list[int | None]:
        """What would be chosen now for each question; None where nothing can be."""


def ground_of(
    runs: pd.DataFrame,
    workload: str,
    *,
    usd: Mapping[str, float],
    devices: Mapping[str, int],
    batches: int,
    least: int,
) -> Ground:
    """The setups of `workload` at the `batches` global batches with the most of them, at least `least` each.

    `usd` an hour by instance type. Rows that differ in nothing but the order of their machines are one setup, whose
    step time is their median. Questions at each global batch: cheapest, fastest, and both with constraints at LEVELS.
    """
    measured = measured_setups(runs[runs["workload"] == workload], devices, usd)
    sizes, counts = np.unique(measured.global_batch, return_counts=True)
    picked = [sizes[at] for at in np.argsort(-counts, kind="stable") if counts[at] >= least][
        :batches
    ]
    measured = measured.take(np.flatnonzero(np.isin(measured.global_batch, picked)))
    asked: list[OpenChoice] = []
    for size in picked:
        places = np.flatnonzero(measured.global_batch == size)
        asked += questions_at(places, measured.step_s, measured.usd_per_hour, f"{size:g}")
    return Ground(
        workload=workload,
        setups=measured.setups,
        rows=measured.frame(),
        step_s=measured.step_s,
        usd_per_hour=measured.usd_per_hour,
        questions=tuple(asked),
    )


def measurement_of(setup: Setup, step_s: float, costs: Costs) -> Measurement:
    """What the campaign buys where it buys this setup, at so many seconds a step."""
    return Measurement(
        kind="train",
        workload=setup.workload,
        members=tuple(offer.instance_type.name for offer in setup.cluster.members),
        batches=setup.batch_per_device,
        accumulation_steps=setup.accumulation_steps,
        message_bytes=(),
        global_batch=setup.global_batch,
        exact=True,
        est_s=min(costs.run_s(step_s), costs.train_most_s),
        devices=setup.layout,
    )


def questions_at(
    places: np.ndarray[tuple[int, ...], np.dtype[np.intp]],
    step_s: Floats,
    price: Floats,
    batch: str,
) -> list[OpenChoice]:
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
        OpenChoice(
            name=f"{name} at {batch}",
            places=places,
            fixed_hours=nothing,
            hours_per_step_s=nothing + 1,
            usd_per_hour=price[places],
            irreducible_sd=nothing,
            aim=aim,
            limited=limited,
            limit=limit * _EXACT,
        )
        for name, aim, limited, limit in goals
    ]  # fmt: skip


def regret(question: OpenChoice, step_s: Floats, chosen: int | None) -> float:
    """Of taking the candidate at position `chosen`, against the one that loses least by the rule of choice.

    A miss counts as 1 at most, and as 1 where nobody is chosen.
    """
    if chosen is None:
        return MISS
    loss = known_losses(question, step_s)
    lost = float(np.exp(loss[chosen] - loss.min()) - 1)
    return min(lost, MISS) if missed(question, step_s, chosen) else lost


def known_losses(question: OpenChoice, step_s: Floats) -> Floats:
    """(candidates,) what each loses by the rule of choice where its step seconds are known, infinite where they are."""
    log_step = np.log(step_s[question.places])
    known = np.isfinite(log_step)
    found = aim_and_meeting(
        question, np.where(known, log_step, 0.0)[:, None, None], np.zeros((1, 1, 1))
    )
    return np.where(known, weighed(question, *found)[:, 0, 0], np.inf)


def missed(question: OpenChoice, step_s: Floats, chosen: int | None) -> bool:
    """Does the choice miss the constraint, or is there none?"""
    if chosen is None:
        return True
    _, meeting = aim_and_meeting(
        question, np.log(step_s[question.places])[:, None, None], np.zeros((1, 1, 1))
    )
    return meeting is not None and bool(misses(question, meeting.chance)[chosen, 0, 0])


@dataclass(slots=True, kw_only=True)
class Bill:
    """Dollars for launches one after another. Runs on the machines of those before them need no start of their own."""

    costs: Costs
    usd: float = 0.0
    _cluster: Cluster | None = None
    _seconds: float = 0.0
    _launch_usd: float = 0.0

    def add(self, cluster: Cluster, run_s: float, *, anew: bool = False) -> None:
        """`run_s` seconds of runs; its start-up where the cluster is another, or where it is acquired `anew`."""
        if anew or cluster != self._cluster:
            self._cluster, self._seconds, self._launch_usd = cluster, 0.0, 0.0
        self._seconds += run_s
        now = self.costs.billed_s(self._seconds) / 3600 * (cluster.total_usd_per_hour or 0.0)
        self.usd += now - self._launch_usd
        self._launch_usd = now


def replay(
    ground: Ground, policy: Policy, costs: Costs, *, before_usd: float = 0.0
) -> pd.DataFrame:
    """Buy as `policy` says until it stops. Columns usd, runs, regret (mean over the questions), missed (part of them).

    The first row is what it would choose with nothing bought; `before_usd` was spent before.
    """
    bill, bought = Bill(costs=costs, usd=before_usd), 0
    curve = [_row(ground, policy, bill.usd, bought)]
    while (purchase := policy.next()).cluster is not None:
        runs = [
            measurement_of(ground.setups[at], float(ground.step_s[at]), costs)
            for at in purchase.places
        ]
        bill.add(purchase.cluster, in_order(purchase.cluster, runs)[1], anew=purchase.anew)
        for place in purchase.places:
            policy.tell(place, float(ground.step_s[place]))
        bought += len(purchase.places)
        curve.append(_row(ground, policy, bill.usd, bought))
    return pd.DataFrame(curve)


def _row(ground: Ground, policy: Policy, usd: float, runs: int) -> dict[str, float]:
    pairs = list(zip(ground.questions, policy.choices(), strict=True))
    lost, failed = (
        np.mean([of(one, ground.step_s, chosen) for one, chosen in pairs])
        for of in (regret, missed)
    )
    return {"usd": usd, "runs": runs, "regret": float(lost), "missed": float(failed)}


def usd_until(curve: pd.DataFrame, most: float) -> float:
    """Dollars after which the mean regret is at most `most` and stays so; infinite where it never does."""
    above = np.flatnonzero(curve["regret"].to_numpy() > most)
    first = int(above[-1]) + 1 if len(above) else 0
    return float(curve["usd"].iloc[first]) if first < len(curve) else float("inf")


def at_dollars(curve: pd.DataFrame, usd: Sequence[float]) -> list[float]:
    """Mean regret once so many dollars are spent: that of the last row that they pay for (the first row's before)."""
    spent = curve["usd"].to_numpy()
    return [
        float(
            curve["regret"].iloc[
                max(0, int(np.searchsorted(spent, one * _EXACT, side="right")) - 1)
            ]
        )
        for one in usd
    ]


Places = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

# Rows of each other workload that the model of a replay learns from: all of them take four times as long to fit.
_MOST_OF_OTHERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The belief about log step of a ground's setups; `known` ones are measured already, which cost `usd`."""

    mean: Floats
    covariance: Floats
    noise: Floats
    known: tuple[int, ...]
    usd: float


def one_device(runs: pd.DataFrame, devices: dict[str, int]) -> BoolArray:
    """Mask of the rows of one device."""
    return np.asarray(read_setups(runs, devices).ranks == 1)


def start(
    data: TrainingData,
    ground: Ground,
    devices: dict[str, int],
    *,
    costs: Costs,
    usd: dict[str, float],
    given: bool,
    seed: int,
) -> Start:
    """The model of all other workloads, and of this one's single device.

    Its single-device rows and profiles are `given`; else none of it is known and 4 of those rows on the cheapest
    machine that has them are bought, by one launch. Other workloads are thinned to 300 rows, drawn by `seed`. Raises
    ValueError where the workload has no row of one device to begin with.
    """
    runs = data.runs.reset_index(drop=True)
    mine = (runs["workload"] == ground.workload).to_numpy()
    alone: Places = np.flatnonzero(mine & one_device(runs, devices))
    bill = Bill(costs=costs)
    if not given:
        alone = _profile(runs, alone, usd)
        bought = measured_setups(runs.iloc[alone], devices, usd)
        for setup, step_s in zip(bought.setups, bought.step_s, strict=True):
            bill.add(setup.cluster, measurement_of(setup, float(step_s), costs).est_s)
    random = np.random.default_rng(seed)
    kept = [alone]
    for name in sorted(set(runs["workload"].astype(str)) - {ground.workload}):
        own = np.flatnonzero((runs["workload"] == name).to_numpy())
        kept.append(random.choice(own, min(len(own), _MOST_OF_OTHERS), replace=False))
    learned = _without(data, ground.workload) if not given else data
    learned = replace(learned, runs=runs.iloc[np.sort(np.concatenate(kept))])
    model = fit(replace(learned, instance_types=described(learned, ground.rows)), seed=seed)
    mean, covariance, noise = model.joint(ground.rows)
    known = np.flatnonzero(one_device(ground.rows, devices)) if given else np.zeros(0, dtype=int)
    return Start(
        mean=mean, covariance=covariance, noise=noise, known=tuple(map(int, known)), usd=bill.usd
    )


def _profile(runs: pd.DataFrame, alone: Places, usd: dict[str, float]) -> Places:
    """A few batches over the range of one machine's single-device rows, its smallest and largest among them."""
    if not len(alone):
        raise ValueError("no row of one device to begin with")
    own = runs.iloc[alone]
    cheapest = min(sorted(set(own["cluster"].astype(str))), key=lambda name: usd[name[2:]])
    own = own[own["cluster"] == cheapest]
    order = own["batch_per_device"].astype(float).sort_values(kind="stable").index.to_numpy()
    return np.unique(order[np.linspace(0, len(order) - 1, PROFILE_BATCHES).round().astype(int)])


def _without(data: TrainingData, workload: str) -> TrainingData:
    """The same data without the profiles of a workload."""

    def others(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["workload"] != workload] if "workload" in frame else frame

    return replace(data, profiles=others(data.profiles), buckets=others(data.buckets))

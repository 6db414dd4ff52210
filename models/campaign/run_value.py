"""The value of a training run beside all that is known and planned.

    value = 100 x expected fall of regret                                 the model knows the run
    value = sum_f w_f / (1 + n_f) x 0.7 [off batch] x 4 [drifting type]   otherwise

n_f counts measured and planned runs that share feature f: cluster, workload on cluster, mixture of
machines, batch, machine. A model knows a run if it has met its workload, mode and instance types;
the fall of regret is that of `value_of_information.py`. Within a launch a run loses the share that
planned runs show of it; between launches the belief is narrowed by the planned runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import column, mode_of, modes_of, row_key, rows_of, setup_key, types_of
from .candidates import Model, PlannedRun, Trained
from .value_of_information import Belief, ChoiceSet, Floats, OpenChoice, RunValues, run_values

Feature = tuple[Any, ...]
Profile = tuple[Trained, str]  # workload in its mode, instance type

_STEADY = 0.1  # interquartile range over median of the steps, below which one run is enough
_ENOUGH_FAILURES = 2
_ENOUGH_RUNS = 3  # of an unsteady setup: more would repeat the noise
_OFF_BATCH = 0.7  # value of a run off the global batch or with accumulation, seldom recommended
_DRIFTED = 4.0  # value of a run on a drifting type, whose predictions are wrong
_WEIGHTS = {
    "cluster": 0.75,
    "workload and cluster": 1.0,
    "workload and mixture": 1.5,  # machines and types: uniform clusters are few among the mixed
    "workload and batch": 1.0,
    "workload and machine": 1.0,  # shared among a cluster's types
}
_PROBED_SIZES = 4  # message sizes that make a sweep
# A run that saves 1 % of regret counts as one new feature: pilots of a new workload, of which ten
# bring its regret of tens of per cent down, then compete with better known choices.
_REGRET_VALUE = 100.0
_MOST_RUNS = 250  # of one workload that are valued
_MOST_FRESH = 300  # measured since the model was fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Marts of one provider's launches, or empty frames.

    Measurements from before `stale_before`, or on a `drifting` type up to its time, count as
    unknown.
    """

    runs: pd.DataFrame
    profiles: pd.DataFrame
    probes: pd.DataFrame
    failures: pd.DataFrame = field(default_factory=pd.DataFrame)
    drifting: Mapping[str, datetime] = field(default_factory=dict)
    stale_before: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadValues:
    """Regret that runs of one workload save.

    `places` of runs, and `taken` by planned ones, are positions in `belief` and `values`.
    """

    questions: Sequence[OpenChoice]
    belief: Belief
    places: Mapping[PlannedRun, int]
    values: RunValues
    alike: Floats
    taken: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, questions: Sequence[OpenChoice], belief: Belief, places: Mapping[PlannedRun, int]
    ) -> WorkloadValues:
        return cls(
            questions=questions,
            belief=belief,
            places=places,
            values=run_values(questions, belief, list(places.values())),
            alike=belief.alike(),
        )

    def saves(self, run: PlannedRun) -> float:
        """Return the regret that `run` saves beside the planned ones; 0 for one not valued."""
        if run not in self.places:
            return 0.0
        place = self.places[run]
        return float(self.values.regret[place] * np.prod(1 - self.alike[place, list(self.taken)]))

    def revalued(self) -> WorkloadValues:
        """Narrow the belief by the planned runs, and value again what had any value."""
        if not self.taken:
            return self
        belief = self.belief
        for place in self.taken:
            belief = belief.given(place)
        left = {
            run: place
            for run, place in self.places.items()
            if self.values.regret[place] > 0 and place not in self.taken
        }
        return WorkloadValues.of(self.questions, belief, left)


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What measured and planned runs show.

    `done` are kinds and identities (`_identity`) of runs that are not bought again; `wanted` are
    the profiles to buy, in order. The `model` has no drifting types and none with stale runs only.
    """

    wanted: list[Profile]
    drifting: Mapping[str, datetime]
    done: set[tuple[str, Any]] = field(default_factory=set)
    seen: Counter[Feature] = field(default_factory=Counter)
    ties: Mapping[PlannedRun, float] = field(default_factory=dict)
    model: Model | None = None
    values: dict[str, WorkloadValues] = field(default_factory=dict)

    @classmethod
    def of(cls, past: Past, wanted: Sequence[Profile], devices: Mapping[str, int]) -> Knowledge:
        """Count the past; `devices` are those of an instance type, for rows without a layout.

        Unsteady and stale runs may be repeated; a setup that failed twice may not.
        """
        known = cls(wanted=list(wanted), drifting=past.drifting)
        before = pd.to_datetime(past.stale_before or datetime.min, utc=True)
        drifted = {name: pd.to_datetime(at, utc=True) for name, at in past.drifting.items()}
        times: Counter[tuple[str, Any]] = Counter()
        for row, at in zip(rows_of(past.runs), _measured_at(past.runs), strict=True):
            names = types_of(str(row["cluster"]))
            if any(name in drifted and not at > drifted[name] for name in names):
                continue
            identity = _identity(row | {"kind": "train"}, devices)
            workload, mode, machines, steps = identity[1]
            times[identity] += 1
            batch = steps * sum(count * share for _, count, share in machines)
            known.seen.update(_features((workload, mode), names, batch, steps))
            unsteady = float(row.get("step_spread") or 0.0) > _STEADY  # NaN: taken for steady
            stale = at < before
            if not stale and (not unsteady or times[identity] >= _ENOUGH_RUNS):
                known.done.add(identity)
        if len(past.profiles):
            trained = zip(past.profiles["workload"], modes_of(past.profiles), strict=True)
            profiles = zip(trained, past.profiles["instance_type"], strict=True)
            known.done.update(("profile", profile) for profile in profiles)
        for name, rows in past.probes.groupby("cluster") if len(past.probes) else ():
            if rows["bytes"].nunique() >= _PROBED_SIZES:
                known.done.add(("probe", parse_cluster(str(name))))
        failures = Counter(_identity(row, devices) for row in rows_of(past.failures))
        known.done.update(one for one, count in failures.items() if count >= _ENOUGH_FAILURES)
        return known

    def learn(
        self, model: Model, runs: Iterable[PlannedRun], past: Past, devices: Mapping[str, int]
    ) -> None:
        """Value `runs` that `model` knows."""
        types = model.types - past.drifting.keys() - stale_types(past.runs, past.stale_before)
        self.model = replace(model, types=types)
        fresh = [
            row
            for row in rows_of(model.fresh)
            if self.model.knows((row["workload"], mode_of(row)), types_of(row["cluster"]))
        ]
        for name, choice_set in model.choice_set.items():
            mine = [run for run in runs if run.workload == name and self._knows(run)]
            new = [row for row in fresh if row["workload"] == name][-_MOST_FRESH:]
            self.values[name] = _valued(choice_set, mine, model, devices, new)

    def _knows(self, run: PlannedRun) -> bool:
        return self.model is not None and self.model.knows(run.trained, run.members)

    def is_modelled(self, run: PlannedRun) -> bool:
        return run.workload in self.values and self._knows(run)

    def unprofiled(self, types: Iterable[str]) -> list[Profile]:
        return [
            pair for pair in self.wanted if pair[1] in types and ("profile", pair) not in self.done
        ]

    def explores(self, members: tuple[str, ...]) -> bool:
        """True if collectives are to be timed: no sweep, and no model knows these types."""
        known = self.model is not None and self.model.types.issuperset(members)
        return not known and ("probe", members) not in self.done

    def value(self, run: PlannedRun) -> float:
        """Return the value of a training run; equals are ordered by `ties`."""
        if self.is_modelled(run):
            return _REGRET_VALUE * self.values[run.workload].saves(run)
        value = 0.0
        for feature in _features_of(run):
            shares = len(set(run.members)) if feature[0] == "workload and machine" else 1
            value += _WEIGHTS[feature[0]] / shares / (1 + self.seen[feature])
        if not run.exact or run.accumulation_steps > 1:
            value *= _OFF_BATCH
        if not self.drifting.keys().isdisjoint(run.members):
            value *= _DRIFTED
        return value * (1 + 0.01 * self.ties.get(run, 0.0))

    def add(self, run: PlannedRun) -> None:
        """Count a planned run as if it were measured."""
        if run.kind != "train":
            profile = run.trained, run.members[0]
            self.done.add((run.kind, profile if run.kind == "profile" else run.members))
            return
        self.seen.update(_features_of(run))
        values = self.values.get(run.workload)
        if values is not None and run in values.places:
            taken = (*values.taken, values.places[run])
            self.values[run.workload] = replace(values, taken=taken)

    def copy(self) -> Knowledge:
        return replace(self, done=set(self.done), seen=self.seen.copy(), values=dict(self.values))

    def revalue(self) -> None:
        self.values = {name: values.revalued() for name, values in self.values.items()}

    def reason(self, run: PlannedRun) -> str:
        """Explain why `run` is planned."""
        if run.kind != "train":
            return f"no {run.kind} of {run.label or run.cluster} yet"
        if self.is_modelled(run):
            values, place = self.values[run.workload].values, self.values[run.workload].places[run]
            return (
                f"expected to change the choice of {values.question[place]} in"
                f" {values.chance[place]:.0%} of outcomes and to save {values.regret[place]:.1%}"
            )
        drifted = sorted(self.drifting.keys() & set(run.members))
        return f"{' and '.join(drifted)} drifted" if drifted else "not known well yet"


def _identity(row: Mapping[str, Any], devices: Mapping[str, int]) -> tuple[str, Any]:
    """Return the kind of a run, and the setup, the profile or the machines of a sweep."""
    kind, members = str(row["kind"]), types_of(str(row["cluster"]))
    if kind == "train":
        return kind, row_key(row, devices)
    trained = str(row["workload"]), mode_of(row)
    return kind, (trained, members[0]) if kind == "profile" else members


def _features_of(run: PlannedRun) -> list[Feature]:
    return _features(run.trained, run.members, run.global_batch, run.accumulation_steps)


def _features(trained: Trained, members: Sequence[str], batch: int, steps: int) -> list[Feature]:
    cluster = "+".join(sorted(members))
    return [
        ("cluster", cluster),
        ("workload and cluster", trained, cluster),
        ("workload and mixture", trained, len(members), len(set(members))),
        ("workload and batch", trained, batch, steps),
        *(("workload and machine", trained, name) for name in sorted(set(members))),
    ]


def _valued(
    choice_set: ChoiceSet,
    runs: Sequence[PlannedRun],
    model: Model,
    devices: Mapping[str, int],
    fresh: Sequence[Mapping[str, Any]],
) -> WorkloadValues:
    """Value the runs of the choice set, then the shortest on the fewest machines."""
    keys = {setup_key(setup) for setup in choice_set.setups}

    def order(run: PlannedRun) -> tuple[bool, float, str]:
        is_other = row_key(run.row(), devices) not in keys
        return is_other, run.est_s * len(run.members), run.cluster

    valued = sorted(runs, key=order)[:_MOST_RUNS] if choice_set.questions else []
    if not valued:
        nothing = Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), noise=np.zeros(0))
        return WorkloadValues.of((), nothing, {})
    rows = [*(setup.row() for setup in choice_set.setups), *(run.row() for run in valued), *fresh]
    frame = pd.DataFrame(rows).drop(columns=["step_s", "sync_s"], errors="ignore")
    belief = Belief(*model.joint(frame))
    first = len(choice_set.setups)
    for place, row in enumerate(fresh, start=first + len(valued)):
        belief = belief.given(place, float(np.log(row["step_s"])))
    places = {run: place for place, run in enumerate(valued, start=first)}
    return WorkloadValues.of(choice_set.questions, belief, places)


def _measured_at(runs: pd.DataFrame) -> pd.Series[Any]:
    """Return when each run was measured, NaT if that is unknown."""
    return pd.to_datetime(column(runs, "measured_at", None), utc=True)


def stale_types(runs: pd.DataFrame, before: datetime | None) -> frozenset[str]:
    """Return instance types of which every run with a known time is from before `before`."""
    if before is None or not len(runs):
        return frozenset()
    types = runs["cluster"].map(parse_cluster)
    timed = pd.DataFrame({"type": types, "at": _measured_at(runs)}).explode("type")
    newest = timed.groupby("type")["at"].max()
    return frozenset(newest.index[newest < pd.to_datetime(before, utc=True)])

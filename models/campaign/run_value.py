"""Compute the value of a training run, given all measured and planned runs.

    value = 100 x expected decrease of regret    if the model can predict the run
    value = sum over f of 1 / (1 + n_f)          if the model cannot predict the run

Regret is the loss from a wrong choice (`value_of_information.py`). A model can predict a run if it
was trained on the run's workload and mode, and knows the run's instance types.

f is a feature of the run, and n_f the number of measured and planned runs with the same feature. A
run has four features:

- its cluster
- its workload, mode and cluster
- its workload, mode, number of machines and number of instance types
- its workload, mode, global batch and number of accumulation steps

Planned runs lower the value of similar runs. Suppose that the model can predict two runs a and b of
a workload. If a is planned, the value of b is multiplied by 1 - rho^2. rho is the correlation of
the log step times that a and b will measure. After each planned launch, the decreases of regret are
computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from ..domain.setup_table import column, mode_of, row_key, rows_of, setup_key, types_of
from ..domain.workload import label
from .candidates import Model, PlannedRun, features_of
from .value_of_information import Belief, ChoiceSet, OpenChoice, run_values

Feature = tuple[Any, ...]

_ENOUGH_FAILURES = 2  # a run that failed this often is not bought again
_PROBED_SIZES = 4  # a probe (a sweep of all-reduces) with this many message sizes is complete
# A run that lowers regret by 1 % is worth as much as a run with a single new feature.
_REGRET_VALUE = 100.0
_MOST_RUNS = 250  # values are computed for at most this many runs of a workload
_MOST_FRESH = 300  # at most this many new runs of a workload update the model's predictions


@dataclass(frozen=True, kw_only=True)
class Past:
    """The measurements of one provider so far.

    - `runs`, `profiles`, `probes`, `failures`: rows of the warehouse's marts, or empty frames.
    - `stale_before`: training runs that were measured before this time are ignored.
    - `drifting`: {instance type that drifts: time of the newest run that was tested for drift}.
      Training runs that were measured on the type up to this time are ignored.

    An instance type drifts if too many of its new runs lie outside their predicted intervals.
    """

    runs: pd.DataFrame
    profiles: pd.DataFrame
    probes: pd.DataFrame
    failures: pd.DataFrame = field(default_factory=pd.DataFrame)
    drifting: Mapping[str, datetime] = field(default_factory=dict)
    stale_before: datetime | None = None


class WorkloadValues(NamedTuple):
    """The values of one workload's runs: how much each run is expected to lower regret.

    Regret is the loss from a wrong choice.

    Attributes:
        questions: the goals of the workload, each with the setups that compete for it.
        belief: the joint normal distribution of the log step times of n setups.
        places: {run: the position of its setup in `belief` and `regret`}.
        regret: an (n,) array: how much a run of each of the n setups is expected to lower regret.
    """

    questions: Sequence[OpenChoice]
    belief: Belief
    places: Mapping[PlannedRun, int]
    regret: FloatArray

    def after(self, run: PlannedRun) -> WorkloadValues:
        """Return the values of all runs after `run` has been planned.

        The value of `run` becomes 0. The value of each other run is multiplied by 1 - rho^2. rho is
        the correlation of the log step times that the two runs will measure.
        """
        place = self.places[run]
        alike = (self.belief.mean_shift([place])[0] / self.belief.outcome_sd) ** 2
        regret = self.regret * np.clip(1 - alike, 0.0, 1.0)
        regret[place] = 0.0
        return self._replace(belief=self.belief.given(place), regret=regret)

    def recompute(self) -> WorkloadValues:
        """Return the values with `regret` computed again from `belief`."""
        # Planned runs never raise a value, so runs whose value is 0 are skipped.
        left = [place for place in self.places.values() if self.regret[place] > 0]
        return self._replace(regret=run_values(self.questions, self.belief, left))


@dataclass(kw_only=True)
class Knowledge:
    """The information from measured and planned runs that determines the value of further runs.

    Attributes:
        done: the keys (see `_identity`) of runs that are not bought again: measured runs, planned
            profiles and probes, and runs that failed twice.
        doubted: instance types whose predictions are not used. They drift (see `Past`), or all
            their runs are too old.
        seen: {hash of a feature: number of measured and planned runs that have the feature}. The
            docstring of the module defines the four features of a run.
        model: the predictions of the model in use; None if there is no model.
        values: for each workload, the values of the runs that the model can predict.
    """

    done: set[Feature]
    doubted: frozenset[str]
    seen: Counter[int]
    model: Model | None = None
    values: dict[str, WorkloadValues] = field(default_factory=dict)

    @classmethod
    def of(cls, past: Past, devices: Mapping[str, int]) -> Knowledge:
        """Build the knowledge from past measurements.

        `devices` has the number of devices of each instance type. A run that failed twice is not
        bought again.
        """
        done, seen = set[Feature](), Counter[int]()
        before = pd.to_datetime(past.stale_before or datetime.min, utc=True)
        drifted = {name: pd.to_datetime(at, utc=True) for name, at in past.drifting.items()}
        measured_at = pd.to_datetime(column(past.runs, "measured_at", None), utc=True)
        stale, fresh = set[str](), set[str]()
        for row, at in zip(rows_of(past.runs), measured_at, strict=True):
            names = types_of(row["cluster"])
            # a run without a time (NaT) is not stale, because comparisons with NaT are False
            if at <= max(before, *(drifted.get(name, before) for name in names)):
                stale.update(names)
                continue
            fresh.update(names)
            key = row_key(row, devices)
            seen.update(features_of(key))
            done.add(("train", key))
        for row in rows_of(past.profiles):
            profile = row | {"kind": "profile", "cluster": f"1x{row['instance_type']}"}
            done.add(_identity(profile, devices))
        for cluster, rows in past.probes.groupby("cluster") if len(past.probes) else ():
            if rows["bytes"].nunique() >= _PROBED_SIZES:
                done.add(("probe", types_of(cluster)))
        failures = Counter(_identity(row, devices) for row in rows_of(past.failures))
        done.update(key for key, count in failures.items() if count >= _ENOUGH_FAILURES)
        return cls(done=done, doubted=frozenset(stale - fresh | drifted.keys()), seen=seen)

    def learn(self, model: Model, runs: Iterable[PlannedRun]) -> None:
        """Store `model`, and compute the values of all `runs` that it can predict."""
        self.model = model = model._replace(types=model.types - self.doubted)
        known = [run for run in runs if model.knows(run.trained, run.members)]
        for name, choice_set in model.choice_set.items():
            mine = [run for run in known if run.workload == name]
            new = [
                row
                for row in rows_of(model.fresh)
                if row["workload"] == name
                and model.knows((name, mode_of(row)), types_of(row["cluster"]))
            ]
            if mine and choice_set.questions:
                self.values[name] = _values_of(choice_set, mine, model, new[-_MOST_FRESH:])

    def saves(self, run: PlannedRun) -> float | None:
        """Return by how much `run` is expected to lower regret.

        The planned runs are assumed to be measured before `run`. Regret is the loss from a wrong
        choice. Returns None if the model cannot predict `run`.
        """
        if self.model is None or not self.model.knows(run.trained, run.members):
            return None
        values = self.values.get(run.workload)
        if values is None or run not in values.places:
            return 0.0
        return float(values.regret[values.places[run]])

    def needs(self, run: PlannedRun) -> bool:
        """Return True if `run` is still needed: it is neither measured nor planned.

        A probe (a sweep of all-reduces) is not needed if the model can predict all its instance
        types.
        """
        known = self.model is not None and self.model.types.issuperset(run.members)
        return _identity(run.row(), {}) not in self.done and not (run.kind == "probe" and known)

    def value(self, run: PlannedRun) -> float:
        """Return the value of the training run `run` (see the module's docstring)."""
        saved = self.saves(run)
        if saved is None:
            return sum(1 / (1 + self.seen.get(feature, 0)) for feature in run.features)
        return _REGRET_VALUE * saved

    def add(self, run: PlannedRun) -> None:
        """Count the planned `run` as if it had been measured."""
        if run.kind != "train":
            self.done.add(_identity(run.row(), {}))
            return
        self.seen.update(run.features)
        values = self.values.get(run.workload)
        if values is not None and run in values.places:
            self.values[run.workload] = values.after(run)

    def copy(self) -> Knowledge:
        return replace(self, done=set(self.done), seen=self.seen.copy(), values=dict(self.values))

    def revalue(self, workloads: Iterable[str]) -> None:
        """Compute the run values of `workloads` again, after further runs were planned."""
        for name in self.values.keys() & set(workloads):
            self.values[name] = self.values[name].recompute()

    def reason(self, run: PlannedRun) -> str:
        """Return a text that explains why `run` is planned."""
        if run.kind != "train":
            return f"no {run.kind} of {label(*run.trained) or run.cluster} yet"
        saved = self.saves(run)
        if saved is None:
            return "little is known about this setup"
        return f"may change a choice for {run.workload}; expected to save {saved:.1%}"


def _identity(row: Mapping[str, Any], devices: Mapping[str, int]) -> Feature:
    """Return a key that is equal for runs that measure the same thing.

    The key has the kind of run, and what the run measures:

    - training run: the setup
    - profile: the workload, the mode and the instance type
    - other kinds: the instance types of the machines

    devices: {instance type: number of devices}, for rows without a `layout`. The layout is the
        number of devices used on each machine, such as `4+4+2`.
    """
    kind, members = row["kind"], types_of(row["cluster"])
    if kind == "train":
        return kind, row_key(row, devices)
    trained = row["workload"], mode_of(row)
    return kind, (trained, members[0]) if kind == "profile" else members


def _values_of(
    choice_set: ChoiceSet,
    runs: Sequence[PlannedRun],
    model: Model,
    fresh: Sequence[Mapping[str, Any]],
) -> WorkloadValues:
    """Return the values of `runs`, which are runs of one workload that `model` can predict.

    At most 250 runs (_MOST_RUNS) get a value. Runs of setups in `choice_set` have priority.
    Among the rest, runs with fewer machine-seconds have priority.

    fresh: rows of measured runs that the model was not trained on, with a column `step_s`. They
        update the model's predictions.
    """
    keys = {setup_key(setup) for setup in choice_set.setups}

    def order(run: PlannedRun) -> tuple[bool, float, str]:
        return run.key not in keys, run.est_s * len(run.members), run.cluster

    valued = sorted(runs, key=order)[:_MOST_RUNS]
    rows = [*(setup.row() for setup in choice_set.setups), *(run.row() for run in valued), *fresh]
    belief = Belief(*model.joint(pd.DataFrame(rows)))
    first = len(choice_set.setups)
    for place, row in enumerate(fresh, start=first + len(valued)):
        belief = belief.given(place, np.log(row["step_s"]))
    places = {run: place for place, run in enumerate(valued, start=first)}
    unknown = np.ones(len(belief.mean))
    return WorkloadValues(choice_set.questions, belief, places, regret=unknown).recompute()

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import Key, mode_of, modes_of, row_key, rows_of, setup_key
from .candidates import Expected, PlannedRun, Trained
from .value_of_information import Belief, ChoiceSet, Floats, RunValues, run_values

Feature = tuple[Any, ...]
Profile = tuple[Trained, str]  # workload in its mode, instance type
# setups -> mean, covariance, noise of log step
Joint = Callable[[pd.DataFrame], tuple[Floats, Floats, Floats]]

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
class Model:
    """The champion: the open choices of each workload it has met, and joint step times.

    `workloads` and `types` are those it has met, `fresh` runs (with step_s) are new to it;
    `expected_step` predicts setups, NaN where it cannot.
    """

    choice_set: Mapping[str, ChoiceSet]
    joint: Joint
    workloads: frozenset[Trained]
    types: frozenset[str]
    fresh: pd.DataFrame
    expected_step: Expected | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadValues:
    """Regret that runs of one workload save.

    `places` of runs, and `taken` by planned ones, are in `belief`; `regret` is by place.
    """

    choice_set: ChoiceSet
    belief: Belief
    places: Mapping[PlannedRun, int]
    values: RunValues
    regret: Floats
    alike: Floats
    taken: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, choice_set: ChoiceSet, belief: Belief, places: Mapping[PlannedRun, int]
    ) -> WorkloadValues:
        at = list(places.values())
        values = run_values(choice_set.questions, belief, at)
        regret = np.zeros(len(belief.mean))
        regret[at] = values.regret
        return cls(
            choice_set=choice_set,
            belief=belief,
            places=places,
            values=values,
            regret=regret,
            alike=belief.alike(),
        )

    def saves(self, run: PlannedRun) -> float:
        """Return the regret that `run` saves beside the planned ones; 0 for one not valued."""
        place = self.places.get(run)
        if place is None:
            return 0.0
        return float(self.regret[place] * np.prod(1 - self.alike[place, list(self.taken)]))

    def revalued(self) -> WorkloadValues:
        """Narrow the belief by the planned runs, and value again what had any value."""
        belief = self.belief
        for place in self.taken:
            belief = belief.given(place)
        left = {
            run: at
            for run, at in self.places.items()
            if self.regret[at] > 0 and at not in self.taken
        }
        return WorkloadValues.of(self.choice_set, belief, left)


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """What measured and planned runs show; `wanted` are the profiles to buy, in order."""

    settled: set[Key]
    wanted: list[Profile]
    profiled: set[Profile]
    probed: set[tuple[str, ...]]
    seen: Counter[Feature]
    drifting: Mapping[str, datetime]
    ties: Mapping[PlannedRun, float] = field(default_factory=dict)
    types: frozenset[str] = frozenset()  # that the model knows
    trained: frozenset[Trained] = frozenset()
    values: dict[str, WorkloadValues] = field(default_factory=dict)

    @classmethod
    def of(cls, past: Past, wanted: Sequence[Profile], devices: Mapping[str, int]) -> Knowledge:
        """Count the past; `devices` are those of an instance type, for rows without a layout.

        Unsteady and stale runs may be repeated; a setup that failed twice may not.
        """
        known = cls(
            settled=set(),
            wanted=list(wanted),
            profiled=set(),
            probed=set(),
            seen=Counter(),
            drifting=past.drifting,
        )
        before = None if past.stale_before is None else _aware(past.stale_before)
        times: Counter[Key] = Counter()
        for row in rows_of(past.runs):
            key = row_key(row, devices)
            workload, mode, machines, steps = key
            names, at = [name for name, _, _ in machines], _moment(row.get("measured_at"))
            drifts = [_aware(past.drifting[name]) for name in names if name in past.drifting]
            if any(at is None or at <= drifted for drifted in drifts):
                continue
            times[key] += 1
            batch = steps * sum(count * share for _, count, share in machines)
            known.seen.update(_features((workload, mode), names, batch, steps))
            stale = at is not None and before is not None and at < before
            unsteady = float(row.get("step_spread") or 0.0) > _STEADY  # NaN: taken for steady
            if not stale and (not unsteady or times[key] >= _ENOUGH_RUNS):
                known.settled.add(key)
        if len(past.profiles):
            trained = zip(past.profiles["workload"], modes_of(past.profiles), strict=True)
            known.profiled.update(zip(trained, past.profiles["instance_type"], strict=True))
        for name, rows in past.probes.groupby("cluster") if len(past.probes) else ():
            if rows["bytes"].nunique() >= _PROBED_SIZES:
                known.probed.add(parse_cluster(str(name)))
        failures: Counter[tuple[str, Any]] = Counter()
        for row in rows_of(past.failures):
            failures[_attempted(row, devices)] += 1
        hopeless = [one for one, count in failures.items() if count >= _ENOUGH_FAILURES]
        known.settled.update(identity for kind, identity in hopeless if kind == "train")
        known.profiled.update(identity for kind, identity in hopeless if kind == "profile")
        known.probed.update(identity for kind, identity in hopeless if kind == "probe")
        return known

    def learn(
        self, model: Model, runs: Iterable[PlannedRun], past: Past, devices: Mapping[str, int]
    ) -> None:
        """Value `runs` that `model` knows; drifting types, and those with stale runs only, are
        unknown.
        """
        self.types = model.types - past.drifting.keys() - stale_types(past.runs, past.stale_before)
        self.trained = model.workloads
        fresh = [row for row in rows_of(model.fresh) if self._knows_row(row)]
        for name, choice_set in model.choice_set.items():
            mine = [run for run in runs if run.workload == name and self._knows(run)]
            new = [row for row in fresh if row["workload"] == name][-_MOST_FRESH:]
            self.values[name] = _valued(choice_set, mine, model.joint, devices, new)

    def _knows_row(self, row: Mapping[str, Any]) -> bool:
        trained = str(row["workload"]), mode_of(row)
        return trained in self.trained and self.types.issuperset(parse_cluster(str(row["cluster"])))

    def _knows(self, run: PlannedRun) -> bool:
        return run.trained in self.trained and self.types.issuperset(run.members)

    def is_modelled(self, run: PlannedRun) -> bool:
        return run.workload in self.values and self._knows(run)

    def unprofiled(self, types: Iterable[str]) -> list[Profile]:
        return [pair for pair in self.wanted if pair[1] in types and pair not in self.profiled]

    def explores(self, members: tuple[str, ...]) -> bool:
        """True if collectives are to be timed: no model knows these instance types."""
        return not self.types.issuperset(members)

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
        if run.kind == "profile":
            self.profiled.add((run.trained, run.members[0]))
        elif run.kind == "probe":
            self.probed.add(run.members)
        else:
            self.seen.update(_features_of(run))
            if self.is_modelled(run) and run in self.values[run.workload].places:
                values = self.values[run.workload]
                taken = (*values.taken, values.places[run])
                self.values[run.workload] = replace(values, taken=taken)

    def copy(self) -> Knowledge:
        return replace(
            self,
            profiled=set(self.profiled),
            probed=set(self.probed),
            seen=self.seen.copy(),
            values=dict(self.values),
        )

    def revalue(self) -> None:
        self.values = {
            name: values.revalued() if values.taken else values
            for name, values in self.values.items()
        }

    def reason(self, run: PlannedRun) -> str:
        """Explain why `run` is planned."""
        if run.kind != "train":
            return f"no {run.kind} of {run.label or run.cluster} yet"
        if self.is_modelled(run):
            values = self.values[run.workload]
            at = list(values.places).index(run)
            return (
                f"expected to change the choice of {values.values.question[at]} in"
                f" {values.values.chance[at]:.0%} of outcomes and to save"
                f" {values.values.regret[at]:.1%}"
            )
        drifted = sorted(self.drifting.keys() & set(run.members))
        return f"{' and '.join(drifted)} drifted" if drifted else "not known well yet"


def _attempted(row: Mapping[str, Any], devices: Mapping[str, int]) -> tuple[str, Any]:
    """Return the kind and identity of a failed run."""
    kind, members = str(row["kind"]), parse_cluster(str(row["cluster"]))
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
    joint: Joint,
    devices: Mapping[str, int],
    fresh: Sequence[Mapping[str, Any]],
) -> WorkloadValues:
    """Value the runs of the choice set, then the shortest on the fewest machines."""
    keys = {setup_key(setup) for setup in choice_set.setups}

    def order(run: PlannedRun) -> tuple[bool, float, str]:
        row = run.row()
        return row_key(row, devices) not in keys, run.est_s * len(run.members), run.cluster

    valued = sorted(runs, key=order)[:_MOST_RUNS] if choice_set.questions else []
    if not valued:
        nothing = Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), noise=np.zeros(0))
        return WorkloadValues.of(replace(choice_set, questions=()), nothing, {})
    rows = [*(setup.row() for setup in choice_set.setups), *(run.row() for run in valued), *fresh]
    frame = pd.DataFrame(rows).drop(columns=["step_s", "sync_s"], errors="ignore")
    mean, covariance, noise = joint(frame)
    belief = Belief(mean=mean, covariance=covariance, noise=noise)
    first = len(choice_set.setups)
    for at, row in enumerate(fresh, start=first + len(valued)):
        belief = belief.given(at, float(np.log(row["step_s"])))
    places = {run: at for at, run in enumerate(valued, start=first)}
    return WorkloadValues.of(choice_set, belief, places)


def stale_types(runs: pd.DataFrame, before: datetime | None) -> frozenset[str]:
    """Return instance types of which every run with a known time is from before `before`."""
    newest: dict[str, datetime] = {}
    if before is None or "measured_at" not in runs:
        return frozenset()
    for cluster, measured_at in zip(runs["cluster"], runs["measured_at"], strict=True):
        at = _moment(measured_at)
        if at is not None:
            for name in parse_cluster(str(cluster)):
                newest[name] = max(newest.get(name, at), at)
    return frozenset(name for name, at in newest.items() if at < _aware(before))


def _moment(measured_at: Any) -> datetime | None:
    return None if pd.isna(measured_at) else _aware(pd.Timestamp(measured_at).to_pydatetime())


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

"""The value of a run given all that is known: what past runs and the launches already chosen tell.

By how new its features are where no model knows it (`Coverage`), else by the regret that it is expected to save
(`DecisionValue`): within a launch a run loses the share that those before it tell of the same; between launches the
belief is narrowed by what was bought (its outcome unknown) and all is valued again.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import Key, mode_of, row_key, rows_of, setup_key
from ..domain.workload import Workload
from .candidates import Expected, PlannedRun, Trained
from .value_of_information import Belief, ChoiceSet, Floats, RunValues, run_values

_STEADY = 0.1  # interquartile range over median of the steps, below which one run says what there is to say
_ENOUGH_FAILURES = 2
_ENOUGH_RUNS = 3  # of an unsteady setup: more would repeat the noise
_RARELY_NAMED = 0.7  # value of a run off the global batch or with accumulation, which recommendations seldom name
_KNOWN_WIDTH = 0.1  # relative width of an interval at which a run has its plain value
_DRIFTED = 4.0  # value of a run on a drifting machine, whose predictions are wrong however narrow
_WEIGHTS = {
    "cluster": 0.75,
    "workload and cluster": 1.0,
    "workload and mixture": 1.5,  # how many machines of how many types: uniform clusters are few among the mixed
    "workload and batch": 1.0,
    "workload and machine": 1.0,  # shared among a cluster's types, so that more types add no value
}
_PROBED_SIZES = 4  # message sizes that make a sweep
_REGRET_VALUE = 100.0  # a run that saves 1 % of regret counts as much as one new feature: pilots of a new workload,
# of which some ten bring its regret of tens of per cent down, then compete with what betters known choices


Feature = tuple[str, *tuple[str | Trained, ...]]
Joint = Callable[
    [pd.DataFrame], tuple[Floats, Floats, Floats]
]  # setups -> mean, covariance, noise of log step


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What one provider's launches have measured: frames as the marts of their names document, or empty.

    What was measured before `stale_before`, or on a `drifting` instance type up to the time given for it, is known no
    more. `failures` has the kind of what failed, and the columns of runs.
    """

    runs: pd.DataFrame
    profiles: pd.DataFrame
    probes: pd.DataFrame
    failures: pd.DataFrame = field(default_factory=pd.DataFrame)
    drifting: Mapping[str, datetime] = field(default_factory=dict)
    stale_before: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the model in force says: who may be chosen in each workload that it has met, and step times jointly.

    `choice_set` is by workload, over all its modes; `workloads` are those met, each with its mode, and
    `types` the instance types that it has met; `fresh` are runs (with step_s) that it has not learned from;
    `expected_step` predicts setups, NaN where it cannot (None: nobody is asked).
    """

    choice_set: Mapping[str, ChoiceSet]
    joint: Joint
    workloads: frozenset[Trained]
    types: frozenset[str]
    fresh: pd.DataFrame
    expected_step: Expected | None = None


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What past runs and the launches already chosen tell: how often each feature was seen, and what is settled."""

    settled: set[Key]
    profiled: set[tuple[Trained, str]]
    probed: set[tuple[str, ...]]
    workloads: Mapping[Trained, Workload]
    seen: Counter[Feature] = field(default_factory=Counter)
    seed: int = 0
    drifting: Mapping[str, datetime] = field(default_factory=dict)
    decision_value: DecisionValue | None = None

    @classmethod
    def of(
        cls, workloads: Sequence[Workload], past: Past, *, layouts: Mapping[str, int], seed: int
    ) -> Coverage:
        """By the `past`; `layouts` are the devices of an instance type, for rows that do not tell.

        Unsteady and stale runs may be repeated. What has failed twice is settled: it would again, and its time is
        another run's.
        """
        seen: Counter[Feature] = Counter()
        settled: set[Key] = set()
        times: Counter[Key] = Counter()
        for row in rows_of(past.runs):
            key = row_key(row, layouts)
            workload, mode, machines, steps = key
            at, names = row.get("measured_at"), tuple(name for name, _, _ in machines)
            if any(
                name in past.drifting and not measured_after(at, past.drifting[name])
                for name in names
            ):
                continue
            times[key] += 1
            batch = steps * sum(count * share for _, count, share in machines)
            seen.update(_features((workload, mode), names, batch, steps))
            unsteady = (
                float(row.get("step_spread") or 0.0) > _STEADY
            )  # NaN: unknown, taken for steady
            stale = past.stale_before is not None and measured_before(at, past.stale_before)
            if not stale and (not unsteady or times[key] >= _ENOUGH_RUNS):
                settled.add(key)
        sweeps = (
            past.probes.groupby("cluster")["bytes"].nunique()
            if len(past.probes)
            else pd.Series(dtype=int)
        )
        failed = Counter(_attempted(row, layouts) for row in rows_of(past.failures))
        hopeless = [one for one, count in failed.items() if count >= _ENOUGH_FAILURES]
        return cls(
            settled=settled | {key for kind, key in hopeless if kind == "train"},
            profiled={
                (trained_of(row), str(row["instance_type"])) for row in rows_of(past.profiles)
            }
            | {pair for kind, pair in hopeless if kind == "profile"},
            probed={
                parse_cluster(str(name)) for name, sizes in sweeps.items() if sizes >= _PROBED_SIZES
            }
            | {members for kind, members in hopeless if kind == "probe"},
            workloads={(one.name, one.modes[0]): one for one in workloads},
            seen=seen,
            seed=seed,
            drifting=past.drifting,
        )

    def unprofiled(self, instance_types: set[str]) -> list[tuple[Trained, str]]:
        """(workload in its mode, instance type) without a profile, in an order in which each step brings another of both."""
        workloads, types = list(self.workloads), sorted(instance_types)
        pairs = [
            ((w - t) % len(workloads), t, w)
            for w in range(len(workloads))
            for t in range(len(types))
        ]
        ordered = [(workloads[w], types[t]) for _, t, w in sorted(pairs)]
        return [pair for pair in ordered if pair not in self.profiled]

    def explores(self, members: tuple[str, ...]) -> bool:
        """Is there a model yet, and does it know these instance types? Else collectives are timed on them."""
        return self.decision_value is None or not self.decision_value.covers(members)

    def value(self, candidate: PlannedRun) -> float:
        """Worth of a training run beside all that is known: by the choices it may change, where the model knows it.

        Else by how new its features are, at most the sum of the weights times its uncertainty.
        """
        if self.decision_value is not None and self.decision_value.applies_to(candidate):
            return _REGRET_VALUE * self.decision_value.value(candidate)
        features = _features_of(candidate)
        types = len(set(candidate.members))
        shared = {"workload and machine": 1 / types}
        value = sum(
            _WEIGHTS[one[0]] * shared.get(one[0], 1.0) / (1 + self.seen[one]) for one in features
        )
        if not candidate.exact or candidate.accumulation_steps > 1:
            value *= _RARELY_NAMED
        if not self.drifting.keys().isdisjoint(candidate.members):
            value *= _DRIFTED
        elif candidate.width is not None:
            value *= min(max(candidate.width / _KNOWN_WIDTH, 0.25), 4.0)
        return value * (1 + 0.01 * _tie(self.seed, candidate))

    def add(self, candidate: PlannedRun) -> None:
        """Count a chosen run as if it were measured."""
        if candidate.kind == "train":
            self.seen.update(_features_of(candidate))
            if self.decision_value is not None and self.decision_value.applies_to(candidate):
                self.decision_value.add(candidate)
        elif candidate.kind == "profile":
            self.profiled.add((candidate.trained, candidate.members[0]))
        else:
            self.probed.add(candidate.members)

    def copy(self) -> Coverage:
        """An independent copy to try a launch on."""
        return replace(
            self,
            profiled=set(self.profiled),
            probed=set(self.probed),
            seen=self.seen.copy(),
            decision_value=None if self.decision_value is None else self.decision_value.copy(),
        )

    def reason(self, candidate: PlannedRun) -> str:
        """Why to measure this, for a person."""
        if candidate.kind == "profile":
            return f"{candidate.label} was never profiled on {candidate.members[0]}"
        if candidate.kind == "probe":
            return f"no collective was ever timed on {candidate.cluster}"
        where = f"{candidate.label} on {candidate.cluster} at global batch {candidate.global_batch}"
        if candidate.devices == (1,):
            where += " with one device"
        if candidate.accumulation_steps > 1:
            where += f" in {candidate.accumulation_steps} accumulation steps"
        if self.decision_value is not None and self.decision_value.applies_to(candidate):
            return f"{where}: {self.decision_value.reason(candidate)}"
        tail = "" if candidate.exact else ", off its own batch for variety"
        if drifted := sorted(self.drifting.keys() & set(candidate.members)):
            return f"{where}: {' and '.join(drifted)} drifted, recent runs lay outside their intervals{tail}"
        if candidate.width is not None:
            return f"{where}: predicted only within {candidate.width / 2:.0%} either way{tail}"
        if not self.seen["workload and cluster", candidate.trained, candidate.cluster]:
            return f"{where}: never run on this cluster{tail}"
        return f"{where}: not known well at this split{tail}"


def _attempted(row: Mapping[str, Any], layouts: Mapping[str, int]) -> tuple[str, Any]:
    """Kind and identity of what a row of failures was to measure."""
    kind, members = str(row["kind"]), parse_cluster(str(row["cluster"]))
    if kind == "train":
        return kind, row_key(row, layouts)
    return kind, (trained_of(row), members[0]) if kind == "profile" else members


def _features_of(candidate: PlannedRun) -> list[Feature]:
    return _features(
        candidate.trained, candidate.members, candidate.global_batch, candidate.accumulation_steps
    )


def trained_of(row: Mapping[str, Any]) -> Trained:
    """The workload of a measurement row, and how it was trained."""
    return str(row["workload"]), mode_of(row)


def _features(workload: Trained, members: tuple[str, ...], batch: int, steps: int) -> list[Feature]:
    cluster = "+".join(sorted(members))
    return [
        ("cluster", cluster),
        ("workload and cluster", workload, cluster),
        ("workload and mixture", workload, str(len(members)), str(len(set(members)))),
        ("workload and batch", workload, str(batch), str(steps)),
        *(("workload and machine", workload, name) for name in sorted(set(members))),
    ]


@lru_cache(maxsize=65536)
def _tie(seed: int, candidate: PlannedRun) -> float:
    """A number in [0, 1) by which equals are ordered; another seed, another order."""
    return zlib.crc32(f"{seed} {candidate.tie_text}".encode()) / 2**32


MOST_RUNS = 250  # of one workload that are weighed
_MOST_FRESH = 300  # measured since the model was fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Valued:
    """One workload's candidates by their positions among `places`, where the belief has them."""

    choice_set: ChoiceSet
    belief: Belief
    candidates: dict[PlannedRun, int]
    places: tuple[int, ...]
    run_values: RunValues
    alike: Floats


@dataclass(slots=True, kw_only=True)
class DecisionValue:
    """Regret that runs are expected to save, given those taken so far, by workload over all its modes.

    `types` and `workloads`, each with its mode, are those that the model knows.
    """

    types: frozenset[str]
    workloads: frozenset[Trained]
    _valued: dict[str, _Valued] = field(default_factory=dict)
    _taken: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, candidates: Iterable[PlannedRun], *, layouts: Mapping[str, int]
    ) -> DecisionValue:
        """By the joint moments of `model`, and what its fresh runs tell.

        Weighed are at most 250 runs a workload: those of the choice set, then the shortest on the fewest machines.
        """
        known = cls(types=model.types, workloads=model.workloads)
        by: dict[str, list[PlannedRun]] = {}
        for candidate in candidates:
            if candidate.trained in model.workloads and known.covers(candidate.members):
                by.setdefault(candidate.trained[0], []).append(candidate)
        fresh = [
            row
            for row in rows_of(model.fresh)
            if trained_of(row) in model.workloads
            and known.covers(parse_cluster(str(row["cluster"])))
        ]
        for name, one in model.choice_set.items():
            met = [row for row in fresh if row["workload"] == name]
            known._valued[name] = _valued(
                one, by.get(name, []), model.joint, layouts, met[-_MOST_FRESH:]
            )
        return known

    def covers(self, members: Iterable[str]) -> bool:
        """Does the model know all of these instance types?"""
        return self.types.issuperset(members)

    def applies_to(self, candidate: PlannedRun) -> bool:
        """Does the model know its workload and machines? Others are for variety."""
        known = candidate.trained in self.workloads and candidate.trained[0] in self._valued
        return known and self.covers(candidate.members)

    def value(self, candidate: PlannedRun) -> float:
        """Regret that it is expected to save, given what is taken; 0 for a run that changes no choice."""
        one = self._valued[candidate.trained[0]]
        at = one.candidates.get(candidate)
        if at is None or not one.run_values.regret[at]:
            return 0.0
        value = float(one.run_values.regret[at])
        for other in self._taken.get(candidate.trained[0], ()):
            value *= 1 - float(one.alike[at, other])
        return value

    def add(self, candidate: PlannedRun) -> None:
        """Take it as made."""
        at = self._valued[candidate.trained[0]].candidates.get(candidate)
        if at is not None:
            self._taken.setdefault(candidate.trained[0], []).append(at)

    def copy(self) -> DecisionValue:
        """An independent copy to try a launch on."""
        return DecisionValue(
            types=self.types,
            workloads=self.workloads,
            _valued=self._valued,
            _taken={name: list(one) for name, one in self._taken.items()},
        )

    def revalue(self) -> None:
        """Value everything anew, narrowed by what was taken; what had no value stays so."""
        for name, taken in self._taken.items():
            one = self._valued[name]
            belief = one.belief
            for at in taken:
                belief = belief.given(one.places[at])
            left = {
                candidate: at
                for candidate, at in one.candidates.items()
                if at not in taken and one.run_values.regret[at] > 0
            }
            self._valued[name] = _weighed(
                one.choice_set, belief, list(left), [one.places[at] for at in left.values()]
            )
        self._taken = {}

    def reason(self, candidate: PlannedRun) -> str:
        """What it is expected to change, for a person."""
        one = self._valued[candidate.trained[0]]
        at = one.candidates[candidate]
        values = one.run_values
        return (
            f"expected to change the choice of {values.question[at]} in {values.chance[at]:.0%} of outcomes and "
            f"to save {values.regret[at]:.1%}"
        )


def _valued(
    choice_set: ChoiceSet,
    candidates: Sequence[PlannedRun],
    joint: Joint,
    layouts: Mapping[str, int],
    fresh: Sequence[Mapping[str, object]],
) -> _Valued:
    keys = {setup_key(setup) for setup in choice_set.setups}
    rows = {candidate: candidate.row() for candidate in candidates}
    ordered = sorted(
        candidates,
        key=lambda one: (
            row_key(rows[one], layouts) not in keys,
            one.est_s * len(one.members),
            rows[one]["cluster"],
        ),
    )
    weighed = ordered[:MOST_RUNS] if choice_set.questions else []
    frame = pd.DataFrame(
        [*(s.row() for s in choice_set.setups), *(rows[w] for w in weighed), *fresh]
    )
    if not weighed or not len(frame):
        empty = Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), noise=np.zeros(0))
        return _weighed(replace(choice_set, questions=()), empty, [], [])
    mean, covariance, noise = joint(frame.drop(columns=["step_s", "sync_s"], errors="ignore"))
    belief = Belief(mean=mean, covariance=covariance, noise=noise)
    first = len(choice_set.setups)
    for at, row in enumerate(fresh, start=first + len(weighed)):
        belief = belief.given(at, float(np.log(float(str(row["step_s"])))))
    return _weighed(choice_set, belief, weighed, list(range(first, first + len(weighed))))


def _weighed(
    choice_set: ChoiceSet, belief: Belief, candidates: Sequence[PlannedRun], places: Sequence[int]
) -> _Valued:
    return _Valued(
        choice_set=choice_set,
        belief=belief,
        candidates={candidate: at for at, candidate in enumerate(candidates)},
        places=tuple(places),
        run_values=run_values(choice_set.questions, belief, places),
        alike=belief.alike()[np.ix_(places, places)] if places else np.zeros((0, 0)),
    )


def measured_before(measured_at: object, moment: datetime) -> bool:
    """Was it measured before `moment`? False where nobody knows when."""
    at = _moment(measured_at)
    return at is not None and at < _aware(moment)


def measured_after(measured_at: object, moment: datetime) -> bool:
    """Was it measured after `moment`? False where nobody knows when."""
    at = _moment(measured_at)
    return at is not None and at > _aware(moment)


def stale_types(runs: pd.DataFrame, before: datetime | None) -> frozenset[str]:
    """Instance types of which every run with a known moment was measured before `before`."""
    newest: dict[str, bool] = {}
    if before is None or "measured_at" not in runs:
        return frozenset()
    for cluster, moment in zip(runs["cluster"], runs["measured_at"], strict=True):
        if _moment(moment) is not None:
            for name in set(parse_cluster(str(cluster))):
                newest[name] = newest.get(name, True) and measured_before(moment, before)
    return frozenset(name for name, stale in newest.items() if stale)


def _moment(measured_at: object) -> datetime | None:
    if measured_at is None or pd.isna(measured_at):  # type: ignore[call-overload]
        return None
    return _aware(pd.Timestamp(measured_at).to_pydatetime())  # type: ignore[arg-type]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

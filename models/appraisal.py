"""What training runs of workloads that the model knows are worth to the choices of the table, launch by launch.

Within a launch a run loses the share that those before it tell of the same; between launches the belief is narrowed by
what was bought (its outcome unknown) and all is valued again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from .cloud import cluster_name, parse_cluster
from .contenders import Contenders
from .identity import row_key, rows_of, setup_key
from .wants import Want
from .workload import joined
from .worth import Belief, Floats, Worths, worths

Joint = Callable[[pd.DataFrame], tuple[Floats, Floats, Floats]]  # setups -> mean, covariance, noise of log step

MOST_RUNS = 250  # of one workload that are weighed
_MOST_FRESH = 300  # measured since the model was fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Valued:
    """One workload's wants by their positions among `places`, where the belief has them."""

    contenders: Contenders
    belief: Belief
    wants: dict[Want, int]
    places: tuple[int, ...]
    worth: Worths
    alike: Floats


@dataclass(slots=True, kw_only=True)
class Appraisal:
    """Worth of wants by workload, given those taken so far. `types` are the instance types that the model knows."""

    types: frozenset[str]
    _valued: dict[str, _Valued] = field(default_factory=dict)
    _taken: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        contenders: Mapping[str, Contenders],
        wants: Iterable[Want],
        joint: Joint,
        *,
        types: Iterable[str],
        layouts: Mapping[str, int],
        fresh: pd.DataFrame,
    ) -> Appraisal:
        """By the model's `joint` moments; `fresh` are runs (with step_s) that the model has not learned from.

        Weighed are at most 250 runs a workload: those of contenders, then the shortest on the fewest machines.
        """
        known = cls(types=frozenset(types))
        by: dict[str, list[Want]] = {}
        for want in wants:
            if known.covers(want.members):
                by.setdefault(want.workload, []).append(want)
        for name, one in contenders.items():
            met = [row for row in rows_of(fresh) if row["workload"] == name and known.covers(_members(row))]
            known._valued[name] = _valued(one, by.get(name, []), joint, layouts, met[-_MOST_FRESH:])
        return known

    def covers(self, members: Iterable[str]) -> bool:
        """Does the model know all of these instance types?"""
        return self.types.issuperset(members)

    def judges(self, want: Want) -> bool:
        """Is this want's worth known here? Others are for variety: what nobody has met must be met first."""
        return want.workload in self._valued and self.covers(want.members)

    def value(self, want: Want) -> float:
        """Regret that it is expected to save, given what is taken; 0 for a run that changes no choice."""
        one = self._valued[want.workload]
        at = one.wants.get(want)
        if at is None or not one.worth.regret[at]:
            return 0.0
        value = float(one.worth.regret[at])
        for other in self._taken.get(want.workload, ()):
            value *= 1 - float(one.alike[at, other])
        return value

    def add(self, want: Want) -> None:
        """Take it as made."""
        at = self._valued[want.workload].wants.get(want)
        if at is not None:
            self._taken.setdefault(want.workload, []).append(at)

    def copy(self) -> Appraisal:
        """An independent copy to try a launch on."""
        return Appraisal(
            types=self.types, _valued=self._valued, _taken={name: list(one) for name, one in self._taken.items()}
        )

    def again(self) -> None:
        """Value everything anew, narrowed by what was taken; what was worth nothing stays so."""
        for name, taken in self._taken.items():
            one = self._valued[name]
            belief = one.belief
            for at in taken:
                belief = belief.given(one.places[at])
            left = {want: at for want, at in one.wants.items() if at not in taken and one.worth.regret[at] > 0}
            self._valued[name] = _weighed(one.contenders, belief, list(left), [one.places[at] for at in left.values()])
        self._taken = {}

    def reason(self, want: Want) -> str:
        """What it is expected to change, for a person."""
        one = self._valued[want.workload]
        at = one.wants[want]
        return (
            f"expected to change the choice of {one.worth.question[at]} in {one.worth.chance[at]:.0%} of outcomes and "
            f"to save {one.worth.regret[at]:.1%}"
        )


def _valued(
    contenders: Contenders,
    wants: Sequence[Want],
    joint: Joint,
    layouts: Mapping[str, int],
    fresh: Sequence[Mapping[str, object]],
) -> _Valued:
    keys = {setup_key(setup) for setup in contenders.setups}
    rows = {want: _row(want) for want in wants}
    ordered = sorted(
        wants,
        key=lambda one: (row_key(rows[one], layouts) not in keys, one.est_s * len(one.members), rows[one]["cluster"]),
    )
    weighed = ordered[:MOST_RUNS] if contenders.questions else []
    frame = pd.DataFrame([*(s.row() for s in contenders.setups), *(rows[w] for w in weighed), *fresh])
    if not weighed or not len(frame):
        empty = Belief(mean=np.zeros(0), covariance=np.zeros((0, 0)), noise=np.zeros(0))
        return _weighed(replace(contenders, questions=()), empty, [], [])
    mean, covariance, noise = joint(frame.drop(columns=["step_s", "sync_s"], errors="ignore"))
    belief = Belief(mean=mean, covariance=covariance, noise=noise)
    first = len(contenders.setups)
    for at, row in enumerate(fresh, start=first + len(weighed)):
        belief = belief.given(at, float(np.log(float(str(row["step_s"])))))
    return _weighed(contenders, belief, weighed, list(range(first, first + len(weighed))))


def _weighed(contenders: Contenders, belief: Belief, wants: Sequence[Want], places: Sequence[int]) -> _Valued:
    return _Valued(
        contenders=contenders,
        belief=belief,
        wants={want: at for at, want in enumerate(wants)},
        places=tuple(places),
        worth=worths(contenders.questions, belief, places),
        alike=belief.alike()[np.ix_(places, places)] if places else np.zeros((0, 0)),
    )


def _row(want: Want) -> dict[str, object]:
    """As `Setup.row` has it."""
    return {
        "workload": want.workload,
        "cluster": cluster_name(want.members),
        "layout": joined(want.devices or (1,) * len(want.members)),
        "batch_per_device": joined(want.batches),
        "accumulation_steps": want.accumulation_steps,
    }


def _members(row: Mapping[str, object]) -> tuple[str, ...]:
    return parse_cluster(str(row["cluster"]))

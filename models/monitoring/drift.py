"""Recent runs outside the intervals that were predicted before they were measured, by machines.

    chance = P(as many of n outside),   outside ~ binomial(n, one in ten)

by instance type and zone, with Bonferroni over the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from ..domain.cluster import parse_cluster
from ..domain.numeric import BoolArray
from ..domain.setup_table import column
from ..step_time.dataset import TrainingData, valid_runs
from ..step_time.model import StepTimeModel
from .cross_validation import predictions_of

Group = tuple[str, str, str]  # scope ("type" or "provider"), instance type, zone
Since = Mapping[Group, pd.Timestamp | None]  # drifting groups, and since when

WHOLE: Group = ("provider", "", "")
_MISSES = 0.1  # of right 90 % intervals
_CHANCE = 0.05  # of naming any group although nothing drifts
_LEAST_RUNS = 5  # that can name a group
_MOST_RUNS, _MOST_OF_ALL = 30, 60  # newest runs of a group, and of all, that count as recent
_ONE_SIDED = 2.0  # ratio of runs on either side that gives a drift its direction
_SECONDS = ["measured_s", "step_s", "step_low_s", "step_high_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Judgement of one group; `median_ratio` is measured over predicted seconds."""

    scope: str
    instance_type: str
    zone: str
    drifting: bool
    direction: str  # "slower", "faster", "either way", "none"
    runs: int
    outside: int
    median_ratio: float
    chance: float
    since: pd.Timestamp | None  # the first run outside
    newest_measured_at: pd.Timestamp

    @property
    def group(self) -> Group:
        return self.scope, self.instance_type, self.zone


def recent(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return runs measured after everything that `model` learned from, with its predictions.

    Columns: cluster, zone ("" unknown), measured_at, measured_s, step_s, step_low_s, step_high_s.
    """
    scored = predictions_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    known = column(runs, "run_id", "").astype(str).isin(model.trained_on)
    at = pd.to_datetime(column(runs, "measured_at", None))
    learned = at[known].max()
    fresh = ~known & at.notna() & ((at > learned) | pd.isna(learned))
    scored = scored[scored["row"].isin(np.flatnonzero(fresh))]
    rows = runs.loc[scored["row"].astype(int)]
    return (
        scored[_SECONDS]
        .astype(float)
        .assign(
            cluster=rows["cluster"].tolist(),
            zone=column(rows, "zone", "").astype(str).tolist(),
            measured_at=at[rows.index].tolist(),
        )
    )


def judge(scored: pd.DataFrame, before: Since) -> list[Drift]:
    """Judge each group of `recent` runs that has a run of its own; `before` are those that drift.

    A run on mixed machines counts for each type until one of them is named. The most unlikely
    group is named first, while its chance times the number of groups is within 5 %. A drift goes
    on while half of its recent runs lie outside. All runs together drift if that is true of them
    and of those without any one type, and most are on one side.
    """
    if not len(scored):
        return []
    scored = scored.sort_values("measured_at", kind="stable").reset_index(drop=True)
    groups = _groups(scored)
    tested = sum(int(mask.sum()) >= _LEAST_RUNS for mask in groups.values())
    free = np.ones(len(scored), dtype=bool)
    named: list[Drift] = []
    while True:
        found = [
            _judgement(group, scored[mask & free], before)
            for group, mask in groups.items()
            if group not in {one.group for one in named} and (mask & free).any()
        ]
        unlikely = [one for one in found if one.drifting and one.chance * tested <= _CHANCE]
        if not unlikely:
            break
        named.append(min(unlikely, key=lambda one: (one.chance, one.group)))
        free &= ~groups[named[-1].group]
    judged = [*named, *(_settled(one, before) for one in found)]
    return [*sorted(judged, key=lambda one: one.group), _whole(scored, before)]


def _groups(scored: pd.DataFrame) -> dict[Group, BoolArray]:
    found: dict[Group, BoolArray] = {}
    for at, (cluster, zone) in enumerate(zip(scored["cluster"], scored["zone"], strict=True)):
        for name in set(parse_cluster(str(cluster))):
            group = ("type", name, str(zone))
            found.setdefault(group, np.zeros(len(scored), dtype=bool))[at] = True
    return dict(sorted(found.items()))


def _judgement(group: Group, runs: pd.DataFrame, before: Since) -> Drift:
    """Judge the newest of `runs`, sorted by time; they may drift if there are enough."""
    runs = runs.tail(_MOST_OF_ALL if group == WHOLE else _MOST_RUNS)
    slower = (runs["measured_s"] > runs["step_high_s"]).to_numpy()
    faster = (runs["measured_s"] < runs["step_low_s"]).to_numpy()
    out = slower | faster
    since = before.get(group)
    if not out.any():
        since = None
    elif since is None or pd.isna(since):
        since = runs["measured_at"][out].min()
    return Drift(
        scope=group[0],
        instance_type=group[1],
        zone=group[2],
        drifting=len(runs) >= _LEAST_RUNS and bool(out.any()),
        direction=_direction(int(slower.sum()), int(faster.sum())),
        runs=len(runs),
        outside=int(out.sum()),
        median_ratio=float(np.median(runs["measured_s"] / runs["step_s"])),
        chance=float(bdtrc(int(out.sum()) - 1, len(runs), _MISSES)),
        since=since,
        newest_measured_at=runs["measured_at"].max(),
    )


def _direction(slower: int, faster: int) -> str:
    if slower + faster == 0:
        return "none"
    if slower >= _ONE_SIDED * faster:
        return "slower"
    return "faster" if faster >= _ONE_SIDED * slower else "either way"


def _settled(one: Drift, before: Since) -> Drift:
    """Let a group that chance explains drift only if it did, with half of its runs outside."""
    goes_on = one.group in before and 2 * one.outside >= one.runs
    return replace(one, drifting=goes_on, since=one.since if goes_on else None)


def _whole(scored: pd.DataFrame, before: Since) -> Drift:
    """Judge a shift of all runs, which no single type explains."""
    scored = scored.tail(_MOST_OF_ALL)
    types = [set(parse_cluster(str(cluster))) for cluster in scored["cluster"]]
    without = [scored[[name not in row for row in types]] for name in set().union(*types)]
    one = _judgement(WHOLE, scored, before)
    if one.drifting and all(_shifted(rest, before) for rest in (scored, *without)):
        return one
    return _settled(one, before)


def _shifted(runs: pd.DataFrame, before: Since) -> bool:
    """True if more runs lie outside than chance explains, and most on one side (a sign test)."""
    if len(runs) < _LEAST_RUNS:
        return False
    one = _judgement(WHOLE, runs, before)
    above = int((runs["measured_s"] > runs["step_s"]).sum())
    side = 2 * float(bdtrc(max(above, len(runs) - above) - 1, len(runs), 0.5))
    one_sided = one.direction in ("slower", "faster")
    return one_sided and one.chance <= _CHANCE and side <= _CHANCE


_HOW = {
    "slower": "slower than predicted",
    "faster": "faster than predicted",
    "either way": "unlike its predictions",
    "none": "as predicted",
}


def drift_sentence(row: Mapping[str, Any]) -> str:
    """Describe a row of the mart `drift`."""
    whole = row["scope"] == "provider"
    where = "everything" if whole else f"{row['instance_type']} in {row['zone'] or 'unknown zone'}"
    since = f" since {row['since']:%Y-%m-%d %H:%M} UTC" if pd.notna(row["since"]) else ""
    return (
        f"drift: {where} runs {_HOW[row['direction']]}{since}, by"
        f" {float(row['median_ratio']) - 1:+.0%} in the median; {row['outside']} of {row['runs']}"
        " recent runs are outside their intervals. The next campaign measures again"
    )

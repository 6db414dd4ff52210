"""Do recent runs lie outside the intervals that were predicted before they were measured, and on which machines?

    chance = P(so many of n outside),   outside ~ binomial(n, one in ten)

by instance type and zone, with Bonferroni over the groups. Never says why machines drift.
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

WHOLE: Group = ("provider", "", "")
_MISSES = 0.1  # of right 90 % intervals
_CHANCE = 0.05  # of naming any group although nothing drifts
_LEAST_RUNS = 5  # that can name a group
_MOST_RUNS, _MOST_OF_ALL = 30, 60  # newest runs of a group, and of all, that count as recent
_ONE_SIDED = 2.0  # times as many on one side as on the other give the drift a direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The judgement of one group. `median_ratio` is measured over predicted; `since` the first run outside."""

    scope: str
    instance_type: str
    zone: str
    drifting: bool
    direction: str  # "slower", "faster", "either way", "none"
    runs: int
    outside: int
    median_ratio: float
    chance: float
    since: pd.Timestamp | None
    newest_measured_at: pd.Timestamp


def recent(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Runs measured after everything that `model` learned from, with what it predicts for them.

    Columns: cluster, zone ("" unknown), measured_at, measured_s, step_s, step_low_s, step_high_s. Runs of workloads or
    types that it has not met, and those without a time, are left out.
    """
    scored = predictions_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    known = (
        runs["run_id"].astype(str).isin(model.trained_on) if len(runs) else pd.Series(dtype=bool)
    )
    at = pd.to_datetime(column(runs, "measured_at", None))
    learned = at[known].max() if known.any() else pd.NaT
    fresh = ~known & at.notna() & (at > learned if pd.notna(learned) else True)
    scored = scored[scored["row"].isin(np.flatnonzero(fresh))]
    rows = runs.loc[scored["row"].astype(int)]
    times = (
        scored[["measured_s", "step_s", "step_low_s", "step_high_s"]]
        .astype(float)
        .reset_index(drop=True)
    )
    zones = column(rows, "zone", "").astype(str).tolist()
    return times.assign(
        cluster=rows["cluster"].tolist(), zone=zones, measured_at=at[rows.index].tolist()
    )


def judge(scored: pd.DataFrame, before: Mapping[Group, pd.Timestamp | None]) -> list[Drift]:
    """One judgement a group of `recent` runs that has any of its own. `before`: the groups that drift, and since when.

    A run on mixed machines counts for each type, until one of them is named: the others are then judged by runs without
    it. The most unlikely group is named first, then the next, while its chance times the number of groups is within
    5 %. One that drifts already goes on while half of its recent runs lie outside, and is over when fewer do. All runs
    together drift if the same is true of them, and of those without any one type, and most are slower or most faster.
    """
    if not len(scored):
        return []
    scored = scored.sort_values("measured_at", kind="stable").reset_index(drop=True)
    groups = _groups(scored)
    tested = sum(int(mask.sum()) >= _LEAST_RUNS for mask in groups.values())
    free = np.ones(len(scored), dtype=bool)
    named: dict[Group, Drift] = {}
    while True:
        left = {group: scored[mask & free] for group, mask in groups.items() if group not in named}
        rest = {group: _judgement(group, runs, before) for group, runs in left.items()}
        unlikely = [
            one
            for one in rest.values()
            if one is not None and one.drifting and one.chance * tested <= _CHANCE
        ]
        if not unlikely:
            break
        first = min(unlikely, key=lambda one: (one.chance, one.instance_type, one.zone))
        group = (first.scope, first.instance_type, first.zone)
        named[group] = first
        free &= ~groups[group]
    others = [_settled(one, before) for one in rest.values() if one is not None]
    by_name = sorted([*named.values(), *others], key=lambda one: (one.instance_type, one.zone))
    return [*by_name, *_whole(scored, before)]


def _groups(scored: pd.DataFrame) -> dict[Group, BoolArray]:
    found: dict[Group, BoolArray] = {}
    for at, (cluster, zone) in enumerate(zip(scored["cluster"], scored["zone"], strict=True)):
        for name in set(parse_cluster(str(cluster))):
            found.setdefault(("type", name, str(zone)), np.zeros(len(scored), dtype=bool))[at] = (
                True
            )
    return dict(sorted(found.items()))


def _judgement(
    group: Group, runs: pd.DataFrame, before: Mapping[Group, pd.Timestamp | None]
) -> Drift | None:
    """The newest of `runs` (sorted by time) as a judgement, `drifting` where there are enough; None without a run."""
    runs = runs.tail(_MOST_OF_ALL if group == WHOLE else _MOST_RUNS)
    if not len(runs):
        return None
    slower = (runs["measured_s"] > runs["step_high_s"]).to_numpy()
    faster = (runs["measured_s"] < runs["step_low_s"]).to_numpy()
    out = slower | faster
    since = runs["measured_at"][out].min() if out.any() else None
    earlier = before.get(group)
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
        since=earlier if out.any() and earlier is not None and pd.notna(earlier) else since,
        newest_measured_at=runs["measured_at"].max(),
    )


def _direction(slower: int, faster: int) -> str:
    if slower + faster == 0:
        return "none"
    if slower >= _ONE_SIDED * faster:
        return "slower"
    return "faster" if faster >= _ONE_SIDED * slower else "either way"


def _settled(one: Drift, before: Mapping[Group, pd.Timestamp | None]) -> Drift:
    """A group that chance explains: it drifts only if it did, and half of its runs still lie outside."""
    goes_on = (one.scope, one.instance_type, one.zone) in before and 2 * one.outside >= one.runs
    return replace(one, drifting=goes_on, since=one.since if goes_on else None)


def _whole(scored: pd.DataFrame, before: Mapping[Group, pd.Timestamp | None]) -> list[Drift]:
    """All runs together, if any: a shift of all, and not of one type that was measured often."""
    scored = scored.tail(_MOST_OF_ALL)
    one = _judgement(WHOLE, scored, before)
    if one is None:
        return []
    types = [set(parse_cluster(str(cluster))) for cluster in scored["cluster"]]
    without = [scored[[name not in row for row in types]] for name in sorted(set().union(*types))]
    if one.drifting and all(_shifted(rest, before) for rest in (scored, *without)):
        return [one]
    return [_settled(one, before)]


def _shifted(runs: pd.DataFrame, before: Mapping[Group, pd.Timestamp | None]) -> bool:
    """Do more lie outside than chance explains, and most on one side of the prediction (a sign test)?"""
    one = _judgement(WHOLE, runs, before)
    if one is None or one.runs < _LEAST_RUNS or one.direction not in ("slower", "faster"):
        return False
    above = int((runs["measured_s"] > runs["step_s"]).sum())
    side = 2 * float(bdtrc(max(above, len(runs) - above) - 1, len(runs), 0.5))
    return one.chance <= _CHANCE and side <= _CHANCE


_HOW = {
    "slower": "runs slower than predicted",
    "faster": "runs faster than predicted",
    "either way": "runs unlike what was predicted, some slower and some faster,",
    "none": "runs as predicted",
}


def drift_sentence(row: Mapping[str, Any]) -> str:
    """A row of the mart `drift` in words: where, how many, how far, since when, and what happens about it."""
    whole = row["scope"] == "provider"
    where = (
        "everything" if whole else f"{row['instance_type']} in {row['zone'] or 'an unknown zone'}"
    )
    how = _HOW[str(row["direction"])]
    since = f" since {row['since']:%Y-%m-%d %H:%M} UTC" if pd.notna(row["since"]) else ""
    by = f"by {float(row['median_ratio']) - 1:+.0%} in the median of {row['runs']} recent runs"
    again = "measures again what was known well" if whole else "measures it again first"
    return f"drift: {where} {how}{since}, {by}, {row['outside']} outside their intervals; the next campaign {again}"

"""Recent runs outside the intervals that were predicted before they were measured, by machines.

    chance = P(as many of n outside),   outside ~ binomial(n, one in ten)

by instance type and zone, with Bonferroni over the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from ..domain.cluster import parse_cluster
from ..domain.setup_table import column
from ..step_time.dataset import TrainingData, valid_runs
from ..step_time.model import StepTimeModel
from .cross_validation import predictions_of

Group = tuple[str, str, str]  # scope ("type" or "provider"), instance type, zone
Since = Mapping[Group, pd.Timestamp | None]  # drifting groups, and since when
Row = dict[str, Any]

WHOLE: Group = ("provider", "", "")
_MISSES = 0.1  # of right 90 % intervals
_CHANCE = 0.05  # of naming any group although nothing drifts
_LEAST_RUNS = 5  # that can name a group
_MOST_RUNS, _MOST_OF_ALL = 30, 60  # newest runs of a group, and of all, that count as recent
_ONE_SIDED = 2.0  # ratio of runs on either side that gives a drift its direction


def recent(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return runs measured after everything that `model` learned from, with its predictions.

    Columns: those of `predictions_of`, cluster, zone ("" unknown), measured_at.
    """
    runs = valid_runs(data.runs).reset_index(drop=True)
    at = pd.to_datetime(column(runs, "measured_at", None))
    learned = column(runs, "run_id", "").astype(str).isin(model.trained_on)
    fresh = ~learned & at.notna() & ~(at <= at[learned].max())
    setups = pd.DataFrame(
        {"cluster": runs["cluster"], "zone": column(runs, "zone", ""), "measured_at": at}
    )
    scored = predictions_of(model, data)
    return scored.merge(setups[fresh], left_on="row", right_index=True)


def judge(scored: pd.DataFrame, before: Since) -> list[Row]:
    """Return a row of raw_drift for each type in a zone with `recent` runs, then for all runs.

    `before` are those that drift. A run on mixed machines counts for each type until one of them
    is named. The most unlikely group is named first, while its chance times the number of groups
    is within 5 %. A drift goes on while half of its recent runs lie outside.
    """
    if not len(scored):
        return []
    scored = scored.sort_values("measured_at", ignore_index=True)
    types = scored["cluster"].map(lambda name: sorted(set(parse_cluster(str(name)))))
    machines = scored.assign(instance_type=types).explode("instance_type")
    groups: dict[Group, pd.DataFrame] = {
        ("type", str(name), str(zone)): runs
        for (name, zone), runs in machines.groupby(["instance_type", "zone"])
    }
    tested = max(sum(len(runs) >= _LEAST_RUNS for runs in groups.values()), 1)
    judged: dict[Group, Row] = {}
    while groups:
        rows = {group: _row(group, runs.tail(_MOST_RUNS)) for group, runs in groups.items()}
        unlikely = [group for group, row in rows.items() if _chance(row) * tested <= _CHANCE]
        if not unlikely:
            judged |= rows
            break
        named = min(unlikely, key=lambda group: (_chance(rows[group]), group))
        judged[named] = rows[named] | {"drifting": True}
        explained = groups.pop(named).index
        left = {group: runs[~runs.index.isin(explained)] for group, runs in groups.items()}
        groups = {group: runs for group, runs in left.items() if len(runs)}
    judged = dict(sorted(judged.items())) | {WHOLE: _whole(machines)}
    return [_settled(group, row, before) for group, row in judged.items()]


def _row(group: Group, runs: pd.DataFrame) -> Row:
    slower = runs["measured_s"] > runs["step_high_s"]
    faster = runs["measured_s"] < runs["step_low_s"]
    less, more = sorted([int(slower.sum()), int(faster.sum())])
    direction = "either way" if more else "none"
    if more and more >= _ONE_SIDED * less:
        direction = "slower" if slower.sum() == more else "faster"
    return dict(zip(("scope", "instance_type", "zone"), group, strict=True)) | {
        "drifting": False,
        "direction": direction,
        "runs": len(runs),
        "outside": less + more,
        "median_ratio": float(np.median(runs["measured_s"] / runs["step_s"])),
        "chance": float(bdtrc(less + more - 1, len(runs), _MISSES)),
        "since": runs["measured_at"][slower | faster].min(),
        "newest_measured_at": runs["measured_at"].max(),
    }


def _chance(row: Row) -> float:
    """Return the row's chance; 1 of too few runs."""
    return float(row["chance"]) if row["runs"] >= _LEAST_RUNS else 1.0


def _whole(machines: pd.DataFrame) -> Row:
    """Judge a shift of all runs: more lie outside, most on one side, without any one type too."""
    newest = machines[machines.index > machines.index.max() - _MOST_OF_ALL]
    parts = [newest.index]
    parts += [newest.index.difference(runs.index) for _, runs in newest.groupby("instance_type")]
    runs = newest[~newest.index.duplicated()]
    rows = [_row(WHOLE, runs.loc[part.unique()]) for part in parts if len(part)]
    one_sided = {row["direction"] for row in rows} <= {"slower", "faster"}
    drifting = len(rows) == len(parts) and max(map(_chance, rows)) <= _CHANCE and one_sided
    return rows[0] | {"drifting": drifting}


def _settled(group: Group, row: Row, before: Since) -> Row:
    """Keep the time since when a group drifts, and let a known drift of half of the runs go on."""
    goes_on = group in before and 2 * row["outside"] >= row["runs"]
    if not (row["drifting"] or goes_on):
        return row | {"since": None}
    known = before.get(group)
    return row | {"drifting": True, "since": row["since"] if pd.isna(known) else known}


_HOW = {"slower": "slower than predicted", "faster": "faster than predicted"}


def drift_sentence(row: Mapping[str, Any]) -> str:
    """Describe a drifting row of the mart `drift`."""
    where = f"{row['instance_type']} in {row['zone'] or 'unknown zone'}"
    if row["scope"] == "provider":
        where = "everything"
    since = f" since {row['since']:%Y-%m-%d %H:%M} UTC" if pd.notna(row["since"]) else ""
    return (
        f"drift: {where} runs {_HOW.get(row['direction'], 'unlike its predictions')}{since}, by"
        f" {float(row['median_ratio']) - 1:+.0%} in the median; {row['outside']} of {row['runs']}"
        " recent runs are outside their intervals. The next campaign measures again"
    )

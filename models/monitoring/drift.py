"""Detect drift: too many recent runs lie outside their predicted 90 % intervals.

    chance = P(X >= runs outside their intervals),   X ~ binomial(runs, 1/10)

The runs on one instance type in one zone are a group. Each group is tested for drift, and `chance`
is the p-value of the test. A Bonferroni correction accounts for the number of groups.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from scipy.special import bdtrc

from ..domain.setup_table import Row, column, types_of
from ..step_time.dataset import TrainingData, valid_runs
from ..step_time.model import StepTimeModel
from .cross_validation import predictions_of

Group = tuple[str, str]  # instance type, zone
_MISSES = 0.1  # expected share of runs outside their 90 % intervals if the model is right
_CHANCE = 0.05  # chance of at least one false alarm if no group drifts
_LEAST_RUNS = 5  # a group with fewer runs is not tested
_MOST_RUNS = 30  # only this many of a group's most recent runs count
# A drift has a direction if runs that are too slow are at least this many times as frequent as runs
# that are too fast, or the reverse.
_MIN_RATIO = 2.0


def recent(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return the runs that are newer than all training runs of `model`, with predictions.

    The result has the columns of `cross_validation.predictions_of`: the setup, and its measured and
    predicted step times. It also has the columns cluster, zone ("" if unknown) and measured_at.
    """
    runs = valid_runs(data.runs).reset_index(drop=True)
    at = pd.to_datetime(column(runs, "measured_at", None))
    learned = column(runs, "run_id", "").isin(model.trained_on)
    fresh = runs[~learned & at.notna() & ~(at <= at[learned].max())]
    setups = fresh[["cluster"]].assign(zone=column(fresh, "zone", ""), measured_at=at[fresh.index])
    return predictions_of(model, data).merge(setups, left_on="row", right_index=True)


def judge(scored: pd.DataFrame, before: Mapping[Group, pd.Timestamp]) -> list[Row]:
    """Decide which groups of runs drift, and return a row of the table raw_drift for each group.

    A group is the runs on one instance type in one zone. A run on several instance types belongs to
    several groups. The p-value of a group is the probability, without drift, of at least the
    observed number of runs outside their intervals.

    1. The group with the smallest p-value drifts if (p-value) x (number of tested groups) <= 0.05.
    2. If it drifts, its runs are removed from all groups. A run therefore counts for at most one
       drifting group. The remaining groups are tested again.

    A group without remaining runs has no row. A group in `before` still drifts if at least half of
    its recent runs are outside their intervals. The start of its drift does not change.

    scored: the recent runs with their measured and predicted step times (see `recent`).
    before: {group that drifts so far: start of its drift}.
    """
    scored = scored.sort_values("measured_at", ignore_index=True)
    types = scored["cluster"].map(lambda name: sorted(set(types_of(name))))
    machines = scored.assign(instance_type=types).explode("instance_type")
    sizes = machines.groupby(["instance_type", "zone"]).size()
    tested = max(1, int((sizes >= _LEAST_RUNS).sum()))
    judged: dict[Group, Row] = {}
    left = machines
    while len(left):
        groups: dict[Any, pd.DataFrame] = dict(iter(left.groupby(["instance_type", "zone"])))
        rows = {group: _measures(runs.tail(_MOST_RUNS)) for group, runs in groups.items()}
        worst, row = min(rows.items(), key=lambda item: (_chance(item[1]), item[0]))
        if _chance(row) * tested <= _CHANCE:
            judged[worst] = row | {"drifting": True}
            left = left[~left.index.isin(groups[worst].index)]
        else:
            judged |= rows
            break
    found = []
    for group, row in sorted(judged.items()):
        drifting = row["drifting"] or (group in before and 2 * row["outside"] >= row["runs"])
        since = before.get(group, row["since"]) if drifting else None
        named = {"scope": "type", "instance_type": group[0], "zone": group[1]}
        found.append(named | row | {"drifting": drifting, "since": since})
    return found


def _measures(runs: pd.DataFrame) -> Row:
    """Return the columns of raw_drift for a group of runs, with `drifting` set to False.

    Four columns describe the runs that lie outside their predicted intervals:

    - `outside`: the number of these runs
    - `since`: the time of the earliest of these runs
    - `direction`: "slower" if at least two thirds of these runs are slower than predicted, "faster"
      if at least two thirds are faster, else "either way"; "none" if there are no such runs
    - `chance`: the probability of at least `outside` such runs if there is no drift
    """
    above = runs["measured_s"] > runs["step_high_s"]
    below = runs["measured_s"] < runs["step_low_s"]
    slower, faster = int(above.sum()), int(below.sum())
    direction = "either way"
    if not slower and not faster:
        direction = "none"
    elif slower >= _MIN_RATIO * faster:
        direction = "slower"
    elif faster >= _MIN_RATIO * slower:
        direction = "faster"
    return {
        "drifting": False,
        "direction": direction,
        "runs": len(runs),
        "outside": slower + faster,
        "median_ratio": float((runs["measured_s"] / runs["step_s"]).median()),
        "chance": float(bdtrc(slower + faster - 1, len(runs), _MISSES)),
        "since": runs["measured_at"][above | below].min(),
        "newest_measured_at": runs["measured_at"].max(),
    }


def _chance(row: Row) -> float:
    """Return the p-value of the test for drift, or 1 if the group has too few runs for the test."""
    return row["chance"] if row["runs"] >= _LEAST_RUNS else 1.0


def drift_sentence(row: Mapping[str, Any]) -> str:
    """Return a sentence that describes a drift.

    `row` is a row of the mart `drift` whose column `drifting` is True.
    """
    return (
        f"drift since {row['since']:%Y-%m-%d %H:%M} UTC: {row['instance_type']} in"
        f" {row['zone'] or 'unknown zone'}, {row['direction']},"
        f" median {row['median_ratio'] - 1:+.0%}; {row['outside']} of {row['runs']} recent runs are"
        " outside their 90 % intervals. The next campaign measures this type again"
    )

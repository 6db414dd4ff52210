"""Compute the regret of published choices from runs that were measured after publication.

    regret = exp(loss of the choice - lowest loss of the measured setups) - 1

`planner/choice_rule.py` defines the loss, which depends on the hours of the whole job. The hours
are the number of steps times the measured step time, plus start-up, checkpoints and interruptions.
A choice that misses its deadline or budget counts as a failure and has no regret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import Pool
from ..domain.optimizer_state import checkpoint_bytes
from ..domain.setup_table import Row, mode_of, row_key, rows_of
from ..domain.workload import GOAL_COLUMNS, Goal, Mode
from ..job.duration import drawn_hours, expected_hours
from ..job.job_conditions import JobConditions
from ..planner.choice_rule import drawn_meeting, losses, misses

_DRAWS = 400  # stratified draws of interruptions
_PROMISED = ["step_s", "step_low_s", "step_high_s", "hours", "usd", "p_meets"]
_KEPT = [
    *GOAL_COLUMNS,
    "publication_id",
    "published_at",
    "model_version",
    "p_required",
    "promise_id",
    "cluster",
    "market",
    "layout",
    "batch_per_device",
    "accumulation_steps",
    *Mode._fields,
    "runs",
    "rivals_named",
    *(f"promised_{name}" for name in _PROMISED),
]
_MEASURED = ["step_s", "hours", "usd", "p_meets"]
_RIVAL = [
    "rank",
    "cluster",
    "market",
    "batch_per_device",
    "accumulation_steps",
    "step_s",
    "hours",
    "usd",
]


def judge(
    promises: pd.DataFrame,
    runs: pd.DataFrame,
    workloads: pd.DataFrame,
    devices: Mapping[str, int],
    conditions: JobConditions,
    overshoot_price: float,
) -> list[Row]:
    """Return a row of the table raw_ledger for each published choice that was measured later.

    A publication ranks setups for each goal of a workload on a provider. The setup of rank 1 is the
    choice, and the setups of the following ranks are its rivals. Several publications can have the
    same choice for the same goal and market. A run then counts only for the last of these
    publications before the run.

    Args:
        promises: rows of the mart `promises`: the published setups with rank and predictions.
        runs: measured runs.
        workloads: a row per workload, with columns workload, gradient_bytes and checkpoint_bytes.
        devices: {instance type: number of devices}. Rows without a `layout` use all devices.
        conditions: start-up, checkpoint and interruption models.
        overshoot_price: the price of exceeding a limit (see `planner/choice_rule.py`).
    """
    measured = runs[runs["step_s"] > 0]
    measured = measured[["run_id", "measured_at", "step_s"]].assign(key=_keys(measured, devices))
    named = promises.rename(columns={"p_meets_constraint": "p_meets"})
    named = named.assign(
        **named[_PROMISED].add_prefix("promised_"),
        key=_keys(promises, devices),
        promise_id=list(map(_digest, promises[["publication_id", *GOAL_COLUMNS]].to_numpy())),
    )
    named = named.sort_values("rank", kind="stable").drop_duplicates(["promise_id", "key"])
    named["rivals_named"] = named.groupby("promise_id")["rank"].transform("size") - 1
    used = named.merge(measured.rename(columns={"step_s": "measured_step_s"}), on="key")
    used = used[used["measured_at"] > used["published_at"]]
    first = used[(used["rank"] == 1) & ~(used["measured_at"] > used["promised_again_at"])]
    first = first.drop_duplicates("promise_id").sort_values(["published_at", "promise_id"])
    equal = first.groupby([*GOAL_COLUMNS, "key", "market"], dropna=False)
    first["until"] = equal["published_at"].shift(-1)
    used = first[["promise_id", "until"]].merge(used, on="promise_id")
    used = used[~(used["measured_at"] > used["until"])]
    sizes = {
        row["workload"]: checkpoint_bytes(row.get("gradient_bytes"), row.get("checkpoint_bytes"))
        for row in rows_of(workloads)
    }
    ledger = []
    for _, judging in used.groupby("promise_id", sort=False):
        setups = (setup for _, setup in judging.groupby("rank"))
        outcomes = [_outcome(setup, conditions, sizes, overshoot_price) for setup in setups]
        ledger.append(_ledger_row(outcomes, judging))
    return ledger


def _keys(rows: pd.DataFrame, devices: Mapping[str, int]) -> list[str]:
    """Return a text for each row. Rows with the same setup have the same text."""
    return [str(row_key(row, devices)) for row in rows_of(rows)]


def _outcome(
    runs: pd.DataFrame, known: JobConditions, sizes: Mapping[str, float], overshoot_price: float
) -> pd.Series[Any]:
    """Return the published row of a setup, with hours, dollars and loss at its measured step time.

    The measured step time is the median over the runs of the setup.

    runs: the runs of the setup, each joined with the published row.
    known: the start-up, checkpoint and interruption models.
    sizes: {workload: checkpoint bytes}.
    """
    (row, *_), step_s = rows_of(runs), float(runs["measured_step_s"].median())
    pools = [Pool(*(pool[name] for name in Pool._fields)) for pool in row["pools"]]
    counts = np.array([[pool["count"] for pool in row["pools"]]])
    conditions = known.gangs(pools, counts, sizes.get(row["workload"], 0.0))
    conditions = conditions.later(known.compile_s(row["workload"], mode_of(row)))
    work_hours = [-(-row["samples"] // row["global_batch"]) * step_s / 3600]
    hours, price = float(expected_hours(work_hours, conditions)[0]), row["usd_per_hour"]
    goal = Goal(
        goal=row["goal"],
        hours=row["constraint_hours"],
        usd=row["constraint_usd"],
        p_required=None if pd.isna(row["p_required"]) else row["p_required"],
        overshoot_price=overshoot_price,
    )
    drawn = drawn_hours(np.full((1, _DRAWS), work_hours), work_hours, conditions, seed=0)
    meeting = drawn_meeting(drawn if goal.used == "hours" else drawn * price, goal.limit)
    found: Row = {"step_s": step_s, "hours": hours, "usd": hours * price, "runs": len(runs)}
    found["p_meets"] = float(meeting.chance[0]) if goal.constraint else None
    found["holds"] = not misses(goal, meeting.chance)[0]
    found["loss"] = float(losses(goal, np.log([found[goal.objective]]), meeting)[0])
    return pd.Series(row | found, dtype=object)


def _ledger_row(outcomes: list[pd.Series[Any]], used: pd.DataFrame) -> Row:
    """Return the row of raw_ledger that compares a published choice with its rivals.

    Rivals are the alternatives that were published with the choice.

    outcomes: published rows with hours, dollars and loss at the measured step time. The row of the
        choice is first, and the rows of the measured rivals follow.
    used: the runs from which the outcomes were computed.
    """
    choice, *rivals = outcomes
    finite = [rival for rival in rivals if np.isfinite(rival["loss"])]
    best = min(finite, key=lambda rival: rival["loss"], default=pd.Series(dtype=object))
    verdict, regret = "compared", None
    if not choice["holds"]:
        verdict = "missed_constraint"
    elif not rivals:
        verdict = "no_rival_measured"
    else:
        regret = float(np.expm1(max(choice["loss"] - best.get("loss", np.inf), 0.0)))
    used = used.drop_duplicates("run_id").sort_values(["measured_at", "run_id"])
    low_s, high_s = choice["promised_step_low_s"], choice["promised_step_high_s"]
    row = {
        **choice[_KEPT],
        **choice[_MEASURED].add_prefix("measured_"),
        "evidence": _digest(used["run_id"]),
        "evidence_runs": len(used),
        "within_interval": bool(low_s <= choice["step_s"] <= high_s),
        "met_constraint": None if choice["p_meets"] is None else choice["holds"],
        "rivals_measured": len(rivals),
        **best.reindex(_RIVAL).add_prefix("best_rival_"),
        "verdict": verdict,
        "regret": regret,
        "first_measured_at": used["measured_at"].min(),
        "newest_measured_at": used["measured_at"].max(),
    }
    return {name: None if pd.isna(value) else value for name, value in row.items()}


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:16]

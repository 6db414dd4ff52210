"""What was promised, what happened, and the regret. Never decides anything: it only keeps the score.

    regret = objective of the choice at its measured step time
             / least objective of the measured setups that meet the constraint - 1

The objective is dollars for the cheapest goals and hours for the fastest; of the hours, the work scales with the step
time (models/job/cost.py). A choice that misses its constraint is a failure, and its cost is no comparison.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..domain.setup_table import Key, row_key, rows_of
from ..domain.workload import Goal
from ..job.cost import cost_at
from ..job.duration import Conditions, checkpoint_bytes, drawn_hours
from ..job.job_conditions import Circumstances, Pool, Stated
from ..planner.ranking import Row

_DRAWS = 400  # of interruptions, stratified
_QUESTION = ("provider", "workload", "goal", "constraint_hours", "constraint_usd")
_FROM_PROMISE = (
    *("provider", "publication_id", "published_at", "model_version", "workload", "goal", "constraint_hours"),
    *("constraint_usd", "p_required", "cluster", "market", "layout", "batch_per_device", "accumulation_steps"),
    *("strategy", "precision"),
)
_RIVAL = ("rank", "cluster", "market", "batch_per_device", "accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of a setup."""

    run_id: str
    measured_at: pd.Timestamp
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one published row: its runs, and the whole job at their median step time."""

    row: Mapping[str, Any]
    runs: tuple[Run, ...]
    step_s: float
    hours: float
    usd: float  # NaN where a price is unknown
    p_meets: float | None  # None where the goal has no constraint

    @property
    def met(self) -> bool:
        """Is the constraint met with the probability that was asked for?"""
        return self.p_meets is None or self.p_meets >= float(self.row["p_required"])

    def objective(self) -> float:
        """Dollars or hours, as the goal has it."""
        return self.usd if Goal(goal=str(self.row["goal"])).objective == "usd" else self.hours


def judge(
    promises: pd.DataFrame,
    runs: pd.DataFrame,
    workloads: pd.DataFrame,
    devices: Mapping[str, int],
    conditions: Circumstances | None = None,
) -> list[Row]:
    """One row a first choice of `promises` (columns of that mart) that some of `runs` measured after it was published.

    Equal promises - one question, one setup, one market - are judged where they were measured before the next one was
    published, each by the runs until the next that was judged so: no run counts for two of them. Runs without a time
    judge nothing. Rivals are the other setups named beside the choice; in another market it is the same setup.
    `workloads` gives gradient_bytes, `devices` those of an instance type where a layout is not given; `conditions` says
    what clusters meet (None: `Stated()`). Columns: those of the table raw_ledger but refresh_id and judged_at.
    """
    measured = _by_key(runs, devices)
    bytes_of = {row["workload"]: row.get("gradient_bytes") for row in rows_of(workloads)}
    named = [(row, row_key(row, devices)) for row in rows_of(promises)]
    beside: dict[tuple[str, ...], list[tuple[Row, Key]]] = {}
    equal: dict[tuple[Key, tuple[str, ...]], list[Row]] = {}
    for row, key in named:
        beside.setdefault(_promise(row), []).append((row, key))
        if int(row["rank"]) == 1:
            equal.setdefault((key, (*_question(row), str(row["market"]))), []).append(row)
    judged = []
    for (key, _), series in equal.items():
        own = [row for row in series if _within(measured.get(key, ()), row, row["promised_again_at"])]
        own.sort(key=lambda row: row["published_at"])
        ends = [*(row["published_at"] for row in own[1:]), None]
        for row, until in zip(own, ends, strict=False):  # of no promise measured there is one end too many
            meets = _meets(conditions or Stated(), bytes_of.get(row["workload"]))
            judged.append(_judged(row, beside[_promise(row)], measured, until, meets))
    return sorted(judged, key=lambda row: (row["published_at"], row["promise_id"]))


def _by_key(runs: pd.DataFrame, devices: Mapping[str, int]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = {}
    for row in rows_of(runs):
        if pd.isna(row["measured_at"]) or not float(row["step_s"]) > 0:
            continue
        run = Run(run_id=str(row["run_id"]), measured_at=row["measured_at"], step_s=float(row["step_s"]))
        found.setdefault(row_key(row, devices), []).append(run)
    return {key: sorted(mine, key=lambda run: (run.measured_at, run.run_id)) for key, mine in found.items()}


def _within(runs: Sequence[Run], row: Row, until: pd.Timestamp | None) -> tuple[Run, ...]:
    """Of `runs`, oldest first, those after `row` was published, up to `until` (missing: for ever)."""
    first = bisect_right(runs, row["published_at"], key=_time)
    return tuple(runs[first : None if until is None or pd.isna(until) else bisect_right(runs, until, key=_time)])


def _time(run: Run) -> pd.Timestamp:
    return run.measured_at


def _meets(conditions: Circumstances, gradient_bytes: float | None) -> Callable[[Row], Conditions]:
    """What a promised cluster meets, of a workload with so large a gradient."""

    def of(row: Row) -> Conditions:
        members = list(row["pools"])
        pools = [Pool(*(one[name] for name in Pool._fields)) for one in members]
        return conditions.gangs(pools, np.array([[one["count"] for one in members]]), checkpoint_bytes(gradient_bytes))

    return of


def _outcome(row: Row, runs: tuple[Run, ...], meets: Callable[[Row], Conditions]) -> Outcome:
    step_s = float(np.median([run.step_s for run in runs]))
    steps = -(-int(row["samples"]) // int(row["global_batch"]))
    conditions, price = meets(row), _number(row["usd_per_hour"])
    hours, usd = cost_at(step_s, steps=steps, conditions=conditions, usd_per_hour=price)
    what = Goal(goal=str(row["goal"])).constraint
    p_meets = None
    if what is not None:
        work = steps * step_s / 3600.0
        drawn = drawn_hours(np.full((1, _DRAWS), work), [work], conditions, seed=0)[0] * (
            1.0 if what == "hours" else price
        )
        p_meets = float(np.mean(drawn <= float(row[f"constraint_{what}"])))
    return Outcome(row=row, runs=runs, step_s=step_s, hours=hours, usd=usd, p_meets=p_meets)


def _judged(
    row: Row,
    named: Sequence[tuple[Row, Key]],
    measured: Mapping[Key, Sequence[Run]],
    until: pd.Timestamp | None,
    meets: Callable[[Row], Conditions],
) -> Row:
    own = next(key for other, key in named if other is row)
    choice = _outcome(row, _within(measured[own], row, until), meets)
    others = [(other, key) for other, key in named if key != own]
    since = {key: _within(measured.get(key, ()), row, until) for _, key in others}
    rivals = [_outcome(other, since[key], meets) for other, key in others if since[key]]
    met = [one for one in rivals if one.met and np.isfinite(one.objective())]
    best = min(met, key=Outcome.objective, default=None)
    used = sorted((run for one in (choice, *rivals) for run in one.runs), key=lambda run: (run.measured_at, run.run_id))
    verdict = "missed_constraint" if not choice.met else "compared" if rivals else "no_rival_measured"
    least = min([choice.objective(), *([] if best is None else [best.objective()])])
    judged = {name: row[name] for name in _FROM_PROMISE} | {
        "promise_id": _digest(_promise(row)),
        "evidence": _digest(tuple(run.run_id for run in used)),
        "evidence_runs": len({run.run_id for run in used}),
        "promised_step_s": row["step_s"],
        "promised_step_low_s": row["step_low_s"],
        "promised_step_high_s": row["step_high_s"],
        "promised_hours": row["hours"],
        "promised_usd": row["usd"],
        "promised_p_meets": row["p_meets_constraint"],
        "runs": len(choice.runs),
        "measured_step_s": choice.step_s,
        "measured_hours": choice.hours,
        "measured_usd": choice.usd,
        "measured_p_meets": choice.p_meets,
        "within_interval": bool(row["step_low_s"] <= choice.step_s <= row["step_high_s"]),
        "met_constraint": None if choice.p_meets is None else choice.met,
        "rivals_named": len(since),
        "rivals_measured": sum(bool(found) for found in since.values()),
        **{f"best_rival_{name}": None if best is None else best.row[name] for name in _RIVAL},
        "best_rival_step_s": None if best is None else best.step_s,
        "best_rival_hours": None if best is None else best.hours,
        "best_rival_usd": None if best is None else best.usd,
        "verdict": verdict,
        "regret": choice.objective() / least - 1.0 if verdict == "compared" else None,
        "first_measured_at": used[0].measured_at,
        "newest_measured_at": used[-1].measured_at,
    }
    return {name: None if pd.isna(value) else value for name, value in judged.items()}


def _number(value: float | None) -> float:
    return float("nan") if value is None or pd.isna(value) else float(value)


def _question(row: Row) -> tuple[str, ...]:
    return tuple("" if pd.isna(row[name]) else str(row[name]) for name in _QUESTION)


def _promise(row: Row) -> tuple[str, ...]:
    return (str(row["publication_id"]), *_question(row))


def _digest(texts: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def ledger_summary(ledger: pd.DataFrame) -> dict[str, float | int | None]:
    """Of the mart regret_ledger: choices measured and compared, failures, mean and worst regret, part in interval."""
    compared = ledger[ledger["verdict"] == "compared"]["regret"].astype(float)
    return {
        "measured": len(ledger),
        "compared": len(compared),
        "failures": int((ledger["verdict"] == "missed_constraint").sum()),
        "mean_regret": float(compared.mean()) if len(compared) else None,
        "worst_regret": float(compared.max()) if len(compared) else None,
        "within_interval": float(ledger["within_interval"].astype(float).mean()) if len(ledger) else None,
    }

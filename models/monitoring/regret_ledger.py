"""What was promised, what happened, and the regret. Never decides anything: it only keeps the score.

    regret = exp(loss of the choice at its measured step time - least loss of the measured setups) - 1

The loss is that of `planner/choice_rule.py`: dollars for the cheapest goals and hours for the fastest, times what
overshooting counts for; where a probability was required, of the setups that meet the constraint with it. Of the hours,
the work scales with the step time (models/job/cost.py). A choice that misses its constraint is a failure, and its cost
is no comparison.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from ..domain.setup_table import Key, row_key, rows_of
from ..domain.workload import OVERSHOOT_PRICE, Goal, Mode
from ..job.checkpoints import checkpoint_bytes
from ..job.cost import cost_at
from ..job.duration import Conditions, drawn_hours
from ..job.job_conditions import JobConditions, Pool, Stated
from ..planner.choice_rule import drawn_meeting, losses, misses
from ..planner.ranking import Row

_DRAWS = 400  # of interruptions, stratified
_QUESTION = ("provider", "workload", "goal", "constraint_hours", "constraint_usd")
_FROM_PROMISE = (
    *(
        "provider",
        "publication_id",
        "published_at",
        "model_version",
        "workload",
        "goal",
        "constraint_hours",
    ),
    *(
        "constraint_usd",
        "p_required",
        "cluster",
        "market",
        "layout",
        "batch_per_device",
        "accumulation_steps",
    ),
    *("strategy", "precision", "switches"),
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
    met: bool  # the constraint, with the probability that was asked for, or else with even odds
    loss: float  # by the rule of choice


def judge(
    promises: pd.DataFrame,
    runs: pd.DataFrame,
    workloads: pd.DataFrame,
    devices: Mapping[str, int],
    conditions: JobConditions | None = None,
    overshoot_price: float = OVERSHOOT_PRICE,
) -> list[Row]:
    """One row a first choice of `promises` (columns of that mart) that some of `runs` measured after it was published.

    Equal promises - one question, one setup, one market - are judged where they were measured before the next one was
    published, each by the runs until the next that was judged so: no run counts for two of them. Runs without a time
    judge nothing. Rivals are the other setups named beside the choice; in another market it is the same setup.
    `workloads` gives the bytes of gradients or checkpoints, `devices` those of an instance type where a layout is not
    given; `conditions` says what clusters meet (None: `Stated()`), `overshoot_price` what overshooting costs. Columns:
    those of the table raw_ledger but refresh_id and judged_at.
    """
    measured = _by_key(runs, devices)
    bytes_of = {
        row["workload"]: checkpoint_bytes(row.get("gradient_bytes"), row.get("checkpoint_bytes"))
        for row in rows_of(workloads)
    }
    named = [(row, row_key(row, devices)) for row in rows_of(promises)]
    beside: dict[tuple[str, ...], list[tuple[Row, Key]]] = {}
    equal: dict[tuple[Key, tuple[str, ...]], list[Row]] = {}
    for row, key in named:
        beside.setdefault(_promise(row), []).append((row, key))
        if int(row["rank"]) == 1:
            equal.setdefault((key, (*_question(row), str(row["market"]))), []).append(row)
    judged = []
    for (key, _), series in equal.items():
        own = [
            row for row in series if _within(measured.get(key, ()), row, row["promised_again_at"])
        ]
        own.sort(key=lambda row: row["published_at"])
        ends = [*(row["published_at"] for row in own[1:]), None]
        for row, until in zip(
            own, ends, strict=False
        ):  # of no promise measured there is one end too many
            meets = _meets(conditions or Stated(), bytes_of.get(row["workload"], 0.0))
            outcome = partial(_outcome, meets=meets, overshoot_price=overshoot_price)
            judged.append(_judged(row, beside[_promise(row)], measured, until, outcome))
    return sorted(judged, key=lambda row: (row["published_at"], row["promise_id"]))


def _by_key(runs: pd.DataFrame, devices: Mapping[str, int]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = {}
    for row in rows_of(runs):
        if pd.isna(row["measured_at"]) or not float(row["step_s"]) > 0:
            continue
        run = Run(
            run_id=str(row["run_id"]), measured_at=row["measured_at"], step_s=float(row["step_s"])
        )
        found.setdefault(row_key(row, devices), []).append(run)
    return {
        key: sorted(mine, key=lambda run: (run.measured_at, run.run_id))
        for key, mine in found.items()
    }


def _within(runs: Sequence[Run], row: Row, until: pd.Timestamp | None) -> tuple[Run, ...]:
    """Of `runs`, oldest first, those after `row` was published, up to `until` (missing: for ever)."""
    first = bisect_right(runs, row["published_at"], key=_time)
    return tuple(
        runs[
            first : None
            if until is None or pd.isna(until)
            else bisect_right(runs, until, key=_time)
        ]
    )


def _time(run: Run) -> pd.Timestamp:
    return run.measured_at


def _meets(conditions: JobConditions, state_bytes: float) -> Callable[[Row], Conditions]:
    """What a promised cluster meets, of a workload whose checkpoints are of so many bytes."""

    def of(row: Row) -> Conditions:
        members = list(row["pools"])
        pools = [Pool(*(one[name] for name in Pool._fields)) for one in members]
        mode = Mode(*(str(row[name]) for name in Mode._fields))
        met = conditions.gangs(pools, np.array([[one["count"] for one in members]]), state_bytes)
        return met.later(conditions.compilation.seconds(str(row["workload"]), mode))

    return of


def _outcome(
    row: Row, runs: tuple[Run, ...], *, meets: Callable[[Row], Conditions], overshoot_price: float
) -> Outcome:
    step_s = float(np.median([run.step_s for run in runs]))
    steps = -(-int(row["samples"]) // int(row["global_batch"]))
    conditions, price = meets(row), _number(row["usd_per_hour"])
    hours, usd = cost_at(step_s, steps=steps, conditions=conditions, usd_per_hour=price)
    required = _number(row["p_required"])
    goal = Goal(
        goal=str(row["goal"]),
        p_required=None if np.isnan(required) else required,
        overshoot_price=overshoot_price,
    )
    what, meeting, met = goal.constraint, None, True
    if what is not None:
        work = steps * step_s / 3600.0
        drawn = drawn_hours(np.full((1, _DRAWS), work), [work], conditions, seed=0)
        meeting = drawn_meeting(
            drawn if what == "hours" else drawn * price, float(row[f"constraint_{what}"])
        )
        met = not misses(goal, meeting.chance)[0]
    return Outcome(
        row=row,
        runs=runs,
        step_s=step_s,
        hours=hours,
        usd=usd,
        p_meets=None if meeting is None else float(meeting.chance[0]),
        met=met,
        loss=float(losses(goal, np.log([usd if goal.objective == "usd" else hours]), meeting)[0]),
    )


def _judged(
    row: Row,
    named: Sequence[tuple[Row, Key]],
    measured: Mapping[Key, Sequence[Run]],
    until: pd.Timestamp | None,
    outcome: Callable[[Row, tuple[Run, ...]], Outcome],
) -> Row:
    own = next(key for other, key in named if other is row)
    choice = outcome(row, _within(measured[own], row, until))
    others = [(other, key) for other, key in named if key != own]
    since = {key: _within(measured.get(key, ()), row, until) for _, key in others}
    rivals = [outcome(other, since[key]) for other, key in others if since[key]]
    best = min(
        (one for one in rivals if np.isfinite(one.loss)), key=attrgetter("loss"), default=None
    )
    used = sorted(
        (run for one in (choice, *rivals) for run in one.runs),
        key=lambda run: (run.measured_at, run.run_id),
    )
    verdict = (
        "missed_constraint" if not choice.met else "compared" if rivals else "no_rival_measured"
    )
    least = choice.loss if best is None else min(choice.loss, best.loss)
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
        "regret": float(np.expm1(choice.loss - least)) if verdict == "compared" else None,
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
        "within_interval": float(ledger["within_interval"].astype(float).mean())
        if len(ledger)
        else None,
    }

"""The regret of published choices, by the runs that were measured after their publication.

    regret = exp(loss of the choice at its measured step time - least loss of the measured setups)
    - 1

The loss is that of `planner/choice_rule.py`. Of the hours, the work scales with the step time. A
choice that misses its constraint is a failure: its cost is no comparison.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_QUESTION = ["provider", "workload", "goal", "constraint_hours", "constraint_usd"]
_SETUP = [
    *["cluster", "market", "layout", "batch_per_device", "accumulation_steps"],
    *["strategy", "precision", "switches"],
]
_FROM_PROMISE = ["publication_id", "published_at", "model_version", "p_required"]
_PROMISED = ["step_s", "step_low_s", "step_high_s", "hours", "usd"]
_RIVAL = ["rank", "cluster", "market", "batch_per_device", "accumulation_steps"]


class _Run(NamedTuple):
    measured_at: pd.Timestamp
    run_id: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The whole job of a published row at the median step time of its runs."""

    row: Row
    runs: Sequence[_Run]
    step_s: float
    hours: float
    usd: float  # NaN where a price is unknown
    p_meets: float | None  # None without a constraint
    holds: bool  # the constraint, with the required probability or even odds
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    runs: Mapping[Key, Sequence[_Run]]
    state_bytes: Mapping[str, float]
    conditions: JobConditions
    overshoot_price: float

    def between(self, key: Key, after: pd.Timestamp, until: Any) -> list[_Run]:
        """Return runs of a setup after `after`, up to `until` (missing: for ever)."""
        runs = (run for run in self.runs.get(key, ()) if run.measured_at > after)
        return [run for run in runs if pd.isna(until) or run.measured_at <= until]

    def conditions_of(self, row: Row) -> Conditions:
        pools = [Pool(*(pool[name] for name in Pool._fields)) for pool in row["pools"]]
        counts = np.array([[pool["count"] for pool in row["pools"]]])
        mode = Mode(*(str(row[name]) for name in Mode._fields))
        compile_s = self.conditions.compilation.seconds(str(row["workload"]), mode)
        state_bytes = self.state_bytes.get(row["workload"], 0.0)
        return self.conditions.gangs(pools, counts, state_bytes).later(compile_s)

    def outcome(self, row: Row, runs: Sequence[_Run]) -> _Outcome:
        step_s = float(np.median([run.step_s for run in runs]))
        steps = -(-int(row["samples"]) // int(row["global_batch"]))
        conditions, price = self.conditions_of(row), _number(row["usd_per_hour"])
        hours, usd = cost_at(step_s, steps=steps, conditions=conditions, usd_per_hour=price)
        required = _number(row["p_required"])
        goal = Goal(
            goal=str(row["goal"]),
            p_required=None if np.isnan(required) else required,
            overshoot_price=self.overshoot_price,
        )
        meeting = None
        if goal.constraint is not None:
            work = steps * step_s / 3600.0
            drawn = drawn_hours(np.full((1, _DRAWS), work), [work], conditions, seed=0)
            used = drawn if goal.constraint == "hours" else drawn * price
            meeting = drawn_meeting(used, float(row[f"constraint_{goal.constraint}"]))
        aim = np.log([usd if goal.objective == "usd" else hours])
        return _Outcome(
            row=row,
            runs=runs,
            step_s=step_s,
            hours=hours,
            usd=usd,
            p_meets=None if meeting is None else float(meeting.chance[0]),
            holds=meeting is None or not misses(goal, meeting.chance)[0],
            loss=float(losses(goal, aim, meeting)[0]),
        )


def judge(
    promises: pd.DataFrame,
    runs: pd.DataFrame,
    workloads: pd.DataFrame,
    devices: Mapping[str, int],
    conditions: JobConditions | None = None,
    overshoot_price: float = OVERSHOOT_PRICE,
) -> list[Row]:
    """Return a row of raw_ledger for each first choice in `promises` with runs after it.

    Equal promises (question, setup, market) are judged where they were measured before the next
    was published, each by the runs until the next judged promise: no run counts twice. Rivals are
    the other setups published beside the choice. `devices` are those of an instance type, for rows
    without a layout.
    """
    known = _Judge(
        runs=_by_setup(runs, devices),
        state_bytes={
            row["workload"]: checkpoint_bytes(
                row.get("gradient_bytes"), row.get("checkpoint_bytes")
            )
            for row in rows_of(workloads)
        },
        conditions=conditions or Stated(),
        overshoot_price=overshoot_price,
    )
    published: dict[tuple[str, ...], list[tuple[Row, Key]]] = defaultdict(list)
    equal: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows_of(promises):
        key = row_key(row, devices)
        published[_promise(row)].append((row, key))
        runs_before_next = known.between(key, row["published_at"], row["promised_again_at"])
        if int(row["rank"]) == 1 and runs_before_next:
            equal[key, _texts(row, [*_QUESTION, "market"])].append(row)
    judged = []
    for (key, _), series in equal.items():
        series.sort(key=lambda row: row["published_at"])
        ends = [*(row["published_at"] for row in series[1:]), None]
        for row, until in zip(series, ends, strict=True):
            after = row["published_at"]
            choice = known.outcome(row, known.between(key, after, until))
            others = {other: rival for rival, other in published[_promise(row)] if other != key}
            since = {other: known.between(other, after, until) for other in others}
            rivals = [known.outcome(others[at], seen) for at, seen in since.items() if seen]
            judged.append(_judged(choice, rivals, len(others)))
    return sorted(judged, key=lambda row: (row["published_at"], row["promise_id"]))


def _by_setup(runs: pd.DataFrame, devices: Mapping[str, int]) -> dict[Key, list[_Run]]:
    found: dict[Key, list[_Run]] = defaultdict(list)
    for row in rows_of(runs):
        if pd.notna(row["measured_at"]) and float(row["step_s"]) > 0:
            run = _Run(row["measured_at"], str(row["run_id"]), float(row["step_s"]))
            found[row_key(row, devices)].append(run)
    return found


def _judged(choice: _Outcome, rivals: Sequence[_Outcome], rivals_named: int) -> Row:
    row = choice.row
    finite = [rival for rival in rivals if np.isfinite(rival.loss)]
    best = min(finite, key=lambda rival: rival.loss, default=None)
    used = sorted({run for outcome in (choice, *rivals) for run in outcome.runs})
    regret = None
    if not choice.holds:
        verdict = "missed_constraint"
    elif not rivals:
        verdict = "no_rival_measured"
    else:
        verdict = "compared"
        least = choice.loss if best is None else min(choice.loss, best.loss)
        regret = float(np.expm1(choice.loss - least))
    judged = {
        **{name: row[name] for name in [*_QUESTION, *_SETUP, *_FROM_PROMISE]},
        **{f"promised_{name}": row[name] for name in _PROMISED},
        "promised_p_meets": row["p_meets_constraint"],
        "promise_id": _digest(_promise(row)),
        "evidence": _digest(run.run_id for run in used),
        "evidence_runs": len(used),
        "runs": len(choice.runs),
        "measured_step_s": choice.step_s,
        "measured_hours": choice.hours,
        "measured_usd": choice.usd,
        "measured_p_meets": choice.p_meets,
        "within_interval": bool(row["step_low_s"] <= choice.step_s <= row["step_high_s"]),
        "met_constraint": None if choice.p_meets is None else choice.holds,
        "rivals_named": rivals_named,
        "rivals_measured": len(rivals),
        **{f"best_rival_{name}": None if best is None else best.row[name] for name in _RIVAL},
        "best_rival_step_s": None if best is None else best.step_s,
        "best_rival_hours": None if best is None else best.hours,
        "best_rival_usd": None if best is None else best.usd,
        "verdict": verdict,
        "regret": regret,
        "first_measured_at": used[0].measured_at,
        "newest_measured_at": used[-1].measured_at,
    }
    return {name: None if pd.isna(value) else value for name, value in judged.items()}


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _texts(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    return tuple("" if pd.isna(row[name]) else str(row[name]) for name in names)


def _promise(row: Row) -> tuple[str, ...]:
    return _texts(row, ["publication_id", *_QUESTION])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def ledger_summary(ledger: pd.DataFrame) -> dict[str, float | int | None]:
    """Summarise the mart regret_ledger."""
    regret = ledger[ledger["verdict"] == "compared"]["regret"].astype(float)
    inside = ledger["within_interval"].astype(float).mean() if len(ledger) else None
    return {
        "measured": len(ledger),
        "compared": len(regret),
        "failures": int((ledger["verdict"] == "missed_constraint").sum()),
        "mean_regret": float(regret.mean()) if len(regret) else None,
        "worst_regret": float(regret.max()) if len(regret) else None,
        "within_interval": None if inside is None else float(inside),
    }

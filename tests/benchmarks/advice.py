"""Does the advice hold? Ten questions, each answer run for real beside its runner-up and what habit would pick.

`python -m tests.benchmarks.advice`

regret = (true cost of the choice) / (best true cost of the three) - 1, at one global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import typer

from flows.cli import explained
from models.campaign.campaign import Launch
from models.domain.cluster import Cluster, Offer, parse_numbers
from models.domain.workload import Goal, Setup, Workload
from models.job.checkpoints import checkpoint_bytes
from models.job.cost import cost_at
from models.job.job_conditions import JobConditions, pools_of
from tasks.market.job_conditions import job_conditions
from tasks.market.offers import current_offers, with_known_facts
from tasks.recommendation.recommend import recommend_one
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.training.registry import Champion, load_champion
from tasks.workspace.workspace import Workspace, new_refresh_id, open_workspace
from tests.benchmarks.trial import Unseen, key, keys_of, launch_of, measure_all, split_by_cores
from warehouse.reads import mart

HABITS = ("cheapest per hour", "fastest type", "most machines")
TIGHTNESS = (1.15, 2.0, 1.4, 3.0)  # of a constraint, as a multiple of the least that can be had


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A workload with one goal, and the setups that answer it: (role, setup, predicted step seconds or NaN)."""

    workload: Workload
    goal: Goal
    answers: tuple[tuple[str, Setup, float], ...]


def ask(here: Workspace, count: int) -> list[Question]:
    """`count` questions, workload by workload, in turn under a deadline and a budget of varying tightness.

    Raises ValueError where no champion is in force.
    """
    champion = load_champion(here.home, here.provider.name)
    if champion is None:
        raise ValueError("no champion is in force yet: run `srift refresh` first")
    offers, runs = current_offers(here), mart(here.warehouse, "runs", provider=here.provider.name)
    workloads = [with_known_facts(here, workload) for workload in here.measurable]
    questions = []
    for number in range(count):
        workload = workloads[number % len(workloads)]
        extremes = {
            row["goal"]: row for row in recommend_one(here, champion, workload, offers, runs, top=1)
        }
        slack = TIGHTNESS[(number // len(workloads)) % len(TIGHTNESS)]
        goal = Goal(
            goal="cheapest_within_deadline",
            hours=round(extremes["fastest"]["hours_p90"] * slack, 3),
        )
        if number % 2:
            goal = Goal(
                goal="fastest_within_budget", usd=round(extremes["cheapest"]["usd_p90"] * slack, 4)
            )
        questions.append(
            _answered(
                here, champion, replace(workload, goals=(goal,)), offers, runs, HABITS[number % 3]
            )
        )
    return questions


def launches_for(here: Workspace, questions: Sequence[Question]) -> list[Launch]:
    """One launch for each distinct cluster, with every setup that runs on it."""
    wanted: dict[str, tuple[Cluster, dict[Any, Unseen]]] = {}
    for question in questions:
        for _, setup, _ in question.answers:
            item = Unseen(
                workload=setup.workload,
                nodes=tuple(range(len(setup.cluster.members))),
                batches=setup.batch_per_device,
                accumulation_steps=setup.accumulation_steps,
            )
            wanted.setdefault(setup.cluster.name, (setup.cluster, {}))[1][item] = item
    return [
        launch_of(cluster, items, "advice put to the test") for cluster, items in wanted.values()
    ]


def judge(
    questions: Sequence[Question], measured: pd.DataFrame, conditions: JobConditions
) -> pd.DataFrame:
    """A row a question and role: measured hours and dollars, and the regret of those that meet against the best.

    `conditions` says what start-up and interruptions each cluster meets.
    """
    by_key = {
        name: float(step_s)
        for name, step_s in zip(_keys(measured), measured["step_s"], strict=True)
    }
    rows: list[dict[str, Any]] = []
    for number, question in enumerate(questions, start=1):
        own = []
        for role, setup, predicted_s in question.answers:
            step_s = by_key.get(_key(setup), np.nan)
            hours, usd = _true_cost(question.workload, setup, step_s, conditions)
            own.append(_row(number, question, role, setup, predicted_s, step_s, hours, usd))
        aim = "usd" if question.goal.goal.startswith("cheapest") else "hours"
        best = min(
            (row[aim] for row in own if row["meets"] and np.isfinite(row[aim])), default=np.nan
        )
        for (
            row
        ) in own:  # a choice that misses its constraint is a failure, and its cost no comparison
            row["regret"] = row[aim] / best - 1.0 if row["meets"] else np.nan
        rows += own
    return pd.DataFrame(rows)


def by_role(judged: pd.DataFrame) -> pd.DataFrame:
    """A row a role: how many ran, how many met their constraint, mean and worst regret, mean error of the step time."""
    rows = [
        {
            "role": role,
            "ran": int(own["step_s"].notna().sum()),
            "met": int(own["meets"].sum()),
            "mean_regret": own["regret"].mean(),
            "worst_regret": own["regret"].max(),
            "mean_step_error": own["step_error"].abs().mean(),
        }
        for role, own in judged.groupby("role", sort=False)
    ]
    return pd.DataFrame(rows)


def _answered(
    here: Workspace,
    champion: Champion,
    workload: Workload,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    habit: str,
) -> Question:
    goal = workload.goals[0]
    rows = [
        r
        for r in recommend_one(here, champion, workload, offers, runs, top=3)
        if r["goal"] == goal.goal
    ]
    rows = [
        row for row in rows if row["cluster"] is not None and row["status"] != "misses_constraint"
    ]
    named = [
        (role, _setup(row, offers), row["step_s"])
        for role, row in zip(("advised", "runner-up"), rows, strict=False)
    ]
    first = named[0][1]
    by_habit = _habitual(
        here, habit, workload.name, first.global_batch, offers, first.cluster.members[0].market
    )
    return Question(workload=workload, goal=goal, answers=(*named, (habit, by_habit, float("nan"))))


def _setup(row: dict[str, Any], offers: Sequence[Offer]) -> Setup:
    by_name = {(offer.instance_type.name, offer.market): offer for offer in offers}
    members = [
        by_name[one["instance_type"], one["market"]]
        for one in row["cluster_offers"]
        for _ in range(one["count"])
    ]
    return Setup(
        workload=row["workload"],
        cluster=Cluster(members=tuple(members)),
        layout=(1,) * len(members),
        batch_per_device=parse_numbers(row["batch_per_device"], len(members), "batch_per_device"),
        accumulation_steps=row["accumulation_steps"],
    )


def _habitual(
    here: Workspace,
    habit: str,
    workload: str,
    global_batch: int,
    offers: Sequence[Offer],
    market: str,
) -> Setup:
    """What somebody without a table would take, at the same global batch and market."""
    mine = [offer for offer in offers if offer.market == market and offer.usd_per_hour is not None]
    cheapest = min(mine, key=lambda offer: offer.total_usd_per_hour or 0.0)
    fastest = max(mine, key=lambda offer: offer.instance_type.cores)
    members = {"cheapest per hour": [cheapest], "fastest type": [fastest]}.get(habit)
    if members is None:
        sizes = range(here.settings.campaign.max_hosts, 0, -1)
        members = next(
            [cheapest] * n for n in sizes if not here.fits(Cluster(members=(cheapest,) * n))
        )
    return Setup(
        workload=workload,
        cluster=Cluster(members=tuple(members)),
        layout=(1,) * len(members),
        batch_per_device=split_by_cores([1.0] * len(members), global_batch),
    )


def _true_cost(
    workload: Workload, setup: Setup, step_s: float, conditions: JobConditions
) -> tuple[float, float]:
    """Hours and dollars of the whole job at a measured step time, start-up and interruptions at their expectation."""
    return cost_at(
        step_s,
        steps=-(-workload.samples // setup.global_batch),
        conditions=conditions.gangs(
            *pools_of([setup.cluster]),
            checkpoint_bytes(workload.gradient_bytes, workload.checkpoint_bytes),
        ),
        usd_per_hour=setup.cluster.total_usd_per_hour or np.nan,
    )


def _row(
    number: int,
    question: Question,
    role: str,
    setup: Setup,
    predicted_s: float,
    step_s: float,
    hours: float,
    usd: float,
) -> dict[str, Any]:
    goal = question.goal
    meets = (goal.hours is None or hours <= goal.hours) and (goal.usd is None or usd <= goal.usd)
    return {
        "question": number,
        "workload": setup.workload,
        "constraint": f"{goal.hours:g} h" if goal.hours is not None else f"${goal.usd:g}",
        "role": role,
        "cluster": setup.cluster.name,
        "market": setup.cluster.members[0].market,
        "batch": "+".join(map(str, setup.batch_per_device)),
        "accumulation": setup.accumulation_steps,
        "step_s": step_s,
        "step_error": predicted_s / step_s - 1.0,
        "hours": hours,
        "usd": usd,
        "meets": meets,
    }


def _key(setup: Setup) -> tuple[Any, int]:
    types = [offer.instance_type.name for offer in setup.cluster.members]
    return key(setup.workload, types, setup.batch_per_device), setup.accumulation_steps


def _keys(measured: pd.DataFrame) -> list[tuple[Any, int]]:
    return [
        (next(iter(keys_of(measured.iloc[[at]]))), int(measured["accumulation_steps"].iloc[at]))
        for at in range(len(measured))
    ]


def advice(questions: int = 10) -> None:
    """Ask, measure every named setup, and print hours, dollars and regret of each answer."""
    here = open_workspace("local")
    asked = ask(here, questions)
    trial_id = f"advice-{new_refresh_id(datetime.now(UTC))}"
    with reporting_to(live_reporter()):
        measured = measure_all(here, launches_for(here, asked), trial_id)
    judged = judge(asked, measured, job_conditions(here))
    folder = here.home / "trials"
    folder.mkdir(exist_ok=True)
    judged.to_csv(folder / f"{trial_id}.csv", index=False)
    print_frame(judged, f"{len(asked)} questions, {len(measured)} runs")
    print_frame(
        by_role(judged),
        "by role: how many met their constraint, regret of those that did, error of the promise",
    )


if __name__ == "__main__":
    with explained():
        typer.run(advice)

"""Does the advice hold? Ten questions: the answer, its runner-up and a habit's choice are measured.

regret = (true cost of the choice) / (best true cost of the three) - 1, at one global batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import typer

from models.domain.cluster import Cluster, Offer, parse_numbers
from models.domain.optimizer_state import checkpoint_bytes
from models.domain.workload import Goal, Setup, Workload
from models.job.duration import expected_hours
from models.job.job_conditions import JobConditions, pools_of
from tasks.market.job_conditions import experience_of
from tasks.market.offers import current_offers, with_facts
from tasks.recommendation.case import Case
from tasks.training.registry import Champion, load_champion
from tasks.workspace.workspace import Workspace, open_workspace
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.hosts import Unseen, launch_of, measure_all, split_by_cores, trial_name

HABITS = ("cheapest per hour", "fastest type", "most machines")
TIGHTNESS = (1.15, 2.0, 1.4, 3.0)  # of a limit, as a multiple of the least possible
ADVISED = "advised"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A workload with one goal, and the setups to compare by role."""

    workload: Workload
    goal: Goal
    answers: dict[str, Setup]


def questions(here: Workspace, champion: Champion, count: int) -> list[Question]:
    """`count` questions, in turn under a deadline and a budget of varying tightness."""
    offers, runs = current_offers(here), here.warehouse.select("runs", {"provider": "local"})
    facts = here.mart("workloads")
    workloads = [with_facts(workload, facts) for workload in here.measurable]
    found = []
    for number in range(count):
        workload = workloads[number % len(workloads)]
        slack = TIGHTNESS[(number // len(workloads)) % len(TIGHTNESS)]
        rows = Case.of(here, champion, workload, offers, runs).plan(top=1).rows
        extremes = {row["goal"]: row for row in rows}
        if number % 2:
            usd = round(extremes["cheapest"]["usd_p90"] * slack, 4)
            goal = Goal(goal="fastest_within_budget", usd=usd)
        else:
            hours = round(extremes["fastest"]["hours_p90"] * slack, 3)
            goal = Goal(goal="cheapest_within_deadline", hours=hours)
        job = replace(workload, goals=(goal,))
        rows = Case.of(here, champion, job, offers, runs).plan(top=3).rows
        ranked = [
            row
            for row in rows
            if row["goal"] == goal.goal and row["cluster"] and row["status"] != "misses_constraint"
        ]
        roles = zip((ADVISED, "runner-up"), ranked, strict=False)
        answers = {role: _setup(row, offers) for role, row in roles}
        habit = HABITS[number % len(HABITS)]
        answers[habit] = _habitual(here, habit, answers[ADVISED], offers)
        found.append(Question(workload=job, goal=goal, answers=answers))
    return found


def _setup(row: dict[str, Any], offers: Sequence[Offer]) -> Setup:
    by_name = {(offer.instance_type.name, offer.market): offer for offer in offers}
    members = [
        by_name[pool["instance_type"], pool["market"]]
        for pool in row["cluster_offers"]
        for _ in range(pool["count"])
    ]
    return Setup(
        workload=row["workload"],
        cluster=Cluster(members=tuple(members)),
        layout=(1,) * len(members),
        batch_per_device=parse_numbers(row["batch_per_device"], len(members), "batch_per_device"),
        accumulation_steps=row["accumulation_steps"],
    )


def _habitual(here: Workspace, habit: str, advised: Setup, offers: Sequence[Offer]) -> Setup:
    """The habit's choice at the same global batch and market."""
    market = advised.cluster.members[0].market
    priced = [
        offer for offer in offers if offer.market == market and offer.usd_per_hour is not None
    ]
    cheapest = min(priced, key=lambda offer: offer.total_usd_per_hour or 0.0)
    if habit == "fastest type":
        members = [max(priced, key=lambda offer: offer.instance_type.cores)]
    else:
        most = here.settings.campaign.max_hosts if habit == "most machines" else 1
        clusters = (Cluster(members=(cheapest,) * size) for size in range(most, 0, -1))
        members = list(
            next(cluster for cluster in clusters if not here.provider.fits(cluster)).members
        )
    return Setup(
        workload=advised.workload,
        cluster=Cluster(members=tuple(members)),
        layout=(1,) * len(members),
        batch_per_device=split_by_cores([1.0] * len(members), advised.global_batch),
    )


def measured_seconds(here: Workspace, questions: Sequence[Question]) -> dict[Setup, float]:
    """Measure each distinct setup, one launch a cluster; return seconds of a step."""
    setups = list(
        dict.fromkeys(answer for question in questions for answer in question.answers.values())
    )
    by_cluster: dict[Cluster, list[Setup]] = {}
    for setup in setups:
        by_cluster.setdefault(setup.cluster, []).append(setup)
    launches = []
    for cluster, group in by_cluster.items():
        nodes = tuple(range(len(cluster.members)))
        items = [
            Unseen(
                workload=setup.workload,
                nodes=nodes,
                batches=setup.batch_per_device,
                accumulation_steps=setup.accumulation_steps,
            )
            for setup in group
        ]
        launches.append(launch_of(cluster, items, "to judge advice"))
    runs = measure_all(here, launches, trial_name("advice"))
    columns = ["workload", "cluster", "batch_per_device", "accumulation_steps"]
    found = runs.groupby(columns)["step_s"].median().to_dict()
    rows = {setup: setup.row() for setup in setups}
    return {
        setup: found.get(tuple(rows[setup][name] for name in columns), np.nan) for setup in setups
    }


def judge(
    questions: Sequence[Question], step_s: dict[Setup, float], conditions: JobConditions
) -> pd.DataFrame:
    """A row a question and role: measured hours and dollars, meets, regret of choices that meet."""
    rows = []
    for number, question in enumerate(questions, 1):
        goal, options = question.goal, []
        for role, setup in question.answers.items():
            hours, usd = _true_cost(question.workload, setup, step_s[setup], conditions)
            meets = (goal.hours is None or hours <= goal.hours) and (
                goal.usd is None or usd <= goal.usd
            )
            aim = usd if goal.objective == "usd" else hours
            options.append((number, role, setup.cluster.name, hours, usd, meets, aim))
        frame = pd.DataFrame(
            options, columns=["question", "role", "cluster", "hours", "usd", "meets", "aim"]
        )
        best = frame["aim"][frame["meets"]].min()
        rows.append(frame.assign(regret=(frame["aim"] / best - 1).where(frame["meets"])))
    return pd.concat(rows, ignore_index=True)


def _true_cost(
    workload: Workload, setup: Setup, step_s: float, conditions: JobConditions
) -> tuple[float, float]:
    """Hours and dollars of the job at a measured step, start-up and interruptions as expected."""
    size = checkpoint_bytes(workload.gradient_bytes, workload.checkpoint_bytes)
    work_hours = -(-workload.samples // setup.global_batch) * step_s / 3600
    known = conditions.gangs(*pools_of([setup.cluster]), size)
    hours = float(expected_hours([work_hours], known)[0])
    return hours, hours * (setup.cluster.total_usd_per_hour or np.nan)


def main(count: int = 10, write: Write = False) -> None:
    """Ask, measure every setup, and print hours, dollars and regret of each answer."""
    here = open_workspace("local")
    champion = load_champion(here.home, "local")
    if champion is None:
        raise typer.BadParameter("no champion is in force: run `srift refresh` first")
    cases = questions(here, champion, count)
    judged = judge(cases, measured_seconds(here, cases), experience_of(here).conditions)
    show(f"{len(cases)} questions", judged)
    by = judged.groupby("role", sort=False)
    show("by role", by.agg(met=("meets", "sum"), regret=("regret", "mean")).reset_index())
    advised = judged[judged["role"] == ADVISED]
    met, regret = int(advised["meets"].sum()), 100 * float(advised["regret"].mean())
    claims = [
        Claim("advice measured: constraints met", f"{count}", f"{met}", met == count),
        Claim("advice measured: mean regret", "5 %", f"{regret:.1f} %", regret <= 5),
    ]
    report("advice", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

"""Compute the rows of the published table for every workload and goal of a workspace."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import call

import pandas as pd

from models.domain.cluster import Offer
from models.monitoring.cross_validation import Each
from models.planner.planner import Recommendation

from ..market.job_conditions import experience_of
from ..market.offers import with_facts
from ..providers.base import ProviderError
from ..training.registry import Champion
from ..workspace.blas_threads import single_thread
from ..workspace.workspace import Workspace, spends_money
from .case import Case, Row, with_usual_goals
from .pilots import is_doubtful, measure_first, pilots_for

MOST_SCORES = 20  # maximum number of requests for spot placement scores per publication


def recommend_all(
    workspace: Workspace,
    champion: Champion | None,
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    *,
    each: Each = map,
) -> list[Row]:
    """Return the recommendations for every workload and goal of the workspace.

    If machines cost money, an uncertain first choice has the status "measure_first", and its reason
    names the run to measure.

    runs: one row for each measured setup.
    each: `map`, or a similar function that runs the planner for several workloads in parallel.
    """
    with single_thread():
        experience, facts = experience_of(workspace), workspace.mart("workloads")
        cases = [
            Case.of(workspace, champion, with_facts(workload, facts), offers, runs, experience)
            for workload in map(with_usual_goals, workspace.workloads)
        ]
        plans = each(call, [case.planning() for case in cases])
        answers = [case.with_columns(plan) for case, plan in zip(cases, plans, strict=True)]
        if spends_money(workspace.provider.name):
            for case, answer in zip(cases, answers, strict=True):
                _mark_doubtful(case, answer)
    return with_placement_scores(workspace, [row for answer in answers for row in answer.rows])


def _mark_doubtful(case: Case, answer: Recommendation) -> None:
    """Set the status of uncertain first choices to "measure_first".

    A first choice is uncertain if it is probably not the best, and a run would help to decide.
    """
    # The search for runs to measure is slow, so other ranks are skipped.
    first = [row for row in answer.rows if row["rank"] == 1]
    for row, goal in zip(first, case.workload.goals, strict=True):
        if is_doubtful(row):
            question = replace(case, workload=replace(case.workload, goals=(goal,)))
            plan = replace(answer, rows=[row])
            row |= measure_first(row, pilots_for(question, plan, buyable=case.offers, count=1))


def with_placement_scores(workspace: Workspace, rows: list[Row]) -> list[Row]:
    """Add spot placement scores to the rows, and return the rows.

    A score is EC2's rating of the chance that a request for spot machines succeeds. A row gets a
    score only if all its spot machines have the same instance type and zone. At most MOST_SCORES
    scores are requested.
    """
    scores: dict[tuple[str, tuple[str], int], Mapping[str, int]] = {}
    for row in rows:
        spot = [offer for offer in row["cluster_offers"] or () if offer["market"] == "spot"]
        # A score for several types would mislead: it rates the chance to get any of the types.
        if len({(offer["instance_type"], offer["zone"]) for offer in spot}) == 1:
            types = (spot[0]["instance_type"],)
            request = row["region"], types, sum(offer["count"] for offer in spot)
            if request not in scores and len(scores) < MOST_SCORES:
                try:
                    scores[request] = workspace.provider.placement_scores(*request)
                except ProviderError:  # without permission or after too many requests
                    break
            row["placement_score"] = scores.get(request, {}).get(spot[0]["zone"])
    return rows

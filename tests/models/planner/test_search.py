"""What is left out unlooked could not have been in the answer: the planner's rows are those of brute force, exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings

from models.domain.workload import Goal
from models.job.capacity import fit_startup
from models.job.job_conditions import JobConditions, Learned, Stated
from models.planner import ranking, search
from models.planner.candidates import Supply, enumerate_candidates
from models.planner.search import CandidateCosts
from tests.models.brute_force import (
    LAUNCHES,
    SEED,
    anything_fits,
    brute_force,
    costs_of,
    difference,
    every_setup,
    planned,
    world_of,
    worlds,
)
from tests.models.planning import JointModel, offer, workload


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small turns and few decisions, so that little worlds are pruned too."""
    monkeypatch.setattr(search, "_TURN", 7)
    monkeypatch.setattr(search, "_AT_ONCE", 3)
    monkeypatch.setattr(ranking, "CLUSTERS_COMPARED", 6)


@settings(max_examples=60, deadline=None)
@given(world=worlds())
def test_answer_and_frontier_are_those_of_brute_force(world: dict[str, Any]) -> None:
    found, setups = planned(world), every_setup(world)
    assert difference(found.rows, brute_force(world, found.clusters)) == ""
    if not setups:
        assert found.frontier == []
        return
    costs = costs_of(world, setups)
    points = {
        (h, u) for h, u in zip(costs.hours, costs.expected("usd"), strict=True) if np.isfinite(u)
    }
    best = sorted(
        p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
    )
    assert [(one["hours"], one["usd"]) for one in found.frontier] == [
        pytest.approx(one, rel=1e-9) for one in best
    ]


def test_a_dearer_type_that_is_faster_in_the_last_digit_alone_is_not_on_the_frontier() -> None:
    asked = {"max_hosts": 1, "fits": anything_fits, "most": 1000, "top": 5}
    world = world_of(
        types=1, seed=3, slower=0.0, hours=3.0, usd=9.0, p_required=0.9, batch=96, **asked
    )
    (machine,) = {one.instance_type for one in world["offers"]}
    cheap, dear = (
        replace(world["offers"][0], usd_per_hour=usd, instance_type=replace(machine, name=name))
        for name, usd in (("cheap", 1.0), ("dear", 2.0))
    )
    lines = {"cheap": (0.0, 0.01), "dear": (0.0, 0.01 * (1 - 1e-13))}
    model = replace(
        world["model"],
        lines=lines,
        gbps=dict.fromkeys(lines, 1.0),
        memory=dict.fromkeys(lines, np.nan),
    )
    (only,) = planned(world | {"offers": [dear, cheap], "model": model}).frontier
    assert only["cluster"] == "1xcheap"


RARE: dict[
    str, tuple[dict[str, Any], dict[str, float]]
] = {  # found among many: what decides is seldom out of what is looked at for another reason
    "a split that keeps to the limit, of a cluster of which another does not": (
        {
            "types": 3,
            "seed": 883,
            "slower": 0.05,
            "hours": 2.0,
            "usd": 47.1,
            "max_hosts": 4,
            "top": 4,
        },
        {"p_required": 0.9, "own": 0.1, "loose": 8.0},
    ),
    "the same where it is named in the winner's reason": (
        {
            "types": 2,
            "seed": 881,
            "slower": 0.05,
            "hours": 12.1,
            "usd": 48.2,
            "max_hosts": 4,
            "top": 2,
        },
        {"p_required": 0.9, "own": 0.1, "loose": 8.0},
    ),
    "a limit that less than half of the draws keep, where no more was asked for": (
        {
            "types": 2,
            "seed": 194,
            "slower": 0.05,
            "hours": 7.7,
            "usd": 9.6,
            "max_hosts": 3,
            "top": 1,
        },
        {"p_required": 0.3, "own": 0.5, "loose": 1.0},
    ),
}


@pytest.mark.parametrize("what", RARE)
def test_what_seldom_decides_is_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "CLUSTERS_COMPARED", 2)
    asked, errors = RARE[what]
    world = world_of(
        **asked, batch=96, p_required=errors["p_required"], fits=anything_fits, most=20_000
    )
    world["model"] = replace(world["model"], own=errors["own"], loose=errors["loose"])
    found = planned(world)
    assert difference(found.rows, brute_force(world, found.clusters)) == ""


def test_most_is_left_out() -> None:
    asked = {"max_hosts": 8, "fits": anything_fits, "most": 20_000, "top": 5}
    world = world_of(
        types=4, seed=3, slower=0.3, hours=3.0, usd=9.0, p_required=0.9, batch=96, **asked
    )
    found = planned(world)
    assert found.candidates > 1000 and found.looked_at < 0.3 * found.candidates
    assert max(found.drawn_for, len(found.ranked)) < 0.2 * found.candidates


def test_the_frontier_tells_the_chance_to_meet_the_constraint_where_there_is_one() -> None:
    asked = {"max_hosts": 4, "fits": anything_fits, "most": 1000, "top": 5}
    world = world_of(
        types=3, seed=3, slower=0.3, hours=1.0, usd=1.0, p_required=0.9, batch=96, **asked
    )
    free = replace(world["workload"], goals=())
    hours = [one["hours"] for one in planned(world, workload=free).frontier]
    assert len(hours) > 1

    def chances(*limits: float) -> list[float | None]:
        goals = tuple(Goal(goal="cheapest_within_deadline", hours=limit) for limit in limits)
        return [
            one["p_meets_constraint"]
            for one in planned(world, workload=replace(free, goals=goals)).frontier
        ]

    first, *_, last = chances(float(np.sqrt(hours[0] * hours[-1])))
    assert first is not None and last is not None and first > last, "the fastest stands first"
    assert set(chances()) == set(chances(1.0, 2.0)) == {None}


@settings(max_examples=10, deadline=None)
@given(world=worlds())
def test_the_same_question_has_the_same_answer_whatever_the_order_of_offers(
    world: dict[str, Any],
) -> None:
    first = planned(world)
    assert planned(world) == first
    assert planned(world, offers=world["offers"][::-1]) == first


def test_a_bound_that_is_no_bound_is_found_out() -> None:
    """The property above can fail: with bounds above what is predicted, a better setup is left out."""
    differing = 0

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(world=worlds())
    def count(world: dict[str, Any]) -> None:
        nonlocal differing
        broken = replace(world["model"], bound=1.4, slower=1.0)
        found = planned(world, model=broken)
        differing += (
            difference(found.rows, brute_force({**world, "model": broken}, found.clusters)) != ""
        )

    count()
    assert differing > 0


def costs_of_two_types(
    samples: int,
    *,
    slower: float,
    draws: int,
    markets: tuple[str, ...],
    job_conditions: JobConditions,
) -> CandidateCosts:
    """Up to three machines of two types, whose step times are certain."""
    names = ("small", "large")
    model = JointModel(
        lines={"small": (0.0, 0.001), "large": (0.0, 0.0004)},
        gbps=dict.fromkeys(names, 1.0),
        memory=dict.fromkeys(names, np.nan),
        slower=slower,
        shared=0.0,
        own=0.0,
    )
    job, sold = (
        workload("w", 100, samples=samples),
        [offer(name, market) for name in names for market in markets],
    )
    found = enumerate_candidates(
        job,
        Supply(offers=sold, max_hosts=3, fits=anything_fits, job_conditions=job_conditions),
        model,
    )
    return CandidateCosts(job, found, fits=anything_fits, model=model, draws=draws, seed=SEED)


def test_what_is_given_up_unlooked_would_not_have_met_the_limit() -> None:
    """Start-up as unsure as before the first launch, and as long as the work: its mean says little of its draws."""
    unsure = fit_startup(
        pd.DataFrame(columns=LAUNCHES).astype({"seconds": float}),
        {"on-demand": 100.0, "spot": 100.0},
    )
    costs = costs_of_two_types(
        60_000,
        slower=0.0,
        draws=400,
        markets=("on-demand", "spot"),
        job_conditions=Learned(startup=unsure),
    )
    rows, given_up = np.arange(len(costs.candidates)), 0
    for times, p_required in product(np.linspace(0.5, 1.2, 15), (0.51, 0.6, 0.9)):
        limit = times * float(np.median(costs.least_hours))
        before = costs.hopeless(rows, "hours", limit, p_required)
        costs.look(rows)
        assert (costs.meeting(rows[before], "hours", limit).chance < p_required).all()
        given_up += int(before.sum())
    assert given_up > 0


@pytest.mark.parametrize(
    ("kind", "limited"), [("cheapest_within_deadline", "hours"), ("fastest_within_budget", "usd")]
)
def test_no_loss_is_below_its_bound_however_unsure_the_start_up(kind: str, limited: str) -> None:
    unsure = fit_startup(
        pd.DataFrame(columns=LAUNCHES).astype({"seconds": float}),
        {"on-demand": 100.0, "spot": 100.0},
    )
    for samples, times in product((6_000, 60_000, 600_000), np.linspace(0.2, 1.5, 14)):
        costs = costs_of_two_types(
            samples,
            slower=0.0,
            draws=400,
            markets=("on-demand", "spot"),
            job_conditions=Learned(startup=unsure),
        )
        rows = np.arange(len(costs.candidates))
        goal = Goal(goal=kind, **{limited: times * float(np.median(costs.bound(limited)))})
        costs.look(rows)
        assert (costs.least_loss(goal, rows) <= costs.loss(goal, rows)).all()


@pytest.mark.parametrize(("what", "times"), [*product(("hours", "usd"), (1.0001, 0.9999))])
def test_what_just_keeps_to_the_limit_is_not_given_up(what: str, times: float) -> None:
    """Nothing is left to chance here, so that the limit of each row is what it takes."""
    costs = costs_of_two_types(
        60_000_000, slower=0.2, draws=40, markets=("on-demand",), job_conditions=Stated()
    )
    rows = np.arange(len(costs.candidates))
    costs.look(rows)
    keeps = times > 1
    assert len(rows) > 5
    for row in rows[:, None]:
        limit = times * float(costs.expected(what)[row][0])
        assert costs.meeting(row, what, limit).chance.tolist() == [float(keeps)]
        assert costs.hopeless(row, what, limit, 0.9).tolist() == [not keeps]

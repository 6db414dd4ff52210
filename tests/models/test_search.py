"""What is left out unlooked could not have been in the answer: the planner's rows are those of brute force, exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import planner, ranking, search
from models.availability import fit_availability
from models.checkpoints import prior_checkpoints
from models.cloud import Cluster, InstanceType, Offer
from models.conditions import Circumstances, Learned, Stated
from models.hazard import fit_hazard
from models.offered import offered
from models.planner import Plan, candidates, plan
from models.prospects import Job, Prospects
from models.startup import fit_startup
from models.workload import Goal, Setup
from tests.models.planning import AS_OF, JointModel, frame, offer, workload

DRAWS, SEED = 20, 5
NEVER = pd.DataFrame({"instance_type": [], "market": [], "zone": [], "granted": []})
WINDOWS = ["instance_type", "zone", "hours", "interruptions"]
HELD = pd.DataFrame([("t0", "z", 24.0, 3), ("t1", "z", 24.0, 0)] * 8, columns=WINDOWS)
LAUNCHES = ["instance_type", "market", "seconds"]
STARTED = pd.DataFrame([("t0", "spot", 900.0), ("t1", "on-demand", 30.0)] * 9, columns=LAUNCHES)
LEARNED = Learned(
    startup=fit_startup(STARTED),
    checkpoint=prior_checkpoints(),
    hazard=fit_hazard(HELD),
    availability=fit_availability(NEVER),
)
CIRCUMSTANCES: list[Circumstances] = [Stated(), LEARNED]


def world_of(
    *,
    types: int,
    seed: int,
    slower: float,
    hours: float,
    usd: float,
    p_required: float,
    batch: int,
    **asked: Any,
) -> dict[str, Any]:
    """Machines, prices, interruptions, lines and memory by `seed`; a job with its goals; `asked` is for `plan`."""
    random = np.random.default_rng(seed)
    names = [f"t{at}" for at in range(types)]
    known = [
        InstanceType(
            name=name,
            provider="ec2",
            devices=int(random.choice([1, 1, 2, 4])),
            device="gpu",
            cores=float(random.integers(1, 5)),
            memory_gib=8.0,
            device_memory_gib=1.0,
            bandwidth_gbps=1.0,
        )
        for name in names
    ]
    sold = [
        Offer(
            instance_type=one,
            market=market,
            zone="z",
            region="r",
            usd_per_hour=None if random.random() < 0.1 else float(random.uniform(0.5, 4) * one.devices),
            interruptions_per_hour=float(random.uniform(0, 2)) if market == "spot" else 0.0,
            price_as_of=AS_OF,
        )
        for one in known
        for market in ("on-demand", "spot")
        if random.random() < 0.9
    ]
    memory = [float(random.choice([np.nan, 2**30 / 100, 2**30 / 20, 2**30 / 7])) for _ in names]
    model = JointModel(
        lines={name: (float(random.uniform(0, 0.02)), float(random.uniform(0.001, 0.02))) for name in names},
        gbps={name: float(random.uniform(0.2, 5)) for name in names},
        memory=dict(zip(names, memory, strict=True)),
        slower=slower,
    )
    return (
        {"met": Stated()}
        | asked
        | {
            "workload": workload(
                "w",
                96,
                batch,
                Goal(goal="cheapest_within_deadline", hours=hours, p_required=p_required),
                Goal(goal="fastest_within_budget", usd=usd, p_required=p_required),
                samples=1_000_000,
            ),
            "offers": sold,
            "model": model,
        }
    )


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Two to four types, up to eight machines, goals, and how much is shown."""
    return world_of(
        types=draw(st.integers(2, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
        slower=draw(st.sampled_from([0.05, 0.3, 1.0])),
        hours=draw(st.floats(0.2, 30)),
        usd=draw(st.floats(0.5, 60)),
        p_required=draw(st.sampled_from([0.3, 0.6, 0.9, 0.99])),
        batch=draw(st.sampled_from([96, 192])),
        max_hosts=draw(st.integers(2, 8)),
        met=draw(st.sampled_from(CIRCUMSTANCES)),
        fits=cores_fit if draw(st.booleans()) else anything_fits,
        most=draw(st.sampled_from([5, 20_000])),
        top=draw(st.integers(1, 8)),
    )


def cores_fit(cluster: Cluster) -> str:
    return "" if sum(one.instance_type.cores for one in cluster.members) <= 12 else "too many cores"


def anything_fits(cluster: Cluster) -> str:
    return ""


def planned(world: dict[str, Any], **changes: Any) -> Plan:
    asked = {**world, **changes}
    return plan(asked.pop("workload"), asked.pop("offers"), asked.pop("model"), draws=DRAWS, seed=SEED, **asked)


def every_setup(world: dict[str, Any]) -> list[Setup]:
    model: JointModel = world["model"]
    return candidates(
        world["workload"],
        world["offers"],
        max_hosts=world["max_hosts"],
        fits=world["fits"],
        line=lambda name: model.compute_line("w", name),
        peak_bytes=lambda name, batch: model.peak_bytes("w", name, batch),
        most=world["most"],
    )


def brute_force(world: dict[str, Any], considered: int) -> list[dict[str, Any]]:
    """Every setup predicted and drawn for, one machine a column."""
    setups, model = every_setup(world), world["model"]
    if not setups:
        return planner.nothing(world["workload"]).rows
    rows = frame(setups)
    drawn = model.draws(rows, count=DRAWS, seed=SEED)
    return ranking.recommend(
        world["workload"],
        setups,
        model.predict(rows),
        drawn,
        top=world["top"],
        met=world["met"],
        seed=SEED,
        considered=considered,
    )


def difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """The first column that differs, numbers beyond rounding; "" where all are equal."""
    if len(found) != len(expected):
        return f"{len(found)} rows, {len(expected)} expected"
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            close = isinstance(value, float) and ours[name] == pytest.approx(value, rel=1e-9)
            if not close and ours[name] != value:
                return f"{theirs['goal']} {theirs['rank']}: {name} {ours[name]!r}, expected {value!r}"
    return ""


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small turns and few contenders, so that little worlds are pruned too."""
    monkeypatch.setattr(search, "_TURN", 7)
    monkeypatch.setattr(ranking, "CONTENDERS", 6)


@settings(max_examples=60, deadline=None)
@given(world=worlds())
def test_the_answer_is_that_of_brute_force(world: dict[str, Any]) -> None:
    found = planned(world)
    assert difference(found.rows, brute_force(world, found.clusters)) == ""


RARE: dict[
    str, tuple[dict[str, Any], dict[str, float]]
] = {  # found among many: what decides is seldom out of what is looked at for another reason
    "a split that keeps to the limit, of a cluster of which another does not": (
        {"types": 3, "seed": 883, "slower": 0.05, "hours": 2.0, "usd": 47.1, "max_hosts": 4, "top": 4},
        {"p_required": 0.9, "own": 0.1, "loose": 8.0},
    ),
    "the same where it is named in the winner's reason": (
        {"types": 2, "seed": 881, "slower": 0.05, "hours": 12.1, "usd": 48.2, "max_hosts": 4, "top": 2},
        {"p_required": 0.9, "own": 0.1, "loose": 8.0},
    ),
    "a limit that less than half of the draws keep, where no more was asked for": (
        {"types": 2, "seed": 194, "slower": 0.05, "hours": 7.7, "usd": 9.6, "max_hosts": 3, "top": 1},
        {"p_required": 0.3, "own": 0.5, "loose": 1.0},
    ),
}


@pytest.mark.parametrize("what", RARE)
def test_what_seldom_decides_is_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "CONTENDERS", 2)
    asked, errors = RARE[what]
    world = world_of(**asked, batch=96, p_required=errors["p_required"], fits=anything_fits, most=20_000)
    world["model"] = replace(world["model"], own=errors["own"], loose=errors["loose"])
    found = planned(world)
    assert difference(found.rows, brute_force(world, found.clusters)) == ""


def test_most_is_left_out() -> None:
    model = JointModel(
        lines={f"t{at}": (0.002, 0.001 * 2**at) for at in range(4)},
        gbps={f"t{at}": 4.0 for at in range(4)},
        memory={f"t{at}": np.nan for at in range(4)},
    )
    types = [
        InstanceType(
            name=f"t{at}",
            provider="ec2",
            devices=1,
            device="gpu",
            cores=4.0,
            memory_gib=8.0,
            device_memory_gib=1.0,
            bandwidth_gbps=4.0,
        )
        for at in range(4)
    ]
    sold = [
        Offer(
            instance_type=one,
            market="on-demand",
            zone="z",
            region="r",
            usd_per_hour=1.0 + at,
            interruptions_per_hour=0.0,
            price_as_of=AS_OF,
        )
        for at, one in enumerate(types)
    ]
    job = workload("w", 96, None, Goal(goal="cheapest_within_deadline", hours=1.0), samples=1_000_000)
    found = plan(job, sold, model, max_hosts=8, fits=anything_fits)
    assert found.candidates > 1000 and found.looked_at < 0.3 * found.candidates
    assert found.drawn_for < 0.2 * found.candidates and len(found.ranked) <= found.drawn_for


@settings(max_examples=60, deadline=None)
@given(world=worlds())
def test_the_frontier_is_that_of_brute_force(world: dict[str, Any]) -> None:
    setups = every_setup(world)
    found = planned(world).frontier
    if not setups:
        assert found == []
        return
    rows = frame(setups)
    view = ranking.outlook(
        world["workload"],
        setups,
        world["model"].predict(rows),
        world["model"].draws(rows, count=DRAWS, seed=SEED),
        measured_runs=[0] * len(setups),
        met=world["met"],
        seed=SEED,
    )
    points = {(h, u) for h, u in zip(view.hours, view.usd, strict=True) if np.isfinite(u)}
    best = sorted(p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points))
    assert [(one["hours"], one["usd"]) for one in found] == [pytest.approx(one, rel=1e-9) for one in best]


@settings(max_examples=10, deadline=None)
@given(world=worlds())
def test_the_same_question_has_the_same_answer_whatever_the_order_of_offers(world: dict[str, Any]) -> None:
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
        differing += difference(found.rows, brute_force({**world, "model": broken}, found.clusters)) != ""

    count()
    assert differing > 0


def test_what_is_given_up_unlooked_would_not_have_met_the_limit() -> None:
    """Start-up as unsure as before the first launch, and as long as the work: its mean says little of its draws."""
    names = ("small", "large")
    model = JointModel(
        lines={"small": (0.0, 0.001), "large": (0.0, 0.0004)},
        gbps=dict.fromkeys(names, 1.0),
        memory=dict.fromkeys(names, np.nan),
        slower=0.0,
        own=0.0,
    )
    unsure = fit_startup(pd.DataFrame(columns=LAUNCHES).astype({"seconds": float}), {"on-demand": 100.0, "spot": 100.0})
    job = workload("w", 100, samples=60_000)
    sold = offered(
        job,
        [offer(name, market) for name in names for market in ("on-demand", "spot")],
        max_hosts=3,
        fits=anything_fits,
        line=model.lines.__getitem__,
        peak_bytes=None,
        totals=[100],
        met=Learned(startup=unsure, checkpoint=prior_checkpoints()),
    )
    known = Prospects(job, sold, fits=anything_fits, model=model, job=Job(draws=400, seed=SEED))
    rows, given_up = np.arange(len(sold)), 0
    for times, p_required in product(np.linspace(0.5, 1.2, 15), (0.51, 0.6, 0.9)):
        limit = times * float(np.median(known.least_hours))
        before = known.hopeless(rows, "hours", limit, p_required)
        known.look(rows)
        assert (known.chance(rows[before], "hours", limit) < p_required).all()
        given_up += int(before.sum())
    assert given_up > 0

"""Small worlds for the planner, and its answer by brute force: every setup predicted and drawn for."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from models.domain.cluster import Cluster, InstanceType, Offer
from models.domain.workload import Goal, Setup
from models.job.capacity import fit_availability, fit_startup
from models.job.cost import JobCosts, job_costs
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import JobConditions, Learned, Stated
from models.planner import candidates as planner_candidates
from models.planner import planner, ranking
from models.planner.candidates import Supply
from models.planner.explanations import made_to_fit
from models.planner.planner import Plan, candidates, plan
from tests.models.planning import AS_OF, JointModel, frame, workload

DRAWS, SEED = 20, 5
NEVER = pd.DataFrame({"instance_type": [], "market": [], "zone": [], "granted": []})
WINDOWS = ["instance_type", "zone", "hours", "interruptions"]
HELD = pd.DataFrame([("t0", "z", 24.0, 3), ("t1", "z", 24.0, 0)] * 8, columns=WINDOWS)
LAUNCHES = ["instance_type", "market", "machines", "seconds"]
STARTED = pd.DataFrame(
    [("t0", "spot", 1, 900.0), ("t1", "on-demand", 1, 30.0)] * 9, columns=LAUNCHES
)
LEARNED = Learned(
    startup=fit_startup(STARTED),
    hazard=fit_hazard(HELD),
    availability=fit_availability(NEVER),
)
JOB_CONDITIONS: list[JobConditions] = [Stated(), LEARNED]


def world_of(
    *,
    types: int,
    seed: int,
    slower: float,
    hours: float,
    usd: float,
    p_required: float | None,
    batch: int,
    **asked: Any,
) -> dict[str, Any]:
    """Machines, prices, interruptions, lines and memory by `seed`; a job with its goals; `asked` is for `plan`."""
    random = np.random.default_rng(seed)
    names = [f"t{at}" for at in range(types)]
    known = [_machine(name, random) for name in names]
    sold = [
        _offer(one, market, random)
        for one in known
        for market in ("on-demand", "spot")
        if random.random() < 0.9
    ]
    memory = [float(random.choice([np.nan, 2**30 / 100, 2**30 / 20, 2**30 / 7])) for _ in names]
    model = JointModel(
        lines={
            name: (float(random.uniform(0, 0.02)), float(random.uniform(0.001, 0.02)))
            for name in names
        },
        gbps={name: float(random.uniform(0.2, 5)) for name in names},
        memory=dict(zip(names, memory, strict=True)),
        slower=slower,
    )
    return (
        {"conditions": Stated()}
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


def _machine(name: str, random: np.random.Generator) -> InstanceType:
    return InstanceType(
        name=name,
        provider="ec2",
        devices=int(random.choice([1, 1, 2, 4])),
        device="gpu",
        cores=float(random.integers(1, 5)),
        memory_gib=8.0,
        device_memory_gib=1.0,
        bandwidth_gbps=1.0,
    )


def _offer(sold: InstanceType, market: str, random: np.random.Generator) -> Offer:
    return Offer(
        instance_type=sold,
        market=market,
        zone="z",
        region="r",
        usd_per_hour=None
        if random.random() < 0.1
        else float(random.uniform(0.5, 4) * sold.devices),
        interruptions_per_hour=float(random.uniform(0, 2)) if market == "spot" else 0.0,
        price_as_of=AS_OF,
        storage_usd_per_hour=0.4,  # so much that an answer which leaves it out is another one
        other_usd_per_hour=0.2,
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
        p_required=draw(st.sampled_from([None, None, None, 0.3, 0.6, 0.9])),
        batch=draw(st.sampled_from([96, 192])),
        max_hosts=draw(st.integers(2, 8)),
        conditions=draw(st.sampled_from(JOB_CONDITIONS)),
        fits=cores_fit if draw(st.booleans()) else anything_fits,
        most=draw(st.sampled_from([5, 20_000])),
        top=draw(st.integers(1, 8)),
    )


def cores_fit(cluster: Cluster) -> str:
    return "" if sum(one.instance_type.cores for one in cluster.members) <= 12 else "too many cores"


def anything_fits(cluster: Cluster) -> str:
    return ""


def supply(world: dict[str, Any]) -> Supply:
    return Supply(
        offers=world["offers"],
        max_hosts=world["max_hosts"],
        fits=world["fits"],
        job_conditions=world.get("conditions", Stated()),
    )


def planned(world: dict[str, Any], **changes: Any) -> Plan:
    asked = {**world, **changes}
    most = patch.object(planner_candidates, "MOST_CLUSTERS", asked["most"])
    with most, patch.object(planner, "DRAWS", DRAWS):
        return plan(asked["workload"], supply(asked), asked["model"], top=asked["top"], seed=SEED)


def every_setup(world: dict[str, Any]) -> list[Setup]:
    with patch.object(planner_candidates, "MOST_CLUSTERS", world["most"]):
        return candidates(world["workload"], supply(world), world["model"])


def brute_force(world: dict[str, Any], considered: int) -> list[dict[str, Any]]:
    """Every setup predicted and drawn for, one machine a column."""
    setups = every_setup(world)
    if not setups:
        return planner.nothing(world["workload"]).rows
    job, model = world["workload"], world["model"]
    more = partial(made_to_fit, workload=job, model=model)
    return ranking.recommend(
        job, costs_of(world, setups), top=world["top"], clusters=considered, more=more
    )


def costs_of(world: dict[str, Any], setups: list[Setup]) -> JobCosts:
    """Every setup predicted and drawn for."""
    rows, model = frame(setups), world["model"]
    draws = model.draws(rows, count=DRAWS, seed=SEED)
    return job_costs(
        world["workload"],
        setups,
        model.predict(rows),
        draws,
        job_conditions=world["conditions"],
        seed=SEED,
    )


def difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """The first column that differs, numbers beyond rounding; "" where all are equal."""
    if len(found) != len(expected):
        return f"{len(found)} rows, {len(expected)} expected"
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            close = isinstance(value, float) and ours[name] == pytest.approx(value, rel=1e-9)
            if not close and ours[name] != value:
                return (
                    f"{theirs['goal']} {theirs['rank']}: {name} {ours[name]!r}, expected {value!r}"
                )
    return ""

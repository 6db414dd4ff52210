"""How long planning takes at EC2's scale: ten synthetic GPU types, and EC2's in four regions.

Up to 64 machines, two markets, four goals; workloads known by rows, by profile, in all strategies.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pandas as pd
import typer

from models.domain.cluster import Offer
from models.domain.workload import STRATEGIES, Goal, Mode, Workload
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.planner import Recommendation, plan
from models.step_time.model import StepTimeModel, with_compressed
from tasks.providers.ec2.catalogue import device_tflops
from tasks.providers.ec2.prices import on_demand_offers
from tasks.providers.ec2.snapshot import read_snapshot
from tests.benchmarks import synthetic_market as synthetic
from tests.benchmarks.claims import Claim, Write, report, show

REGIONS = ("us-east-1", "us-west-2", "eu-west-1", "ap-south-1")
MACHINES, TARGET_S = 64, 2.0
_DEADLINE, _BUDGET = 4.0, 1.5  # multiples of the least hours and dollars


def with_goals(
    model: StepTimeModel, offers: Sequence[Offer], workload: Workload, max_hosts: int
) -> Workload:
    """The workload with a deadline and a budget that some clusters meet: four goals in all."""
    rows = _plan(workload, offers, model, max_hosts).rows
    first = {row["goal"]: row for row in rows[::-1]}
    deadline = Goal(goal="cheapest_within_deadline", hours=_DEADLINE * first["fastest"]["hours"])
    budget = Goal(goal="fastest_within_budget", usd=_BUDGET * first["cheapest"]["usd"])
    return replace(workload, goals=(*workload.goals, deadline, budget))


def in_every_strategy(model: StepTimeModel, workload: Workload) -> tuple[StepTimeModel, Workload]:
    """The workload in every strategy that DDP runs can predict, and the model for them."""
    tolerant = replace(workload, modes=tuple(Mode(strategy=name) for name in STRATEGIES))
    able = with_compressed(model, tolerant)
    return able, able.as_measured(tolerant)


def some_types(types: int) -> list[Offer]:
    """Offers of `types` of the ten synthetic types, in both markets."""
    sold = synthetic.types()
    return synthetic.offers([sold[at] for at in synthetic.spread(types)])


def ec2_offers() -> list[Offer]:
    """EC2's GPU types in REGIONS at the packaged prices; spot costs four tenths of them."""
    known = read_snapshot()
    types = [
        kind
        for kind in known.instance_types
        if device_tflops(kind.device.split(" 1/")[0]) is not None
    ]
    on_demand = []
    for region in REGIONS:
        usd = known.usd[region]
        priced = [kind for kind in types if usd.get(kind.name) is not None]
        as_of = known.prices_as_of
        on_demand += on_demand_offers(priced, usd, region=region, price_as_of=as_of)
    spot = [
        replace(
            offer,
            market="spot",
            usd_per_hour=0.4 * (offer.usd_per_hour or 0.0),
            interruptions_per_hour=0.01,
        )
        for offer in on_demand
    ]
    return without_beaten_zones([*on_demand, *spot])


def timed(
    model: StepTimeModel,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    repeats: int,
) -> dict[str, Any]:
    """One row: candidates, how many were ranked, and median seconds."""
    workload = with_goals(model, offers, workload, max_hosts)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        found = _plan(workload, offers, model, max_hosts)
        seconds.append(time.perf_counter() - started)
    return {
        "workload": workload.name,
        "modes": len(workload.modes),
        "types": len({offer.instance_type.name for offer in offers}),
        "candidates": found.candidates,
        "ranked": len(found.ranked),
        "frontier": len(found.frontier),
        "seconds": median(seconds),
    }


def _plan(
    workload: Workload, offers: Sequence[Offer], model: StepTimeModel, max_hosts: int
) -> Recommendation:
    supply = Supply(offers=offers, max_hosts=max_hosts, fits=lambda _: "")
    return plan(workload, supply, model, seed=7)


def main(repeats: int = 5, write: Write = False) -> None:
    """Print seconds for ten types and for EC2's."""
    ec2 = ec2_offers()
    sold = list({offer.instance_type.name: offer.instance_type for offer in ec2}.values())
    markets = {
        "ten types": (synthetic.champion(synthetic.types()), some_types(10)),
        "EC2's types": (synthetic.champion(sold), ec2),
    }
    rows, claims = [], []
    for market, (model, offers) in markets.items():
        by_rows, profiled = map(synthetic.workload, (synthetic.BY_ROWS, synthetic.PROFILED))
        for able, workload in (
            (model, by_rows),
            (model, profiled),
            in_every_strategy(model, profiled),
        ):
            row = timed(able, workload, offers, max_hosts=MACHINES, repeats=repeats)
            rows.append({"market": market, **row})
            spent = float(row["seconds"])
            claim = f"plan {market}, {workload.name}, {row['modes']} strategies"
            claims.append(Claim(claim, f"{TARGET_S:g} s", f"{spent:.2f} s", spent <= TARGET_S))
    show(f"up to {MACHINES} machines, two markets, four goals", pd.DataFrame(rows))
    report("planner", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

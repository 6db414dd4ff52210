"""How long planning takes at EC2's scale: ten made-up GPU types, and all of EC2's GPU types in four regions.

`python -m tests.benchmarks.planner` prints the candidates, how many were left at each stage and the seconds, up to 64
machines; with `--plot FILE.png` also how time grows with types and machines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pandas as pd
import typer

from flows.cli import explained
from models.domain.cluster import Offer
from models.domain.workload import STRATEGIES, Goal, Mode, Workload
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.planner import Plan, plan
from models.step_time.model import StepTimeModel
from models.step_time.unmeasured import with_compressed
from tasks.providers.ec2.catalogue import device_tflops
from tasks.providers.ec2.snapshot import packaged
from tasks.reporting.tables import print_frame
from tests.benchmarks import synthetic_market as synthetic

REGIONS = ("us-east-1", "us-west-2", "eu-west-1", "ap-south-1")
TYPES, MACHINES = (2, 4, 6, 8, 10), (4, 8, 16, 32, 64)
# The deadline and the budget asked for, as multiples of the least hours and dollars that can be had.
_DEADLINE, _BUDGET = 4.0, 1.5


def asked(
    model: StepTimeModel, offers: Sequence[Offer], workload: Workload, max_hosts: int
) -> Workload:
    """The workload with a deadline and a budget that some clusters meet and others do not: four goals in all."""
    first = {row["goal"]: row for row in _plan(workload, offers, model, max_hosts).rows[::-1]}
    goals = (
        Goal(goal="cheapest_within_deadline", hours=_DEADLINE * first["fastest"]["hours"]),
        Goal(goal="fastest_within_budget", usd=_BUDGET * first["cheapest"]["usd"]),
    )
    return replace(workload, goals=(*workload.goals, *goals))


def in_every_strategy(model: StepTimeModel, workload: Workload) -> tuple[StepTimeModel, Workload]:
    """The workload in all modes that can be predicted from runs of plain data parallelism, and who predicts them."""
    tolerant = replace(workload, modes=tuple(Mode(strategy=one) for one in STRATEGIES))
    able = with_compressed(model, tolerant)
    return able, able.as_measured(tolerant)


def some_types(types: int) -> list[Offer]:
    """So many of the ten made-up types, in both markets."""
    sold = synthetic.types()
    return synthetic.offers([sold[at] for at in synthetic.spread(types)])


def ec2_offers() -> list[Offer]:
    """EC2's GPU types in REGIONS at the packaged prices, spot at four tenths of them: what `srift recommend` asks."""
    known = packaged()
    types = [
        one for one in known.instance_types if device_tflops(one.device.split(" 1/")[0]) is not None
    ]
    on_demand = [one for one in known.offers(types, REGIONS) if one.usd_per_hour is not None]
    spot = [
        replace(
            one,
            market="spot",
            usd_per_hour=0.4 * (one.usd_per_hour or 0.0),
            interruptions_per_hour=0.01,
        )
        for one in on_demand
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
    """One row: candidates, how many were left at each stage, and the median seconds after one run to warm up."""
    workload = asked(model, offers, workload, max_hosts)
    wall, cpu = [], []
    for _ in range(repeats):
        started, spent = time.perf_counter(), time.process_time()
        found = _plan(workload, offers, model, max_hosts)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - spent)
    return {
        "workload": workload.name,
        "modes": len(workload.modes),
        "types": len({one.instance_type.name for one in offers}),
        "offers": len(offers),
        "machines": max_hosts,
        "clusters": found.clusters,
        "candidates": found.candidates,
        "looked_at": found.looked_at,
        "drawn_for": found.drawn_for,
        "ranked": len(found.ranked),
        "frontier": len(found.frontier),
        "seconds": median(wall),
        "cpu_seconds": median(cpu),
    }


def growth(model: StepTimeModel, name: str, *, repeats: int = 3) -> pd.DataFrame:
    """`timed` over TYPES x MACHINES."""
    return pd.DataFrame(
        [
            timed(
                model, synthetic.workload(name), some_types(types), max_hosts=most, repeats=repeats
            )
            for types in TYPES
            for most in MACHINES
        ]
    )


def plot(grown: pd.DataFrame, file: Path) -> None:
    """Seconds and candidates against types, a line for each number of machines, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for machines, own in grown.groupby("machines"):
        (line,) = left.plot(own["types"], own["seconds"], marker="o", label=f"up to {machines}")
        left.plot(own["types"], own["cpu_seconds"], linestyle="--", color=line.get_color())
        right.plot(own["types"], own["candidates"], marker="o", label=f"up to {machines}")
    left.set(
        xlabel="instance types, each on-demand and spot",
        ylabel="seconds",
        title="time to plan, four goals (dashed: of one CPU)",
    )
    left.set_ylim(bottom=0)
    right.set(
        xlabel="instance types, each on-demand and spot",
        ylabel="candidates",
        title="candidates",
        yscale="log",
    )
    left.legend(title="machines")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def _plan(
    workload: Workload, offers: Sequence[Offer], model: StepTimeModel, max_hosts: int
) -> Plan:
    return plan(
        workload, Supply(offers=offers, max_hosts=max_hosts, fits=lambda _: ""), model, seed=7
    )


def bench_planner(
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs after one to warm up; the median counts.")
    ] = 5,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="PNG to write: growth by types and machines.")
    ] = None,
) -> None:
    """Ten types, 64 machines, mixes of up to three types, both markets, four goals; all of EC2's; smaller markets."""
    model = synthetic.champion(synthetic.types())
    workloads = [synthetic.workload(name) for name in (synthetic.BY_ROWS, synthetic.PROFILED)]
    offers = ec2_offers()
    real = synthetic.champion(
        list({one.instance_type.name: one.instance_type for one in offers}.values())
    )
    whole = []
    for champion, sold in ((model, some_types(10)), (real, offers)):
        every = in_every_strategy(champion, workloads[-1])
        for able, workload in [*((champion, one) for one in workloads), every]:
            whole.append(timed(able, workload, sold, max_hosts=64, repeats=repeats))
    print_frame(
        pd.DataFrame(whole),
        "ten types; EC2's in four regions: up to 64 machines, both markets, four goals",
    )
    if plot_to is not None:
        grown = growth(model, synthetic.BY_ROWS)
        print_frame(grown.drop(columns="workload"), "growth with types and machines")
        plot(grown, plot_to)


if __name__ == "__main__":
    with explained():
        typer.run(bench_planner)

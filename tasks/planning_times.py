"""How long the planner takes in the imagined market, and how that grows with types and machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from models.cloud import Offer
from models.planner import Plan, plan
from models.step_time import StepTimeModel
from models.workload import Goal, Workload

from . import imagined

TYPES, MACHINES = (2, 4, 6, 8, 10), (4, 8, 16, 32, 64)
# The deadline and the budget asked for, as multiples of the least hours and dollars that can be had.
_DEADLINE, _BUDGET = 4.0, 1.5


def asked(model: StepTimeModel, offers: Sequence[Offer], name: str, max_hosts: int) -> Workload:
    """The workload with a deadline and a budget that some clusters meet and others do not: four goals in all."""
    first = {row["goal"]: row for row in _plan(imagined.workload(name), offers, model, max_hosts).rows[::-1]}
    return imagined.workload(
        name,
        Goal(goal="cheapest_within_deadline", hours=_DEADLINE * first["fastest"]["hours"]),
        Goal(goal="fastest_within_budget", usd=_BUDGET * first["cheapest"]["usd"]),
    )


def timed(model: StepTimeModel, name: str, *, types: int, max_hosts: int, repeats: int) -> dict[str, Any]:
    """One row: candidates, how many were left at each stage, and the median seconds after one run to warm up."""
    sold = imagined.types()
    offers = imagined.offers([sold[at] for at in imagined.spread(types)])
    workload = asked(model, offers, name, max_hosts)
    wall, cpu = [], []
    for _ in range(repeats):
        started, spent = time.perf_counter(), time.process_time()
        found = _plan(workload, offers, model, max_hosts)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - spent)
    return {
        "workload": name,
        "types": types,
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
        [timed(model, name, types=types, max_hosts=most, repeats=repeats) for types in TYPES for most in MACHINES]
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
    right.set(xlabel="instance types, each on-demand and spot", ylabel="candidates", title="candidates", yscale="log")
    left.legend(title="machines")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)


def _plan(workload: Workload, offers: Sequence[Offer], model: StepTimeModel, max_hosts: int) -> Plan:
    return plan(workload, offers, model, max_hosts=max_hosts, fits=lambda _: "", seed=7)

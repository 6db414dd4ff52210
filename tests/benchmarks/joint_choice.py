"""How good is the choice of machines and strategy together, on local hosts whose links are slow or fast.

Each workload runs at one global batch on one host, and in each of STRATEGIES on two and on three hosts of several
types, which differ in their bandwidths and prices. Of a workload, a model knows what one device does, and a run in each
strategy on two hosts of one type, or of two: what a first or second refresh measures. Of the other workloads it knows
all. It is then asked for the cheapest, the fastest, and for deadlines and caps, as `choice_scores` has them, among all
that was measured, with each type, or pair of types, known in turn. Chosen is as the planner does: compressed gradients
only where they are surely faster.

What a strategy learns is not weighed: these are seconds and dollars of as many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd

from models.campaign.campaign import Launch
from models.domain.numeric import BoolArray
from models.domain.workload import COMPRESSED, Goal, Mode
from models.planner.compression import unproven
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from models.step_time.setup_arrays import read_setups, workload_and_mode
from tasks.workspace.workspace import Workspace
from tests.benchmarks.choice_scores import (
    RECOMMENDED,
    Chooser,
    Contest,
    judge,
    recommended_of,
    summary,
)
from tests.benchmarks.input_wait import cluster_of
from tests.benchmarks.setups import measured_setups
from tests.benchmarks.trial import Unseen, launch_of
from warehouse.reads import training_frames

STRATEGIES = ("ddp", "fsdp", "zero2", *COMPRESSED)
MOST_HOSTS = 3
_DRAWS = 400
_KNOWN_HOSTS = 2


def batch_of(device_batch: int, hosts: int) -> int:
    """A device's batch of so many hosts, at the global batch of MOST_HOSTS with `device_batch` each."""
    return MOST_HOSTS * device_batch // hosts


def wanted(here: Workspace, types: Sequence[str], batches: Mapping[str, int]) -> list[Launch]:
    """A launch a cluster, of what was not measured yet; `batches` by workload a device's on MOST_HOSTS hosts."""
    launches, runs = [], training_frames(here.warehouse, "local")["runs"]
    known = {
        (row.cluster, row.workload, row.strategy, str(row.batch_per_device))
        for row in runs.itertuples(index=False)
    }
    for hosts, kind in product(range(1, MOST_HOSTS + 1), types):
        cluster = cluster_of(here, f"{hosts}x{kind}")
        items = []
        for (name, batch), strategy in product(
            batches.items(), STRATEGIES if hosts > 1 else STRATEGIES[:1]
        ):
            each = batch_of(batch, hosts)
            if (cluster.name, name, strategy, str(each)) not in known:
                items.append(
                    Unseen(
                        workload=name,
                        mode=Mode(strategy=strategy),
                        nodes=tuple(range(hosts)),
                        batches=(each,) * hosts,
                    )
                )
        if items:
            launch = launch_of(cluster, items, "to judge the choice of machines and strategy")
            launches.append(replace(launch, est_s=2 * launch.est_s))
    return launches


def contests(
    data: TrainingData,
    usd_per_hour: Mapping[str, float],
    batches: Mapping[str, int],
    *,
    known: int,
    seed: int,
) -> Iterator[tuple[str, Contest, BoolArray]]:
    """(workload, contest, which of its setups the planner may choose), for each choice of `known` types."""
    runs = data.runs.reset_index(drop=True)
    data = replace(data, runs=runs)
    layout = read_setups(runs, {})
    names = np.array([workload_and_mode(name)[0] for name in layout.workloads])
    at_batch = np.array([MOST_HOSTS * batches[name] for name in names]) == layout.samples
    for workload, kinds in product(batches, combinations(usd_per_hour, known)):
        own = names == workload
        taught = (
            own
            & at_batch
            & runs["cluster"].isin([f"{_KNOWN_HOSTS}x{kind}" for kind in kinds]).to_numpy()
        )
        model = fit(replace(data, runs=runs[~own | (layout.ranks == 1) | taught]), seed=seed)
        rivals = measured_setups(runs[own & at_batch], {}, usd_per_hour)
        frame = rivals.frame()
        arrays = read_setups(frame, {})
        predicted = model.predict_arrays(arrays).reset_index(drop=True)
        tolerated = {Mode(strategy=one) for one in STRATEGIES}
        contest = Contest(
            setups=rivals.setups,
            measured_s=rivals.step_s,
            predictions=predicted,
            draws=model.draws(frame, count=_DRAWS, seed=seed),
        )
        yield workload, contest, ~unproven(model, arrays, predicted, tolerated)


def choosers(contest: Contest, allowed: BoolArray) -> dict[str, Chooser]:
    """The planner's choice; machines alone, with each strategy everywhere; and whatever is fastest by prediction."""
    used = np.array([one.strategy for one in contest.setups])
    alone = np.array([len(one.layout) == 1 for one in contest.setups])
    found: dict[str, Chooser] = {RECOMMENDED: partial(recommended_of, allowed)}
    found |= {
        f"{one} everywhere": partial(recommended_of, (used == one) | alone) for one in STRATEGIES
    }
    return found | {
        "compressed without proof": partial(recommended_of, np.ones(len(used), dtype=bool))
    }


def without_constraint(contest: Contest, made: Mapping[str, Chooser]) -> pd.DataFrame:
    """A row a chooser and goal, cheapest and fastest, as `judge` has them."""
    hours, usd = contest.costs()
    rows = []
    for name, chooser in made.items():
        picks = chooser(contest, [Goal(goal="cheapest"), Goal(goal="fastest")])
        for kind, aim, pick in zip(("cheapest", "fastest"), (usd, hours), picks, strict=True):
            regret = np.nan if pick is None else aim[pick] / aim.min() - 1
            rows.append(
                (kind, name, pick is not None, pick is not None, regret, 0.0, np.log1p(regret))
            )
    return pd.DataFrame(
        rows, columns=["kind", "chooser", "answered", "met", "regret", "over", "lost"]
    )


def scores(
    data: TrainingData,
    usd_per_hour: Mapping[str, float],
    batches: Mapping[str, int],
    *,
    known: int,
    seed: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Regret and misses of each chooser by kind of question; the same of the planner by workload."""
    judged = []
    for workload, contest, allowed in contests(data, usd_per_hour, batches, known=known, seed=seed):
        made = choosers(contest, allowed)
        for table in (judge(contest, seed=seed, choosers=made), without_constraint(contest, made)):
            judged.append(table.assign(workload=workload))
    every = pd.concat(judged, ignore_index=True)
    ours = every[every["chooser"] == RECOMMENDED]
    return summary(every), summary(ours.assign(chooser=ours["workload"]))

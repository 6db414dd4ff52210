"""Judge the champion on setups that nobody has measured: draw by a seeded rule, predict, measure.

Run it after `make refresh`. Each setup of a workload with several modes is in one of them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
import typer

from models.domain.cluster import Cluster, InstanceType, Offer
from models.domain.workload import Mode, Workload
from models.step_time.dataset import TrainingData, at_nominal_speed
from models.step_time.machine_specs import computes
from models.step_time.model import StepTimeModel, fit
from tasks.market.offers import current_offers
from tasks.training.registry import load_champion
from tasks.workspace.workspace import open_workspace
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.hosts import (
    Key,
    Unseen,
    key,
    keys_of,
    launch_of,
    measure_all,
    split_by_cores,
    trial_name,
)
from warehouse.reads import training_frames

FRACTIONS = (0.375, 0.5, 0.75, 1.0, 1.25)  # of the least global batch
Fits = Callable[[Cluster], str]
Drawn = list[tuple[Cluster, list[Unseen]]]


def draw(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Fits,
    measured: Collection[Key],
    count: int,
    seed: int,
) -> Drawn:
    """Draw `count` setups or more, clusters and modes equally likely, as far as there are."""
    random, seen = np.random.default_rng(seed), set(measured)
    drawn: Drawn = []
    for cluster in _clusters_in_turn(offers, max_hosts, fits, random):
        if sum(len(items) for _, items in drawn) >= count:
            break
        items = _setups(cluster, workloads, seen, random)
        if items:
            drawn.append((cluster, items))
    return drawn


def _clusters_in_turn(
    offers: Sequence[Offer], max_hosts: int, fits: Fits, random: np.random.Generator
) -> list[Cluster]:
    """Clusters of two hosts or more: one of each size, uniform and mixed, in turn."""
    strata: dict[tuple[int, bool], list[Cluster]] = {}
    by_cores = sorted(
        offers, key=lambda offer: (-offer.instance_type.cores, offer.instance_type.name)
    )
    for size in range(2, max_hosts + 1):
        for members in combinations_with_replacement(by_cores, size):
            cluster = Cluster(members=members)
            if not fits(cluster):
                strata.setdefault((size, len(set(members)) == 1), []).append(cluster)
    queues = [
        [clusters[at] for at in random.permutation(len(clusters))]
        for _, clusters in sorted(strata.items())
    ]
    turns = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]


def _setups(
    cluster: Cluster, workloads: Sequence[Workload], seen: set[Key], random: np.random.Generator
) -> list[Unseen]:
    """Each workload at two batches on all hosts, and two runs on some of them."""
    hosts = tuple(range(len(cluster.members)))
    wanted = [
        (workload, hosts, fraction)
        for workload in workloads
        for fraction in random.choice(FRACTIONS, size=2, replace=False)
    ]
    for _ in range(2):
        size = int(random.integers(1, len(hosts)))
        nodes = tuple(sorted(random.choice(len(hosts), size=size, replace=False).tolist()))
        workload = workloads[int(random.integers(len(workloads)))]
        wanted.append((workload, nodes, random.choice(FRACTIONS)))
    kept = []
    for workload, nodes, fraction in wanted:
        types = [cluster.members[node].instance_type for node in nodes]
        modes = [mode for mode in workload.modes if _trains(types, mode)]
        if not modes:
            continue
        mode = modes[int(random.integers(len(modes)))]
        total = round(float(fraction) * workload.global_batch_least)
        batches = split_by_cores([kind.cores for kind in types], total)
        identity = key(workload.name, [kind.name for kind in types], batches, mode)
        if identity not in seen:
            seen.add(identity)
            kept.append(Unseen(workload=workload.name, nodes=nodes, batches=batches, mode=mode))
    return kept


def _trains(types: Sequence[InstanceType], mode: Mode) -> bool:
    several = sum(kind.devices for kind in types) > 1
    return (several or not mode.sharded) and all(computes(kind.device, mode) for kind in types)


def compare(model: StepTimeModel, data: TrainingData, measured: pd.DataFrame) -> pd.DataFrame:
    """`measured` with predictions, seconds at nominal speed, and compute alone as a baseline."""
    runs = pd.concat([data.runs[~data.runs["run_id"].isin(measured["run_id"])], measured])
    nominal = at_nominal_speed(replace(data, runs=runs.reset_index(drop=True))).runs["step_s"]
    targets = ["step_s", "sync_s", "step_spread", "taken_share"]
    setups = measured.drop(columns=targets, errors="ignore")
    ours = model.predict(setups).reset_index(drop=True)
    profiled = fit(replace(data, runs=data.runs.iloc[:0]), seed=0)
    return measured.assign(
        nominal_s=nominal.to_numpy(float)[-len(measured) :],
        ours=ours["step_s"],
        low_s=ours["step_low_s"],
        high_s=ours["step_high_s"],
        compute_only=profiled.predict(setups)["compute_s"].to_numpy(float),
    )


def summary(compared: pd.DataFrame) -> pd.DataFrame:
    """Relative errors and coverage by kind of setup; of compute alone, errors."""
    mixed = compared["cluster"].str.contains("+", regex=False)
    nominal = compared.assign(step_s=compared["nominal_s"])
    groups = {"all": compared, "nominal speed": nominal}
    groups |= {"one type": compared[~mixed], "mixed types": compared[mixed]}
    groups["compute only"] = compared.assign(ours=compared["compute_only"], low_s=np.nan)
    rows = []
    for name, group in groups.items():
        error = 100 * (group["ours"] / group["step_s"] - 1).abs()
        inside = (group["low_s"] <= group["step_s"]) & (group["step_s"] <= group["high_s"])
        figures = (error.mean(), error.median(), error.quantile(0.9), 100 * inside.mean())
        rows.append((name, len(group), *figures))
    return pd.DataFrame(rows, columns=["setups", "rows", "mean", "median", "p90", "covers"])


def main(count: int = 110, seed: int = 2026, max_hosts: int = 4, write: Write = False) -> None:
    """Draw, measure, compare; print errors and interval coverage."""
    here = open_workspace("local")
    champion = load_champion(here.home, "local")
    if champion is None:
        raise typer.BadParameter("no champion is in force: run `srift refresh` first")
    data = TrainingData(**training_frames(here.warehouse, "local"))
    known = [champion.model.as_measured(workload) for workload in here.measurable]
    drawn = draw(
        [workload for workload in known if workload.modes],
        [offer for offer in current_offers(here) if offer.market == "on-demand"],
        max_hosts=max_hosts,
        fits=here.provider.fits,
        measured=keys_of(data.runs),
        count=count,
        seed=seed,
    )
    launches = [launch_of(*setup, "setup drawn to judge the champion") for setup in drawn]
    measured = measure_all(here, launches, trial_name("holdout"))
    if measured.empty:
        raise typer.BadParameter("nothing was measured: see the lines above")
    table = summary(compare(champion.model, data, measured))
    show(f"setups never measured, champion version {champion.version}", table)
    row = table.iloc[0]
    label, median, covers = f"{len(measured)} local setups", row["median"], row["covers"]
    claims = [
        Claim(f"{label}: median error", "10 %", f"{median:.1f} %", bool(median <= 10)),
        Claim(f"{label}: coverage", "85 to 95 %", f"{covers:.0f} %", bool(85 <= covers <= 95)),
    ]
    report("holdout", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

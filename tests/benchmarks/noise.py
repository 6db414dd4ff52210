"""The noise floor: how far apart runs of one setup are, in a launch, between launches and trials.

Compares with all earlier trials of the home. `--stored` measures nothing.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import typer

from models.domain.cluster import Cluster
from models.step_time.dataset import at_nominal_speed
from tasks.market.offers import current_offers
from tasks.workspace.workspace import Workspace, open_workspace
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.hosts import Unseen, launch_of, measure_all, split_by_cores, trial_name
from tests.frames import data_of

SETUP = ["workload", "cluster", "batch_per_device", "accumulation_steps"]
LEVELS = ["in_launch", "between_launches", "between_trials"]


def spreads(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute deviation from the median, relative, by setup; `run_id` is TRIAL-LAUNCH-ITEM.

    Runs from their launch's median, launch medians from their trial's, trial medians from all.
    """
    parts = runs["run_id"].str.rsplit("-", n=2, expand=True)
    rows = runs.assign(trial=parts[0], launch=parts[0] + "-" + parts[1])
    found = []
    for setup, group in rows.groupby(SETUP, sort=True):
        launches = group.groupby(["trial", "launch"])["step_s"].median()
        trials = launches.groupby("trial").median()
        within = group.groupby("launch")["step_s"].transform("median")
        between = launches.groupby("trial").transform("median")
        deviations = (
            _deviation(within, group["step_s"]),
            _deviation(between, launches),
            _deviation(trials.median(), trials) if len(trials) > 1 else float("nan"),
        )
        found.append((*setup, len(group), float(group["step_s"].median()), *deviations))
    return pd.DataFrame(found, columns=[*SETUP, "runs", "median_s", *LEVELS])


def _deviation(middle: pd.Series[float] | float, values: pd.Series[float]) -> float:
    return float((values / middle - 1.0).abs().mean())


def measure(here: Workspace, *, launches: int, repeats: int, hosts: int) -> None:
    """Run every workload on one host and on `hosts`, `repeats` times in each launch."""
    offers = [offer for offer in current_offers(here) if offer.market == "on-demand"]
    clusters = [Cluster(members=(offer,) * hosts) for offer in offers]
    fitting = [cluster for cluster in clusters if not here.provider.fits(cluster)]
    cluster = min(fitting, key=lambda candidate: candidate.name)
    items = [
        Unseen(
            workload=workload.name,
            nodes=tuple(range(count)),
            batches=split_by_cores([1.0] * count, workload.global_batch_least),
        )
        for _ in range(repeats)
        for workload in here.measurable
        for count in (1, hosts)
    ]
    launch = launch_of(cluster, items, "noise floor")
    measure_all(here, [launch] * launches, trial_name("noise"))


def main(
    launches: int = 3,
    repeats: int = 4,
    hosts: int = 3,
    stored: Annotated[bool, typer.Option("--stored", help="Measure nothing.")] = False,
    write: Write = False,
) -> None:
    """Print the spreads of all trials in the home, as measured and at nominal speed."""
    here = open_workspace("local")
    if not stored:
        measure(here, launches=launches, repeats=repeats, hosts=hosts)
    runs = here.warehouse.select("runs", {"provider": "local"})
    runs = runs[runs["run_id"].str.startswith("noise-")].reset_index(drop=True)
    data = data_of(runs=runs)
    claims = []
    for speed, rows in (("as measured", runs), ("nominal speed", at_nominal_speed(data).runs)):
        table = spreads(rows)
        show(f"spread of equal setups, {speed}", table)
        result = ", ".join(f"{100 * value:.1f}" for value in table[LEVELS].mean())
        claims.append(
            Claim(f"noise in a launch, between launches, trials: {speed}", "", f"{result} %")
        )
    report("noise", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

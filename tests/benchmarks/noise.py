"""The noise floor: how far apart are runs of one and the same setup - in one launch, in others, on another day.

`python -m tests.benchmarks.noise` measures and reports; a later call compares with all earlier ones as well. With
`--against HOME` it measures nothing, and compares this installation's runs with those of another home's warehouse; with
`--stored` it measures nothing either. A second table has the same at nominal speed, by the fixed work beside each run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import typer

from flows.cli import explained
from models.domain.cluster import Cluster
from models.domain.suggestions import nearest_names
from models.step_time.dataset import TrainingData, at_nominal_speed, slowness
from models.step_time.setup_arrays import read_setups
from tasks.market.offers import current_offers
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.workspace.workspace import new_refresh_id, offers_of_market, open_workspace
from tests.benchmarks.trial import Unseen, launch_of, measure_all, split_by_cores
from warehouse.database import Warehouse
from warehouse.reads import mart

SETUP = ["workload", "cluster", "batch_per_device", "accumulation_steps"]


def spreads(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute deviation from the setup's median, relative: one row a setup and one for all.

    `run_id` is TRIAL-LAUNCH-ITEM. `in_launch`: runs from their launch's median; `between_launches`: launch medians
    from their trial's; `between_trials`: trial medians from the median over trials (NaN with one trial).
    """
    parts = runs["run_id"].str.rsplit("-", n=2, expand=True)
    rows = runs.assign(trial=parts[0], launch=parts[0] + "-" + parts[1])
    found = []
    for setup, own in rows.groupby(SETUP, sort=True):
        launches = own.groupby(["trial", "launch"])["step_s"].median()
        trials = launches.groupby("trial").median()
        found.append(
            {
                **dict(zip(SETUP, setup, strict=True)),
                "runs": len(own),
                "median_s": float(own["step_s"].median()),
                "in_launch": _deviation(
                    own.groupby("launch")["step_s"].transform("median"), own["step_s"]
                ),
                "between_launches": _deviation(
                    launches.groupby("trial").transform("median"), launches
                ),
                "between_trials": _deviation(trials.median(), trials)
                if len(trials) > 1
                else float("nan"),
            }
        )
    table = pd.DataFrame(found)
    figures = ["in_launch", "between_launches", "between_trials"]
    return pd.concat(
        [table, pd.DataFrame([{"workload": "all", **table[figures].mean()}])], ignore_index=True
    )


def at_reference_speed(runs: pd.DataFrame) -> pd.DataFrame:
    """What the fixed work beside runs takes away of their scatter: a row as they were measured, one at nominal speed.

    The pooled figures of `spreads`; `about_setup`, the mean deviation of a run from its setup's median, over setups
    with repeats; `beta`, how far steps are taken to follow the fixed work; `reference`, the standard deviation of its
    log over all runs (NaN in the first row). One row where most runs tell of no fixed work.
    """
    nothing = pd.DataFrame()
    data = TrainingData(
        runs=runs,
        profiles=nothing,
        buckets=nothing,
        probes=nothing,
        workloads=nothing,
        instance_types=nothing,
    )
    nominal = at_nominal_speed(data).runs
    found = [{"runs at": "the speed they had", **_pooled(runs)}]
    if "speed_sd" in nominal:
        slow = np.log(slowness(runs))
        shift = np.log(runs["step_s"].to_numpy(float) / nominal["step_s"].to_numpy(float))
        beta = np.nansum(shift * slow) / np.nansum(slow**2)
        found.append(
            {
                "runs at": "nominal speed",
                **_pooled(nominal),
                "beta": beta,
                "reference": float(np.nanstd(slow)),
            }
        )
    return pd.DataFrame(found)


def _pooled(runs: pd.DataFrame) -> dict[str, float]:
    again = runs[runs.groupby(SETUP)["step_s"].transform("size") > 1]
    pooled = (
        spreads(runs)
        .iloc[-1][["in_launch", "between_launches", "between_trials"]]
        .astype(float)
        .to_dict()
    )
    about = _deviation(again.groupby(SETUP)["step_s"].transform("median"), again["step_s"])
    return {"runs": len(again), "about_setup": about} | {
        str(name): float(value) for name, value in pooled.items()
    }


def between(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Setups that two campaigns share: how far the second's medians are from the first's, relative. One row.

    `ratio` is the median of after / before; the others are of |after / before - 1|. NaN where they share none.
    """
    first, second = (runs.groupby(SETUP)["step_s"].median() for runs in (before, after))
    ratio = (second / first).dropna()
    away = (ratio - 1.0).abs()
    figures = {
        "ratio": ratio.median(),
        "median": away.median(),
        "mean": away.mean(),
        "p90": away.quantile(0.9),
    }
    return pd.DataFrame([{"setups": len(ratio), **figures}])


def placements(runs: pd.DataFrame) -> pd.DataFrame:
    """What separates rows that differ only in the order of their machines: the error of a perfect model, by workload.

    Two such rows differ by d in logs; if each is off by the same spread, one is off from the truth by d / sqrt(2).
    Columns workload, pairs, mean, median, p90 of |d| / sqrt(2); the row "all" weighs each workload by its rows.
    """
    layouts = [sorted(row[row > 0].tolist()) for row in read_setups(runs, {}).layout]
    rows = runs.assign(kind=["+".join(f"{one:g}" for one in layout) for layout in layouts])
    found = []
    for workload, own in rows.groupby("workload", sort=True):
        gaps: list[float] = []
        for _, equal in own.groupby(["cluster", "kind", "batch_per_device", "accumulation_steps"]):
            logs = np.log(equal["step_s"].to_numpy(float))
            gaps += list(
                np.abs(logs[:, None] - logs[None, :])[np.triu_indices(len(logs), 1)] / np.sqrt(2)
            )
        if gaps:
            figures = {
                "mean": np.mean(gaps),
                "median": np.median(gaps),
                "p90": np.quantile(gaps, 0.9),
            }
            found.append({"workload": workload, "pairs": len(gaps), "rows": len(own), **figures})
    table = pd.DataFrame(found, columns=["workload", "pairs", "rows", "mean", "median", "p90"])
    pooled = (
        {name: np.average(table[name], weights=table["rows"]) for name in ("mean", "median", "p90")}
        if found
        else {}
    )
    whole = pd.DataFrame(
        [{"workload": "all", "pairs": table["pairs"].sum(), "rows": table["rows"].sum(), **pooled}]
    )
    return pd.concat([table, whole], ignore_index=True)


def neighbours(runs: pd.DataFrame) -> pd.DataFrame:
    """The same, from smoothness in the batch: how far a row is from the line between its two neighbours in log batch.

    With t the place between them the difference has 1 + t^2 + (1 - t)^2 times one row's variance; bends are in it too.
    """
    rows = runs.assign(
        batch=runs["batch_per_device"].astype(str).str.split("+").str[0].astype(float)
    )
    found = []
    for workload, own in rows.groupby("workload", sort=True):
        gaps: list[float] = []
        for _, line in own.groupby(["cluster", "layout", "accumulation_steps"], dropna=False):
            middle = line.groupby("batch")["step_s"].median().sort_index()
            x, y = np.log(middle.index.to_numpy(float)), np.log(middle.to_numpy(float))
            if len(x) < 3:
                continue
            t = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            gaps += list(
                (y[1:-1] - (1 - t) * y[:-2] - t * y[2:]) / np.sqrt(1 + t**2 + (1 - t) ** 2)
            )
        away = np.abs(np.array(gaps) - np.median(gaps)) if gaps else np.array([np.nan])
        figures = {"mean": away.mean(), "median": np.median(away), "p90": np.quantile(away, 0.9)}
        found.append({"workload": workload, "rows": len(own), **figures})
    table = pd.DataFrame(found)
    known = table.dropna()
    pooled = (
        {name: np.average(known[name], weights=known["rows"]) for name in ("mean", "median", "p90")}
        if len(known)
        else {}
    )
    whole = pd.DataFrame([{"workload": "all", "rows": table["rows"].sum(), **pooled}])
    return pd.concat([table, whole], ignore_index=True)


def _deviation(middle: pd.Series[float] | float, values: pd.Series[float]) -> float:
    return float((values / middle - 1.0).abs().mean())


def noise(
    launches: int = 3,
    repeats: int = 4,
    type_name: str = "",
    hosts: int = 3,
    against: Path | None = None,
    stored: bool = False,
) -> None:
    """Repeat every workload on one host and on `hosts`, `repeats` times in each of `launches` launches.

    Of the type named, or of the first on offer of which so many fit.
    """
    here = open_workspace("local")
    if against is not None:
        print_frame(
            between(runs_of_home(against), runs_of_home(here.home)),
            f"setups also measured in {against}",
        )
        return
    if stored:
        report(here.home)
        return
    uniform = {
        offer.instance_type.name: Cluster(members=(offer,) * hosts)
        for offer in offers_of_market(current_offers(here), "on-demand")
        if not here.fits(Cluster(members=(offer,) * hosts))
    }
    if not uniform or type_name not in {"", *uniform}:
        raise typer.BadParameter(
            f"{hosts} hosts of type {type_name!r}: {nearest_names(type_name, uniform)}"
        )
    cluster = uniform[type_name or min(uniform)]
    items = [
        Unseen(
            workload=w.name,
            nodes=nodes,
            batches=split_by_cores([1.0] * len(nodes), w.global_batch_least),
        )
        for _ in range(repeats)
        for w in here.measurable
        for nodes in ((0,), tuple(range(hosts)))
    ]
    trial_id = f"noise-{new_refresh_id(datetime.now(UTC))}"
    with reporting_to(live_reporter()):
        measure_all(here, [launch_of(cluster, items, "noise floor")] * launches, trial_id)
    report(here.home)


def report(home: Path) -> None:
    """Print the spreads of all trials in that home."""
    runs = runs_of_home(home)
    runs = runs[runs["run_id"].str.startswith("noise-")].reset_index(drop=True)
    print_frame(spreads(runs), "spread of equal setups, of all trials so far")
    print_frame(at_reference_speed(runs), "the same by the speed of the machines")


def runs_of_home(home: Path) -> pd.DataFrame:
    """The local runs in that home's warehouse. Raises typer.BadParameter where there is none."""
    file = home / "warehouse.duckdb"
    if not file.is_file():
        raise typer.BadParameter(f"{file} does not exist")
    return mart(Warehouse(file), "runs", provider="local")


if __name__ == "__main__":
    with explained():
        typer.run(noise)

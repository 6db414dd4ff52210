"""What does a campaign cost until its choices are good: ours, random order, a full sweep, Bayesian optimisation.

`python -m tests.benchmarks.campaign FILE --workloads FACTS --catalogue CATALOGUE`, or with
`--warehouse warehouse.duckdb`, holds each workload out in turn and prints the dollars until mean regret is, and stays,
at most 5 %. Ours buys by the shipped shopping list, launch by launch, out of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure

from flows.cli import explained
from models.campaign.candidates import EC2_COSTS, Costs
from models.domain.cluster import parse_cluster
from models.monitoring.backtest import described
from models.step_time.dataset import TrainingData, valid_runs
from tasks.data_files.backtest import read_training
from tasks.reporting.tables import print_frame
from tests.benchmarks.policies import (
    AnyOrder,
    Bayesian,
    Believing,
    BestSeen,
    Campaign,
    cheapest_first,
    numbers,
)
from tests.benchmarks.replay import (
    Ground,
    Policy,
    Start,
    at_dollars,
    ground_of,
    replay,
    start,
    usd_until,
)
from warehouse.database import Warehouse
from warehouse.reads import offers, training_frames

OURS = "ours"
_LIST_PRICE = "on_demand_usd_per_h_us_east_1"
_AT_ONCE = 4  # runs a launch, of the rivals that may group


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Measured rows with all that a replay needs: dollars an hour and devices by instance type, and what runs cost."""

    data: TrainingData
    devices: dict[str, int]
    usd: dict[str, float]
    costs: Costs


def of_file(file: Path, *, workloads: Path | None, catalogue: Path) -> Scene:
    """Rows of EC2 at the catalogue's list prices. Raises ImportRefused on a file that cannot be taken."""
    data, devices = read_training(file, workloads=workloads, catalogue=catalogue)
    prices = pd.read_csv(catalogue, usecols=["instance_type", _LIST_PRICE]).dropna()
    usd = {
        str(name): float(one)
        for name, one in zip(prices["instance_type"], prices[_LIST_PRICE], strict=True)
    }
    return _scene(data, devices, usd, EC2_COSTS)


def of_warehouse(path: Path, provider: str = "local") -> Scene:
    """Rows of a warehouse at its last on-demand prices. Raises WarehouseMissing where there is none."""
    warehouse = Warehouse(path)
    data = TrainingData(**training_frames(warehouse, provider))
    devices = {
        str(name): int(one)
        for name, one in zip(
            data.instance_types["name"], data.instance_types["devices"], strict=True
        )
    }
    listed = offers(warehouse, provider)
    listed = listed[(listed["market"] == "on-demand") & listed["usd_per_hour"].notna()]
    usd = {
        str(name): float(one)
        for name, one in listed.groupby("instance_type")["usd_per_hour"].min().items()
    }
    return _scene(data, devices, usd, Costs())


def _scene(
    data: TrainingData, devices: dict[str, int], usd: dict[str, float], costs: Costs
) -> Scene:
    """Only rows that can be learned from, on machines with a price."""
    runs = valid_runs(data.runs)
    priced = [all(name in usd for name in parse_cluster(str(one))) for one in runs["cluster"]]
    data = replace(data, runs=runs[priced].reset_index(drop=True))
    return Scene(
        data=replace(data, instance_types=described(data, data.runs)),
        devices=devices,
        usd=usd,
        costs=costs,
    )


def compare(
    scene: Scene,
    *,
    batches: int,
    least: int,
    given: bool,
    seeds: int,
    seed: int,
    say: Callable[[str], None],
) -> pd.DataFrame:
    """Curves of every policy on every workload: workload, policy, seed, and the columns of `replay`.

    `batches` global batches a workload with at least `least` setups each; `given` as in `start`; the random
    policies are repeated with `seeds` seeds.
    """
    parts = []
    for workload in sorted(set(scene.data.runs["workload"].astype(str))):
        ground = ground_of(
            scene.data.runs,
            workload,
            usd=scene.usd,
            devices=scene.devices,
            batches=batches,
            least=least,
        )
        if not ground.questions:
            continue
        begun = start(
            scene.data,
            ground,
            scene.devices,
            costs=scene.costs,
            usd=scene.usd,
            given=given,
            seed=seed,
        )
        say(
            f"{workload}: {len(ground.step_s)} setups, {len(ground.questions)} questions, {len(begun.known)} known"
        )
        for name, number, policy in _policies(scene, ground, begun, seeds):
            for place in begun.known:
                policy.tell(place, float(ground.step_s[place]))
            paid = begun.usd if isinstance(policy, Believing) else 0.0
            curve = replay(ground, policy, scene.costs, before_usd=paid)
            parts.append(curve.assign(workload=workload, policy=name, seed=number))
    return pd.concat(parts, ignore_index=True)


def _policies(
    scene: Scene, ground: Ground, begun: Start, seeds: int
) -> Iterator[tuple[str, int, Policy]]:
    """Each policy by name, as often as it has chance in it."""
    belief = (begun.mean, begun.covariance, begun.noise)
    yield OURS, 0, Campaign(ground, *belief, scene.costs, learned=begun.known)
    yield "full sweep, cheapest first", 0, BestSeen(ground, cheapest_first(ground))
    features = numbers(ground.rows, scene.data.instance_types, scene.devices)
    for one in range(seeds):
        order = np.random.default_rng(one).permutation(len(ground.step_s)).tolist()
        for at_once, tail in ((1, ""), (_AT_ONCE, f", {_AT_ONCE} a launch")):
            yield (
                f"random, our model{tail}",
                one,
                AnyOrder(ground, *belief, seed=one, at_once=at_once),
            )
            yield f"random{tail}", one, BestSeen(ground, order, at_once)
        for at_once, tail in ((1, ""), (_AT_ONCE, f", {_AT_ONCE} a launch")):
            for trusting, chooser in ((False, ""), (True, ", chooses by its mean")):
                bayes = Bayesian(
                    ground,
                    features,
                    seed=one,
                    costs=scene.costs,
                    at_once=at_once,
                    trusting=trusting,
                )
                yield f"Bayesian{tail}{chooser}", one, bayes
        yield (
            "Bayesian per dollar, chooses by its mean",
            one,
            Bayesian(ground, features, seed=one, costs=scene.costs, per_dollar=True, trusting=True),
        )


def dollars(curves: pd.DataFrame, most: float) -> pd.DataFrame:
    """Dollars until mean regret is and stays at most `most`, by policy: each workload's median over seeds, their sum.

    `least` and `most` are sums of the best and of the worst seeds; sorted by the sum.
    """
    spent = {
        name: usd_until(own.sort_values("usd", kind="stable"), most)
        for name, own in curves.groupby(["policy", "workload", "seed"], sort=False)
    }
    found = pd.Series(spent).rename_axis(["policy", "workload", "seed"]).rename("usd").reset_index()
    by = found.groupby(["policy", "workload"])["usd"]
    table = by.median().unstack("workload")
    sums = pd.DataFrame(
        {name: getattr(by, how)().groupby("policy").sum() for name, how in _SUMS.items()}
    )
    return table.join(sums).sort_values("all", kind="stable").reset_index()


_SUMS = {"all": "median", "least": "min", "most": "max"}


def regrets(curves: pd.DataFrame, usd: Sequence[float]) -> pd.DataFrame:
    """Mean regret in per cent over workloads and seeds by policy, once so many dollars are spent on each workload."""
    rows = []
    for policy, own in curves.groupby("policy", sort=False):
        each = [at_dollars(one, usd) for _, one in own.groupby(["workload", "seed"])]
        rows.append(
            {
                "policy": policy,
                **dict(
                    zip([f"${one:.3g}" for one in usd], 100 * np.mean(each, axis=0), strict=True)
                ),
            }
        )
    return pd.DataFrame(rows)


def grid(curves: pd.DataFrame) -> list[float]:
    """A few amounts of dollars, doubling up to what the dearest curve spends on one workload."""
    most = float(curves["usd"].max())
    return [0.0, *(most / 2**power for power in range(math.ceil(math.log2(128)), -1, -1))]


def ends(curves: pd.DataFrame) -> pd.DataFrame:
    """Where our own campaign stopped by itself: runs, dollars and regret in per cent, by workload."""
    last = curves[curves["policy"] == OURS].groupby("workload").tail(1)
    return last.assign(regret_percent=100 * last["regret"])[
        ["workload", "runs", "usd", "regret_percent"]
    ]


def plot(curves: pd.DataFrame, path: Path, *, title: str) -> None:
    """Mean regret against dollars a workload, one line a policy, written as an image."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    most = float(curves["usd"].max())
    usd = np.geomspace(most / 500, most, 200).tolist()
    table = regrets(curves, usd).set_index("policy")
    for policy, values in table.iterrows():
        style = (
            {"color": "black", "linewidth": 3, "zorder": 3}
            if policy == OURS
            else {"linewidth": 1.2}
        )
        axes.plot(usd, values.to_numpy(float), label=str(policy), **style)
    axes.axhline(5, color="grey", linewidth=0.8, linestyle="--")
    axes.set(
        xscale="log",
        xlabel="dollars spent on one workload",
        ylabel="mean regret, per cent",
        title=title,
        ylim=(0, 60),
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def bench_campaign(
    file: Annotated[
        Path | None, typer.Argument(help="Measurement rows of EC2, CSV or Parquet.")
    ] = None,
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes.")
    ] = None,
    catalogue: Annotated[Path | None, typer.Option(help="Instance types with list prices.")] = None,
    warehouse: Annotated[
        Path | None, typer.Option(help="Instead of FILE: a warehouse of local runs; only read.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Global batches a workload.")] = 6,
    least: Annotated[int, typer.Option(min=2, help="Fewest setups of a global batch.")] = 6,
    hard: Annotated[
        bool, typer.Option(help="Nothing of the workload is known: one device must be bought too.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 2026,
    percent: Annotated[float, typer.Option(min=0)] = 5.0,
    out: Annotated[
        Path | None, typer.Option(help="Where to write every curve, CSV; the plot lands beside it.")
    ] = None,
) -> None:
    """Every policy on every workload; nothing is chosen by what comes out."""
    if warehouse is not None:
        scene = of_warehouse(warehouse)
    elif file is not None and catalogue is not None:
        scene = of_file(file, workloads=workloads, catalogue=catalogue)
    else:
        raise typer.BadParameter("give FILE and --catalogue, or --warehouse")
    curves = compare(
        scene,
        batches=batches,
        least=least,
        given=not hard,
        seeds=seeds,
        seed=seed,
        say=lambda text: typer.echo(f"  {text}", err=True),
    )
    begun = "nothing known" if hard else "one device known"
    print_frame(
        dollars(curves, percent / 100), f"dollars until regret stays at most {percent:g} %, {begun}"
    )
    print_frame(
        regrets(curves, grid(curves)), "mean regret by dollars spent on a workload, per cent"
    )
    print_frame(ends(curves), "where ours stops by itself")
    if out is not None:
        curves.to_csv(out, index=False)
        plot(curves, out.with_suffix(".png"), title=f"regret against dollars, {begun}")


if __name__ == "__main__":
    with explained():
        typer.run(bench_campaign)

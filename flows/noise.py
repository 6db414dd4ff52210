"""The noise floor: how far apart are runs of one and the same setup - in one launch, in others, on another day.

`python -m flows.noise` measures and reports; a later call compares with all earlier ones as well. With
`--against HOME` it measures nothing, and compares this installation's runs with those of another home's warehouse.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import typer

from flows.cli import explained
from models.cloud import Cluster
from models.judging.holdout import Unseen, split_by_cores
from models.judging.noise import between, spreads
from tasks.installation import new_refresh_id, offers_of_market, open_installation
from tasks.nearest import nearest
from tasks.prices import current_offers
from tasks.printing import live_reporter, print_frame
from tasks.report import reporting_to
from tasks.trial import launch_of, measure_all
from warehouse.database import Warehouse
from warehouse.reads import mart


def noise(
    launches: int = 3, repeats: int = 4, type_name: str = "", hosts: int = 3, against: Path | None = None
) -> None:
    """Repeat every workload on one host and on `hosts`, `repeats` times in each of `launches` launches.

    Of the type named, or of the first on offer of which so many fit.
    """
    here = open_installation("local")
    if against is not None:
        print_frame(between(runs_of_home(against), runs_of_home(here.home)), f"setups also measured in {against}")
        return
    uniform = {
        offer.instance_type.name: Cluster(members=(offer,) * hosts)
        for offer in offers_of_market(current_offers(here), "on-demand")
        if not here.fits(Cluster(members=(offer,) * hosts))
    }
    if not uniform or type_name not in {"", *uniform}:
        raise typer.BadParameter(f"{hosts} hosts of type {type_name!r}: {nearest(type_name, uniform)}")
    cluster = uniform[type_name or min(uniform)]
    items = [
        Unseen(workload=w.name, nodes=nodes, batches=split_by_cores([1.0] * len(nodes), w.global_batch_least))
        for _ in range(repeats)
        for w in here.measurable
        for nodes in ((0,), tuple(range(hosts)))
    ]
    trial_id = f"noise-{new_refresh_id(datetime.now(UTC))}"
    with reporting_to(live_reporter()):
        measure_all(here, [launch_of(cluster, items, "noise floor")] * launches, trial_id)
    runs = runs_of_home(here.home)
    print_frame(
        spreads(runs[runs["run_id"].str.startswith("noise-")]), f"spread of equal setups, {trial_id} and before"
    )


def runs_of_home(home: Path) -> pd.DataFrame:
    """The local runs in that home's warehouse. Raises typer.BadParameter where there is none."""
    file = home / "warehouse.duckdb"
    if not file.is_file():
        raise typer.BadParameter(f"{file} does not exist")
    return mart(Warehouse(file), "runs", provider="local")


if __name__ == "__main__":
    with explained():
        typer.run(noise)

"""How long a table of very many workloads takes: one after another, by processes, and by a Dask cluster's workers.

`python -m tests.benchmarks.spread --workloads 1000 --way processes --way dask` starts the cluster on this machine,
plans the table each way, prints the seconds, and raises where any row differs. `alone` is one after another; `start`
plans nothing, by processes. Seconds of the processor are those of all processes, which other work here hardly changes.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pandas as pd
import psutil
import typer

from models.domain.workload import Workload
from tasks.recommendation.recommend import _planned, recommend_all
from tasks.reporting.tables import print_frame
from tasks.workspace import parallel
from tasks.workspace.parallel import side_by_side
from tasks.workspace.settings import Shared
from tasks.workspace.workspace import Workspace
from tests.dask_cluster import cluster
from tests.installed import NOON, champion, install, measured

WAYS = ["start", "alone", "processes", "dask"]


@dataclass(frozen=True, kw_only=True)
class InSizes(Workspace):
    """With `count` workloads that train on other numbers of samples, all like the first of srift.toml.

    `only_here`: as if its machines were parts of this one.
    """

    count: int
    only_here: bool = False

    @property
    def simulated(self) -> bool:
        """See Workspace."""
        return self.only_here

    @property
    def workloads(self) -> list[Workload]:
        """See Workspace."""
        first, *_ = super().workloads
        return [
            replace(first, samples=first.samples + 1000 * number) for number in range(self.count)
        ]


def in_sizes(here: Workspace, count: int) -> InSizes:
    """The same installation with so many workloads."""
    return InSizes(
        settings=here.settings, warehouse=here.warehouse, provider=here.provider, count=count
    )


def rows_of(here: Workspace, *, spread: bool, scheduler: str = "") -> list[dict[str, Any]]:
    """The table, planned by processes or on the cluster of a `scheduler` where it is to be spread."""
    here = replace(
        here, settings=here.settings.model_copy(update={"shared": Shared(dask=scheduler)})
    )
    with mock.patch.object(parallel, "LONG_S", -1.0 if spread else 1e9):
        return recommend_all.fn(here, champion(), here.provider.offers(NOON), measured().runs)


def main(
    workloads: Annotated[int, typer.Option(help="How many.")] = 100,
    ways: Annotated[list[str], typer.Option("--way", help="Which.")] = WAYS,
    workers: Annotated[int, typer.Option(help="Of the cluster.")] = 2,
) -> None:
    """Seconds of a table each way."""
    tables, rows = {}, []
    champion()
    with (
        tempfile.TemporaryDirectory(prefix="srift-spread-") as folder,
        cluster(Path(folder), workers) as (dask, _),
    ):
        (Path(folder) / "project").mkdir()
        here = in_sizes(install(Path(folder) / "project"), workloads)
        for way in ways:
            begun, before_s = time.perf_counter(), _processor_s()
            if way == "start":
                side_by_side(partial(_planned, shared=champion().model), [None, None])
            else:
                tables[way] = rows_of(
                    here, spread=way != "alone", scheduler=dask if way == "dask" else ""
                )
            taken = {
                "seconds": time.perf_counter() - begun,
                "processor_s": _processor_s() - before_s,
            }
            rows.append({"way": way, "rows": len(tables.get(way, ())), **taken})
    print_frame(pd.DataFrame(rows), f"{workloads} workloads, {workers} workers of the cluster")
    first, *others = tables.values() or [[]]
    if any(one != first for one in others):
        raise AssertionError("tables differ")


def _processor_s() -> float:
    """Of this process and all that it started, until now."""
    here = psutil.Process()
    return float(sum(sum(one.cpu_times()[:4]) for one in (here, *here.children(recursive=True))))


if __name__ == "__main__":
    typer.run(main)

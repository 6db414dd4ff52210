"""Is the efficiency of a larger cluster predicted from one and two units, as `srift size` does?

Errors are in points of efficiency, 100 T(1) / (G T(G)), at 4 and 8 machines or devices of one,
on the measured rows of ../shared/data. `--hosts` measures local hosts instead (root, ten minutes).
"""

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from models.domain.setup_table import rows_of
from models.planner.sizing import ScalingRule, scales_of
from models.step_time.dataset import TrainingData, at_nominal_speed
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.held_out import training_data
from tests.benchmarks.hosts import (
    Unseen,
    cluster_of,
    launch_of,
    measure_all,
    project,
    trial_name,
    type_text,
    workload_text,
)
from warehouse.reads import training_frames

SIZES, HOSTS, MBITS = (4, 8), (1, 2, 4, 8), (200, 1000)
GLOBAL_BATCHES = {"residual_cnn": 48, "transformer_lm": 24, "wide_mlp": 384, "recommender": 768}


def measured_on_hosts(home: Path | None) -> TrainingData:
    """Each workload at one global batch on one to eight hosts of two types."""
    text = "".join(type_text(f"b{mbit}", cores=0.2, gbps=mbit / 1000) for mbit in MBITS)
    text += "".join(workload_text(name, batch) for name, batch in GLOBAL_BATCHES.items())
    with project(text, {}, home) as here:
        launches = []
        for mbit in MBITS:
            items = [
                Unseen(workload=name, nodes=tuple(range(size)), batches=(batch // size,) * size)
                for name, batch in GLOBAL_BATCHES.items()
                for size in HOSTS
            ]
            cluster = cluster_of(here, f"{HOSTS[-1]}xb{mbit}")
            launches.append(launch_of(cluster, items, "to judge sizing", item_s=20.0))
        measure_all(here, launches, trial_name("sizing"))
        return TrainingData(**training_frames(here.warehouse, "local"))


def errors(data: TrainingData) -> pd.DataFrame:
    """A row a scale, global batch and asked size: efficiency measured and by the rule, in per cent.

    Global batches are as measured, or in micro-steps of which the asked size has a single one.
    """
    data = at_nominal_speed(data)
    devices = {str(row["name"]): int(row["devices"]) for row in rows_of(data.instance_types)}
    found = []
    for name in sorted(set(data.runs["workload"].astype(str))):
        for scale in scales_of(data, name, devices):
            for size in SIZES:
                shapes = [
                    micro for total, micro, count in scale.steps if (total, count) == (size, 1)
                ]
                single = {size * micro: micro for micro in shapes}
                pairs = [*((batch, None) for batch in scale.batches), *single.items()]
                for batch, micro in pairs:
                    sizes = scale.sizes(batch, micro)
                    if {1, 2, size} <= sizes.keys():
                        rule = ScalingRule.through(sizes[1], 2, sizes[2])
                        measured = 100 * sizes[1] / (size * sizes[size])
                        row = (name, scale.instance_type, scale.devices_each, size)
                        found.append((*row, measured, 100 * rule.efficiency(size)))
    columns = ["workload", "kind", "devices_each", "size", "measured", "predicted"]
    return pd.DataFrame(found, columns=columns)


def main(
    hosts: Annotated[bool, typer.Option("--hosts", help="Measure local hosts.")] = False,
    home: Annotated[Path | None, typer.Option(help="Keeps the measurements.")] = None,
    write: Write = False,
) -> None:
    """Print errors by size and unit."""
    table = errors(measured_on_hosts(home) if hosts else training_data())
    off = (table["predicted"] - table["measured"]).abs()
    by = table.assign(off=off, within=100.0 * (off <= 5)).groupby(["kind", "devices_each", "size"])
    show("points of efficiency", by[["off", "within"]].mean().reset_index())
    result = f"{off.mean():.1f} / {off.median():.1f}; {100 * (off <= 5).mean():.0f} %"
    where = "local hosts" if hosts else "three GPU kinds"
    claim = f"efficiency at {SIZES}, {where}, {len(table)} cells"
    met = bool((off <= 5).mean() >= 0.9)
    report("sizing", [Claim(claim, "5 points in 90 %", result, met)], write=write)


if __name__ == "__main__":
    typer.run(main)

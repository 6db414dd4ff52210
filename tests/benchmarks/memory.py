"""Peak memory of ranks, predicted from profiles of one device, against trainings of several ranks.

The built-in workloads, in sizes whose weights, states and activations weigh more than torch itself,
are profiled in each mode on one process of this machine, then trained in every sharding strategy.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import typer

from models.domain.setup_table import modes_of
from models.domain.workload import MODES, Mode
from models.step_time.dataset import workload_facts
from models.step_time.memory import fit_memory
from models.step_time.setup_arrays import read_setups
from tasks.node.record import Item
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.ranks import served, workload_file
from tests.frames import data_of

HOST = "host"  # the instance type of all processes
FACTS = ("gradient_bytes", "flops_per_sample", "checkpoint_bytes")
STRATEGIES, RANKS = ("ddp", "fsdp", "zero2", "zero1"), (2, 4)


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A workload of a size: arguments of its entrypoint, and samples of one device."""

    name: str
    arguments: dict[str, int]
    batches: tuple[int, ...]
    layered: bool = False  # several layers, which can be recomputed


SIZED = (
    Sized(
        name="transformer_lm",
        arguments={"vocabulary": 8000, "length": 64, "width": 384, "layers": 4},
        batches=(1, 2, 4),
        layered=True,
    ),
    Sized(name="residual_cnn", arguments={"width": 96}, batches=(2, 4, 8), layered=True),
    Sized(
        name="wide_mlp",
        arguments={"features": 1024, "width": 3072},
        batches=(64, 128, 256),
    ),
    Sized(name="recommender", arguments={"rows": 60000}, batches=(64, 128, 256)),
)


def profile_item(sized: Sized, mode: Mode = MODES[0]) -> Item:
    """A profile of one device."""
    return Item(
        run_id="",
        kind="profile",
        nodes=[0],
        workload=sized.name,
        batches=list(sized.batches),
        precision=mode.precision,
        switches=mode.switches,
    )


def measured(sized: Sized) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of profiles, rows of runs of several ranks, and facts of the workload."""
    profiles, runs = [], []
    facts: dict[str, Any] = {}
    file = workload_file(sized.name, dict(sized.arguments))
    switches = ("none", "checkpointing") if sized.layered else ("none",)
    for precision, switch in product(("fp32", "bf16"), switches):
        profiled = profile_item(sized, Mode(precision=precision, switches=switch))
        names = {"workload": sized.name, "precision": precision, "switches": switch}
        (alone,) = served(file, [profiled], world=1)
        facts = facts or {"workload": sized.name} | {name: alone[name] for name in FACTS}
        profiles += [names | row | {"instance_type": HOST} for row in alone["rows"]]
        for world in RANKS:
            items = [
                replace(
                    profiled,
                    kind="train",
                    nodes=list(range(world)),
                    batches=[batch] * world,
                    strategy=strategy,
                    warmup_steps=1,
                    least_steps=1,
                    most_steps=1,
                )
                for strategy, batch in product(STRATEGIES, (sized.batches[0], sized.batches[-1]))
            ]
            for item, values in zip(items, served(file, items, world=world), strict=True):
                row = {"strategy": item.strategy, "ranks": world, "batch": item.batches[0]}
                runs.append(names | row | {"peak_bytes": values["peak_bytes"]})
    return profiles, runs, facts


def predicted(profiles: pd.DataFrame, runs: pd.DataFrame, facts: pd.DataFrame) -> list[float]:
    """Peak bytes of each run, from profiles and facts alone."""
    known = workload_facts(data_of(workloads=facts))
    nothing = pd.DataFrame(columns=["workload", "cluster", "batch_per_device"])
    model = fit_memory(profiles, read_setups(nothing, {}), {}, known)
    cases = zip(runs["workload"], modes_of(runs), runs["batch"], runs["ranks"], strict=True)
    return [
        model.needs(name, mode, HOST, ranks).peak_bytes(batch) for name, mode, batch, ranks in cases
    ]


def main(write: Write = False) -> None:
    """Print errors by workload and strategy."""
    found = [measured(sized) for sized in SIZED]
    profiles, runs = (
        pd.DataFrame([row for answer in found for row in answer[at]]) for at in (0, 1)
    )
    facts = pd.DataFrame([answer[2] for answer in found])
    error = 100 * (np.array(predicted(profiles, runs, facts)) / runs["peak_bytes"] - 1)
    runs = runs.assign(off=error.abs(), over=error, under=error < -5)
    for by in ("workload", "strategy"):
        figures = {"off": "median", "over": ["min", "max"], "under": "sum"}
        table = runs.groupby(by).agg(figures)
        table.columns = table.columns.map(" ".join)
        show("peak memory, per cent of measured", table.reset_index())
    middle, under = float(runs["off"].median()), 100 * float(runs["under"].mean())
    claims = [
        Claim("peak memory of ranks: median error", "10 %", f"{middle:.1f} %", middle <= 10),
        Claim("setups over 5 % above the prediction", "1 %", f"{under:.1f} %", under <= 1),
    ]
    report("memory", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

"""Is a rank's peak memory predicted? Profiles of one device, then trainings of several ranks, by what the nodes run.

`python -m tests.benchmarks.memory` builds the workloads of tasks/node/workloads in sizes whose weights, states and
activations weigh more than torch itself, profiles each mode on one process of this machine, and trains it on some
processes with every strategy. Peaks are resident bytes of a process, which gives freed memory back at once
(ranks.py). A setup is predicted from the profiles alone, before it has run. Exits 1 where the median error is above
10 %, or more than 1 % of setups take over 5 % more than predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from models.domain.workload import MODES, Mode
from models.step_time.dataset import TrainingData, by_variant
from models.step_time.memory import MemoryModel, fit_memory
from models.step_time.setup_arrays import read_setups, variant, variants_of
from tasks.node.record import Item, WorkloadFile
from tasks.reporting.tables import print_frame
from tests.benchmarks.ranks import served

HOST = "host"  # the type of machine that all processes are
MOST_MEDIAN, MOST_UNDER, UNDER = 0.10, 0.01, 0.05
_STEPS: dict[str, Any] = {
    "warmup_steps": 1,
    "least_steps": 1,
    "most_steps": 1,
}  # the second has all states


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A workload of a size: arguments of its entrypoint, and samples of one device."""

    name: str
    arguments: dict[str, int]
    batches: tuple[int, ...]
    layered: bool  # it has parts of several layers, which can be recomputed


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
        layered=False,
    ),
    Sized(name="recommender", arguments={"rows": 60000}, batches=(64, 128, 256), layered=False),
)


def measured(
    sized: Sized, ranks: list[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of profiles, rows of runs of several ranks, and facts of the workload."""
    profiles: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"workload": sized.name}
    workload = WorkloadFile(
        name=sized.name,
        digest=sized.name,
        file=f"{sized.name}.py",
        function="build",
        arguments=dict(sized.arguments),
    )
    plain: dict[str, Any] = {
        "run_id": "",
        "nodes": [0],
        "workload": sized.name,
        "batches": list(sized.batches),
    }
    for precision, switches in product(
        ("fp32", "bf16"), ("none", "checkpointing") if sized.layered else ("none",)
    ):
        mode: dict[str, Any] = {"precision": precision, "switches": switches}
        profiled = Item(**plain, **mode, kind="profile")
        (served_row,) = served(workload, [profiled], world=1)
        if switches == "none":
            facts |= {
                name: served_row[name]
                for name in ("gradient_bytes", "flops_per_sample", "checkpoint_bytes")
            }
        for row in served_row["rows"]:
            profiles.append({"workload": sized.name, "instance_type": HOST, **mode, **row})
        for world in ranks:
            batches = [(sized.batches[0], 1), (sized.batches[-1], 1)]
            batches += [(sized.batches[0], 2)] * (Mode(**mode) == Mode())
            trained = [
                replace(
                    profiled,
                    kind="train",
                    nodes=list(range(world)),
                    batches=[batch] * world,
                    accumulation_steps=steps,
                    strategy=strategy,
                    **_STEPS,
                )
                for strategy, (batch, steps) in product(("ddp", "fsdp", "zero2", "zero1"), batches)
            ]
            for item, values in zip(trained, served(workload, trained, world=world), strict=True):
                runs.append(
                    {
                        "workload": sized.name,
                        "ranks": world,
                        "batch": item.batches[0],
                        "steps": item.accumulation_steps,
                    }
                    | {**mode, "strategy": item.strategy, "peak_bytes": values["peak_bytes"]}
                )
                print(runs[-1], flush=True)
    return profiles, runs, facts


def predicted(
    profiles: pd.DataFrame, runs: pd.DataFrame, facts: pd.DataFrame
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(runs,) peak bytes by what ships, from the profiles and facts alone."""
    modes = [variant(name, mode) for name in facts["workload"] for mode in MODES]
    nothing = pd.DataFrame()
    frames = {"runs": nothing, "buckets": nothing, "probes": nothing, "instance_types": nothing}
    data = by_variant(TrainingData(profiles=profiles, workloads=facts, **frames), modes)
    model: MemoryModel = fit_memory(
        data.profiles,
        read_setups(pd.DataFrame(columns=["workload", "cluster", "batch_per_device"]), {}),
        {},
        **{
            name: dict(
                zip(data.workloads["workload"], data.workloads[name].astype(float), strict=True)
            )
            for name in ("gradient_bytes", "flops_per_sample", "checkpoint_bytes")
        },
    )
    named = variants_of(runs)
    asked = zip(named, runs["batch"], runs["ranks"], runs["steps"] > 1, strict=True)
    return np.array(
        [
            model.peak_bytes(name, HOST, batch, ranks, accumulates=several)
            for name, batch, ranks, several in asked
        ]
    )


def scored(runs: pd.DataFrame) -> pd.DataFrame:
    """A row by workload, precision, strategy and switches, and one of all: setups, median error, most over and under.

    Errors are per cent of what was measured; `under_5` counts setups that took over 5 % more than predicted.
    """
    runs = runs.assign(error=100 * (runs["predicted"] / runs["peak_bytes"] - 1))

    def groups() -> Iterator[tuple[str, pd.DataFrame]]:
        for by in ("workload", "precision", "strategy", "switches", "steps"):
            yield from ((f"{by} {name}", rows) for name, rows in runs.groupby(by))
        yield "all", runs

    return pd.DataFrame(
        [
            {
                "setups": name,
                "number": len(rows),
                "median_gb": median(rows["peak_bytes"]) / 1e9,
                "median_%": median(rows["error"].abs()),
                "most_over_%": rows["error"].max(),
                "most_under_%": -rows["error"].min(),
                "under_5": int((rows["error"] < -100 * UNDER).sum()),
            }
            for name, rows in groups()
        ]
    )


def main(
    ranks: Annotated[list[int], typer.Option(help="processes that train together")] = [2, 4],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="workloads, by their files' names")] = [],  # noqa: B006
    keep: Annotated[Path | None, typer.Option(help="file to write what was measured to")] = None,
    again: Annotated[
        Path | None, typer.Option(help="such a file: predict it again, and measure nothing")
    ] = None,
) -> None:
    """Print the table."""
    if again is not None:
        kept = json.loads(again.read_text())
    else:
        kept = {"profiles": [], "runs": [], "facts": []}
        for sized in SIZED:
            if not only or sized.name in only:
                profiles, runs, facts = measured(sized, ranks)
                kept = {
                    "profiles": kept["profiles"] + profiles,
                    "runs": kept["runs"] + runs,
                    "facts": [*kept["facts"], facts],
                }
                if keep is not None:
                    keep.write_text(json.dumps(kept))
    frames = {name: pd.DataFrame(rows) for name, rows in kept.items()}
    table = scored(frames["runs"].assign(predicted=predicted(**frames)))
    print_frame(table.round(3), "peak memory of a rank, predicted from profiles of one device")
    total = table.iloc[-1]
    if total["median_%"] > 100 * MOST_MEDIAN or total["under_5"] > MOST_UNDER * total["number"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""Is a rank's peak memory predicted? Profiles of one device, then trainings of several ranks, by what the nodes run.

`python -m tests.benchmarks.memory` builds the workloads of tasks/node/workloads in sizes whose weights, states and
activations weigh more than torch itself, profiles each mode on one process of this machine, and trains it on some
processes with every strategy, each setup in processes of its own. Peaks are resident bytes of a process, as local hosts
measure them. A setup is predicted from the profiles alone, before it has run. Exits 1 where the median error is above
10 %, or more than 1 % of setups take over 5 % more than predicted.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import typer

from models.domain.setup_table import read_setups, variants_of
from models.domain.workload import MODES, variant
from models.step_time.dataset import TrainingData, by_variant
from models.step_time.memory import MemoryModel, fit_memory
from tasks.node.checkpoint import write_checkpoint
from tasks.node.device import reset_peak
from tasks.node.entrypoint import build, try_once
from tasks.node.measuring import Patience
from tasks.node.profiler import profile
from tasks.node.record import Item, WorkloadFile
from tasks.node.steps import train
from tasks.node.switches import switch_on
from tasks.reporting.tables import print_frame
from tests.benchmarks.commands import ROOT

WORKLOADS = ROOT / "tasks" / "node" / "workloads"
HOST = "host"  # the type of machine that all processes are
MOST_MEDIAN, MOST_UNDER, UNDER = 0.10, 0.01, 0.05
_CPU = torch.device("cpu")
_STEPS: dict[str, Any] = {"warmup_steps": 2, "least_steps": 2, "most_steps": 2}


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
        arguments={"vocabulary": 8000, "length": 128, "width": 384, "layers": 8},
        batches=(4, 8, 16),
        layered=True,
    ),
    Sized(name="residual_cnn", arguments={"width": 96}, batches=(8, 16, 32), layered=True),
    Sized(name="wide_mlp", arguments={"features": 1024, "width": 3072}, batches=(64, 128, 256), layered=False),
    Sized(name="recommender", arguments={"rows": 60000}, batches=(64, 128, 256), layered=False),
)


def serve(task: dict[str, Any]) -> dict[str, Any]:
    """Values of one item on one rank of this process: a profile, or a training of `world` ranks."""
    torch.set_num_threads(1)
    world, rank = int(task["world"]), int(task["rank"])
    item = Item(**task["item"])
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{task['port']}", rank=rank, world_size=world)
    reset_peak(_CPU)
    workload = WorkloadFile(**task["workload"])
    built = build(WORKLOADS, workload, seed=0, rank=rank, device=_CPU, precision=item.precision)
    switch_on(built.model, item.switches, whole=item.strategy == "ddp")
    try_once(built, item.batches[min(rank, len(item.batches) - 1)])
    if item.kind == "train":
        values, problem = train(item, built, dist.group.WORLD, Patience(), place=rank)
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{task['port']}", rank=0, world_size=1)
        assert dist.group.WORLD is not None
        values, problem = profile(item, built, dist.group.WORLD, Patience())
        values |= write_checkpoint(built)
    if problem:
        raise RuntimeError(problem)
    return values


def ranks_of(sized: Sized, item: Item, world: int) -> dict[str, Any]:
    """The first rank's values of an item, each of `world` ranks a process of its own. Raises where one fails."""
    workload = WorkloadFile(
        name=sized.name, digest=sized.name, file=f"{sized.name}.py", function="build", arguments=dict(sized.arguments)
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        answers = [Path(folder) / str(rank) for rank in range(world)]
        processes = []
        for rank, answer in enumerate(answers):
            task = {"item": asdict(item), "workload": asdict(workload), "world": world, "rank": rank, "port": port}
            command = [sys.executable, "-m", "tests.benchmarks.memory", "--serve", json.dumps(task)]
            processes.append(subprocess.Popen([*command, "--answer", str(answer)], cwd=ROOT))
        if max(process.wait() for process in processes):
            raise RuntimeError(f"{item} failed on {world} ranks")
        return dict(json.loads(answers[0].read_text()))


def measured(sized: Sized, ranks: list[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of profiles, rows of runs of several ranks, and facts of the workload."""
    profiles: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"workload": sized.name}
    switches = ("none", "checkpointing") if sized.layered else ("none",)
    for precision, switched in product(("fp32", "bf16"), switches):
        mode = {"precision": precision, "switches": switched}
        item = Item(
            run_id="p",
            kind="profile",
            nodes=[0],
            workload=sized.name,
            batches=list(sized.batches),
            precision=precision,
            switches=switched,
        )
        told = ranks_of(sized, item, 1)
        if switched == "none":
            facts |= {name: told[name] for name in ("gradient_bytes", "flops_per_sample", "checkpoint_bytes")}
        for row in told["rows"]:
            profiles.append({"workload": sized.name, "instance_type": HOST, **mode, **row})
        for strategy, world, batch in product(("ddp", "fsdp", "zero2"), ranks, (sized.batches[0], sized.batches[-1])):
            ours = {**mode, "strategy": strategy}
            trained = replace(
                item, kind="train", nodes=list(range(world)), batches=[batch] * world, strategy=strategy, **_STEPS
            )
            peak = ranks_of(sized, trained, world)["peak_bytes"]
            runs.append({"workload": sized.name, "ranks": world, "batch": batch, **ours, "peak_bytes": peak})
            print(runs[-1], flush=True)
    return profiles, runs, facts


def predicted(profiles: pd.DataFrame, runs: pd.DataFrame, facts: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
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
            name: dict(zip(data.workloads["workload"], data.workloads[name].astype(float), strict=True))
            for name in ("gradient_bytes", "flops_per_sample", "checkpoint_bytes")
        },
    )
    named = variants_of(runs)
    asked = zip(named, runs["batch"], runs["ranks"], strict=True)
    return np.array([model.peak_bytes(name, HOST, batch, ranks) for name, batch, ranks in asked])


def scored(runs: pd.DataFrame) -> pd.DataFrame:
    """A row by workload, precision, strategy and switches, and one of all: setups, median error, most over and under.

    Errors are per cent of what was measured; `under_5` counts setups that took over 5 % more than predicted.
    """
    runs = runs.assign(error=100 * (runs["predicted"] / runs["peak_bytes"] - 1))

    def groups() -> Iterator[tuple[str, pd.DataFrame]]:
        for by in ("workload", "precision", "strategy", "switches"):
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
    again: Annotated[Path | None, typer.Option(help="such a file: predict it again, and measure nothing")] = None,
    serve_one: Annotated[str, typer.Option("--serve", hidden=True)] = "",
    answer: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the table."""
    if serve_one and answer is not None:
        answer.write_text(json.dumps(serve(json.loads(serve_one))))
        return
    if again is not None:
        told = json.loads(again.read_text())
    else:
        told = {"profiles": [], "runs": [], "facts": []}
        for sized in SIZED:
            if not only or sized.name in only:
                profiles, runs, facts = measured(sized, ranks)
                told = {
                    "profiles": told["profiles"] + profiles,
                    "runs": told["runs"] + runs,
                    "facts": [*told["facts"], facts],
                }
                if keep is not None:
                    keep.write_text(json.dumps(told))
    frames = {name: pd.DataFrame(rows) for name, rows in told.items()}
    table = scored(frames["runs"].assign(predicted=predicted(**frames)))
    print_frame(table.round(3), "peak memory of a rank, predicted from profiles of one device")
    total = table.iloc[-1]
    if total["median_%"] > 100 * MOST_MEDIAN or total["under_5"] > MOST_UNDER * total["number"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

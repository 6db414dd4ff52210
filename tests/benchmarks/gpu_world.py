"""How good are the models on GPUs, workloads and cluster sizes that no file at hand has: a made-up world, two rivals.

`python -m tests.benchmarks.gpu_world --seed 1` prints errors and interval coverage by question
(`tests.benchmarks.synthetic_gpus`).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import pandas as pd
import typer

from flows.cli import explained
from models.domain.numeric import FloatArray
from tasks.reporting.tables import print_frame
from tasks.workspace.blas_threads import one_thread
from tasks.workspace.parallel import side_by_side
from tests.benchmarks.rivals import predict_textbook, predict_trees_alone
from tests.benchmarks.splits import Rival, ask, coverage, errors
from tests.benchmarks.synthetic_gpus import TYPES, USD, GpuWorld, questions


def _by_type(
    rival: Rival, known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]
) -> FloatArray:
    """The rival, for which a workload on another type is another workload: it knows of types nothing else."""
    apart = [
        one.assign(workload=one["workload"] + one["cluster"].str.split("x", n=1).str[1])
        for one in (known, asked)
    ]
    return rival(apart[0], apart[1], devices)


RIVALS = {
    "textbook": partial(_by_type, predict_textbook),
    "trees": partial(_by_type, predict_trees_alone),
}


def bench_world(
    seed: int = 1,
    waiting: Annotated[
        bool, typer.Option(help="Whether rows say how long they waited (sync_s).")
    ] = True,
    rivals: Annotated[bool, typer.Option(help="Score the rivals too.")] = True,
) -> None:
    """Draw a world, hold its workloads, sizes and types out in turn, and score what is predicted of them."""
    data = GpuWorld(seed).data()
    if not waiting:
        data.runs["sync_s"] = float("nan")
    others = RIVALS if rivals else {}
    devices = {name: row[0] for name, row in TYPES.items()}
    with one_thread():
        asked = partial(ask, data, rivals=others, devices=devices, seed=seed, usd=USD)
        scored = pd.concat(side_by_side(asked, questions(data.runs, seed=seed)))
    print_frame(
        errors(scored, ["ours", *others]),
        f"{len(data.runs)} rows of world {seed}: per cent of the step time",
    )
    print_frame(coverage(scored, ["split"]), "intervals by question, per cent")
    print_frame(coverage(scored, ["split", "group"]), "intervals by held-out group, per cent")


if __name__ == "__main__":
    with explained():
        typer.run(bench_world)

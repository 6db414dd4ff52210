"""How good are the models on GPUs, workloads and cluster sizes that no file at hand has: a made-up world, two rivals.

`python -m flows.bench_world --seed 1` prints errors and interval coverage by question (`models.judging.gpu_world`).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import pandas as pd
import typer

from flows.cli import explained
from models.arrays import FloatArray
from models.judging.benchmark import Rival, ask, coverage, errors
from models.judging.gpu_world import TYPES, GpuWorld, questions
from models.judging.textbook import predict_textbook
from tasks.printing import print_frame
from tasks.side_by_side import side_by_side
from tasks.threads import one_thread
from tasks.trees import predict_trees_alone


def _by_type(rival: Rival, known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]) -> FloatArray:
    """The rival, told that a workload on another type is another workload: it knows of types nothing else."""
    apart = [one.assign(workload=one["workload"] + one["cluster"].str.split("x", n=1).str[1]) for one in (known, asked)]
    return rival(apart[0], apart[1], devices)


RIVALS = {"textbook": partial(_by_type, predict_textbook), "trees": partial(_by_type, predict_trees_alone)}


def bench_world(
    seed: int = 1,
    waiting: Annotated[bool, typer.Option(help="Whether rows say how long they waited (sync_s).")] = True,
    rivals: Annotated[bool, typer.Option(help="Score the rivals too.")] = True,
) -> None:
    """Draw a world, hold its workloads, sizes and types out in turn, and score what is predicted of them."""
    data = GpuWorld(seed).data()
    if not waiting:
        data.runs["sync_s"] = float("nan")
    others = RIVALS if rivals else {}
    devices = {name: row[0] for name, row in TYPES.items()}
    with one_thread():
        asked = partial(ask, data, rivals=others, devices=devices, seed=seed)
        scored = pd.concat(side_by_side(asked, questions(data.runs, seed=seed)))
    print_frame(errors(scored, ["ours", *others]), f"{len(data.runs)} rows of world {seed}: per cent of the step time")
    print_frame(coverage(scored, ["split"]), "intervals by question, per cent")
    print_frame(coverage(scored, ["split", "group"]), "intervals by held-out group, per cent")


if __name__ == "__main__":
    with explained():
        typer.run(bench_world)

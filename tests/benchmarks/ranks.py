"""Ranks of a training as processes of this machine: what a worker does with an item, without agents or torchrun.

`python -m tests.benchmarks.ranks TASK ANSWER` serves one rank; it imports what travels to a node and nothing more, so
that a process weighs what it weighs there. Freed memory goes back to the kernel at once, as a GPU's does to torch: a
process's resident bytes are otherwise also those that the C library keeps between blocks that are in use.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tasks.node.checkpoint import write_checkpoint
from tasks.node.device import reset_peak
from tasks.node.entrypoint import build, try_once
from tasks.node.measuring import Patience
from tasks.node.precision import arithmetic
from tasks.node.profiler import profile
from tasks.node.record import LEARN, Item, WorkloadFile
from tasks.node.steps import learn, one_step, train
from tasks.node.strategies import shares_out, strategy
from tasks.node.switches import switch_on

# glibc: blocks of 64 KiB or more are the kernel's, and what is free at the end of the heap too.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tasks" / "node" / "workloads"
_CPU = torch.device("cpu")


def served(
    workload: WorkloadFile,
    items: Sequence[Item],
    *,
    world: int,
    losses: int = 0,
    other_batches: bool = False,
    rounded: bool = False,
) -> list[dict[str, Any]]:
    """The first rank's values of each item on `world` ranks, one thread and one process each, in this order.

    With `losses` the items are trained for so many steps, and the values are `losses`, means over the ranks;
    `other_batches` are those of other ranks; `rounded` begins with the weights rounded to bfloat16.

    Raises RuntimeError where a rank fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = {"workload": asdict(workload), "items": [asdict(one) for one in items], "losses": losses}
    task |= {"others": world if other_batches else 0, "rounded": rounded}
    with TemporaryDirectory() as folder:
        answers = [Path(folder) / str(rank) for rank in range(world)]
        processes = []
        for rank, answer in enumerate(answers):
            own = json.dumps(task | {"world": world, "rank": rank, "port": port})
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.benchmarks.ranks",
                own,
                str(answer),
            ]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=os.environ | ({} if losses else _RETURNED))
            )
        if max(process.wait() for process in processes):
            raise RuntimeError(f"{workload.name} failed on {world} ranks")
        return [dict(one) for one in json.loads(answers[0].read_text())]


def serve(task: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Values of the task's items on this rank."""
    torch.set_num_threads(1)
    world, rank = int(task["world"]), int(task["rank"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{task['port']}", rank=rank, world_size=world
    )
    workload = WorkloadFile(**task["workload"])
    for item in (Item(**one) for one in task["items"]):
        yield _values(item, workload, task, rank=rank)


def _values(
    item: Item, workload: WorkloadFile, task: dict[str, Any], *, rank: int
) -> dict[str, Any]:
    losses = int(task["losses"])
    group = dist.group.WORLD
    assert group is not None
    reset_peak(_CPU)
    shared = shares_out(item.strategy)
    computing = arithmetic(item.precision, _CPU)
    built = build(
        WORKLOADS,
        workload,
        seed=item.seed,
        rank=rank + int(task["others"]),
        computing=computing,
        shared=shared,
    )
    if task["rounded"]:
        with torch.no_grad():
            for one in built.model.parameters():
                one.copy_(one.bfloat16())
    switch_on(built.model, item.switches, whole=not shared)
    try_once(built, item.batches[0], shared=shared)
    if losses:
        module = strategy(item.strategy, item.switches, machines=item.used)(
            built.model, built.optimizer, group, _CPU
        )
        step = partial(
            one_step,
            built,
            module,
            batch=item.batches[0],
            accumulation_steps=1,
            scale=1.0,
            sync=True,
        )
        summed = torch.tensor([step() for _ in range(losses)], dtype=torch.float64)
        dist.all_reduce(summed)
        return {"losses": (summed / dist.get_world_size()).tolist()}
    if item.kind == "profile":
        values, problem = profile(item, built, group, Patience())
        values |= write_checkpoint(built)
    elif item.kind == LEARN:
        values, problem = learn(item, built, group, place=rank)
    else:
        values, problem = train(item, built, group, Patience(), place=rank)
    if problem:
        raise RuntimeError(problem)
    return values


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(list(serve(json.loads(sys.argv[1])))))

"""Does a workload learn in its other modes as it does in fp32 and plain data parallelism? By what the nodes run.

`python -m tests.benchmarks.same_mathematics` trains each workload of tasks/node/workloads on two processes of this
machine in each mode, from the same weights on the same batches, with several seeds. Losses are means over ranks and
twenty steps; all figures are parts of what plain fp32 learned from its first to its last: `apart`, how far a mode's
loss lies from that of plain fp32, in the mean of the seeds, the most of the windows; `at_end`, the same with its sign
in the last window; `other_batches`, as `apart`, of plain fp32 with the same weights on other batches; `rounded_once`,
as `apart`, of plain fp32 on the same batches whose first weights were rounded to bfloat16, and nothing later: what a
training does to any difference of that size.

A mode passes where `apart` is at most a tenth of `other_batches`: what a mode changes is then lost in what the order of
the samples does, which nobody controls for. Where only sums are rounded otherwise (fp32 in any mode), at most a
hundredth is allowed. Exits 1 where a mode does not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from models.domain.numeric import FloatArray
from models.domain.workload import Mode
from tasks.node.record import Item, WorkloadFile
from tasks.reporting.tables import print_frame
from tests.benchmarks.ranks import WORKLOADS, served

_WINDOW = 20  # steps: each batch is another, and so is its loss
_RANKS = 2
SHARE = {"fp32": 0.01, "bf16": 0.1}  # of what other batches change, by precision
LAYERED = (
    "transformer_lm",
    "residual_cnn",
)  # they have parts of several layers, which can be recomputed
MODES = tuple(Mode(*one) for one in product(SHARE, ("ddp", "fsdp", "zero2")))
RECOMPUTED = (Mode(switches="checkpointing"), Mode("bf16", "fsdp", "checkpointing"))


def losses(file: Path, modes: Sequence[Mode], *, seeds: int, steps: int, batch: int) -> FloatArray:
    """(seeds, 2 + modes, windows) mean losses of a workload: plain on other batches, plain from weights rounded once,
    then in each of the modes.
    """
    workload = WorkloadFile(name=file.stem, digest=file.stem, file=file.name, function="build")
    windows = max(steps // _WINDOW, 2)
    plain: dict[str, Any] = {
        "run_id": "",
        "kind": "train",
        "nodes": [0, 1],
        "workload": file.stem,
        "batches": [batch] * _RANKS,
    }

    def losses_of(wanted: Sequence[Mode], **unlike: bool) -> FloatArray:
        items = [
            Item(**plain, seed=seed, **mode._asdict())
            for seed, mode in product(range(seeds), wanted)
        ]
        rows = served(workload, items, world=_RANKS, losses=windows * _WINDOW, **unlike)
        means = (
            np.array([one["losses"] for one in rows])
            .reshape(seeds, len(wanted), windows, _WINDOW)
            .mean(axis=3)
        )
        return np.asarray(means, dtype=float)

    plainly = [losses_of(modes[:1], other_batches=True), losses_of(modes[:1], rounded=True)]
    return np.concatenate([*plainly, losses_of(modes)], axis=1)


def compared(
    file: Path, modes: Sequence[Mode], *, seeds: int, steps: int, batch: int
) -> pd.DataFrame:
    """A row a mode but the first, plain one: workload, mode, seeds, apart, at_end, rounded_once, other_batches,
    allowed, passes.
    """
    found = losses(file, modes, seeds=seeds, steps=steps, batch=batch)
    plain = found[:, 2]
    learned = plain[:, :1] - plain[:, -1:]

    def apart(own: FloatArray) -> float:
        return float(np.abs((own - plain) / learned).mean(axis=0).max())

    rows = []
    for at, mode in enumerate(modes[1:], start=3):
        others, rounded = apart(found[:, 0]), apart(found[:, 1])
        row = {
            "workload": file.stem,
            "mode": str(mode),
            "seeds": seeds,
            "apart": apart(found[:, at]),
        }
        row |= {"at_end": float(((found[:, at] - plain) / learned)[:, -1].mean())}
        row |= {"rounded_once": rounded, "other_batches": others}
        rows.append(row | {"allowed": SHARE[mode.precision] * others})
    table = pd.DataFrame(rows)
    return table.assign(passes=table["apart"] <= table["allowed"])


def main(
    steps: Annotated[int, typer.Option(help="of each training", min=40)] = 200,
    seeds: Annotated[int, typer.Option(help="trainings in each mode", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="samples a step of each of two ranks", min=1)] = 8,
    only: Annotated[list[str], typer.Option(help="workloads, by their files' names")] = [],  # noqa: B006
) -> None:
    """Losses in other modes beside those of plain fp32."""
    files = sorted(
        one
        for one in WORKLOADS.glob("*.py")
        if one.stem != "__init__" and one.stem in (only or [one.stem])
    )
    tables = []
    for one in files:
        modes = MODES + (RECOMPUTED if one.stem in LAYERED else ())
        tables.append(compared(one, modes, seeds=seeds, steps=steps, batch=batch))
        print(tables[-1].to_string(), flush=True)
    table = pd.concat(tables, ignore_index=True)
    print_frame(
        table, f"losses in {steps} steps against those of plain fp32, parts of what it learned"
    )
    if not table["passes"].all():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

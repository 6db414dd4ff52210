"""Does a workload learn in another precision as it does in fp32? Losses over steps, by what the nodes run.

`python -m tests.benchmarks.same_mathematics` trains each workload of tasks/node/workloads on this machine's processor,
in fp32 and in each other precision, from the same weights on the same batches, with several seeds. Losses are means
over twenty steps; all figures are parts of what fp32 learned from its first to its last: `apart`, how far a precision's
loss lies from that of fp32, in the mean of the seeds, the most of the windows; `at_end`, the same with its sign in the
last window; `other_batches`, as `apart`, of fp32 with the same weights on other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from models.domain.numeric import FloatArray
from tasks.node.entrypoint import build
from tasks.node.precision import NoSuchPrecision
from tasks.node.record import WorkloadFile
from tasks.node.steps import one_step
from tasks.reporting.tables import print_frame
from tests.benchmarks.commands import ROOT

WORKLOADS = ROOT / "tasks" / "node" / "workloads"
_WINDOW = 20  # steps: each batch is another, and so is its loss


def losses(file: Path, precision: str, *, seed: int, steps: int, batch: int, other_batches: bool = False) -> FloatArray:
    """(windows,) mean losses of a workload in a precision. Raises NoSuchPrecision where a processor lacks it."""
    workload = WorkloadFile(name=file.stem, digest=file.stem, file=file.name, function="build")
    device = torch.device("cpu")
    built = build(file.parent, workload, seed=seed, rank=int(other_batches), device=device, precision=precision)
    told = [
        one_step(built, built.model, batch=batch, accumulation_steps=1, scale=1.0, sync=True)
        for _ in range(max(steps // _WINDOW, 2) * _WINDOW)
    ]
    windows: FloatArray = np.array(told).reshape(-1, _WINDOW).mean(axis=1)
    return windows


def compared(file: Path, precisions: Sequence[str], *, seeds: int, steps: int, batch: int) -> pd.DataFrame:
    """A row a precision: workload, precision, seeds, apart, at_end, other_batches."""
    trained = partial(losses, file, steps=steps, batch=batch)
    plain = np.array([trained("fp32", seed=seed) for seed in range(seeds)])
    others = np.array([trained("fp32", seed=seed, other_batches=True) for seed in range(seeds)])
    learned = plain[:, :1] - plain[:, -1:]
    rows = []
    for precision in precisions:
        found = np.array([trained(precision, seed=seed) for seed in range(seeds)])
        apart = (found - plain) / learned
        rows.append(
            {
                "workload": file.stem,
                "precision": precision,
                "seeds": seeds,
                "apart": float(np.abs(apart).mean(axis=0).max()),
                "at_end": float(apart[:, -1].mean()),
                "other_batches": float(np.abs((others - plain) / learned).mean(axis=0).max()),
            }
        )
    return pd.DataFrame(rows)


def main(
    steps: Annotated[int, typer.Option(help="of each training", min=40)] = 200,
    seeds: Annotated[int, typer.Option(help="trainings in each precision", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="samples a step", min=1)] = 16,
    precisions: Annotated[list[str], typer.Option(help="beside fp32, each by itself")] = ["bf16"],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="workloads, by their files' names")] = [],  # noqa: B006
) -> None:
    """Losses in other precisions beside those of fp32."""
    files = sorted(one for one in WORKLOADS.glob("*.py") if one.stem != "__init__" and one.stem in (only or [one.stem]))
    try:
        tables = [compared(one, precisions, seeds=seeds, steps=steps, batch=batch) for one in files]
    except NoSuchPrecision as error:
        raise typer.BadParameter(str(error)) from error
    print_frame(
        pd.concat(tables, ignore_index=True), f"losses in {steps} steps against those of fp32, parts of what it learned"
    )


if __name__ == "__main__":
    typer.run(main)

"""Errors and interval coverage on held-out groups of measured and published rows.

The groups are those for choosing between models (held_out_groups.py). `--final` takes the others,
which may be looked at five times in all. Needs the files of ../shared/data.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from models.domain.data_sheets import data_sheets
from models.step_time.dataset import TrainingData
from tasks.data_files.public import FACTS
from tasks.workspace.blas_threads import single_thread
from tests.benchmarks.claims import ROOT, Claim, Write, report
from tests.benchmarks.held_out_groups import (
    RTX,
    T4,
    TARGETS,
    V100,
    described,
    gpu_groups,
    groups,
    transformer_groups,
)
from tests.benchmarks.scores import figures, score, summary
from tests.frames import data_of

DATA = ROOT.parent / "shared" / "data"
# Devices, device, cores and Gbit/s of the machines that the measurements are from.
MACHINES = {
    T4: (4, "t4", 48.0, 50.0),
    RTX: (8, "rtx2080ti", 40.0, 50.0),
    V100: (8, "v100", 40.0, 100.0),
}
# Data sheets of the one-machine table's GPUs whose names differ.
_SHEETS = {"H100PCIe": "h100-pcie", "H100SXM": "h100"}
# Name, device and GiB of the machines of eight with the published transformers; links are unknown.
_PUBLISHED = {
    "A100-40GB": ("p4d.24xlarge", "a100", 40.0),
    "A100-80GB": ("p4de.24xlarge", "a100", 80.0),
    "H100-80GB": ("p5.48xlarge", "h100", 80.0),
}


def training_data(folder: Path = DATA) -> TrainingData:
    """The rows of the three kinds, as `described`, with the packaged facts and instance types."""
    names = ("training_runs.csv", "training_runs_gpus.csv")
    runs = pd.concat([pd.read_csv(folder / name) for name in names], ignore_index=True)
    columns = ["name", "devices", "device", "cores", "bandwidth_gbps"]
    types = [(name, *machine) for name, machine in MACHINES.items()]
    return data_of(
        runs=described(runs.assign(provider="ec2")),
        workloads=pd.read_csv(FACTS),
        instance_types=pd.DataFrame(types, columns=columns),
    )


def gpu_data(folder: Path = DATA) -> TrainingData:
    """One-device rows of the one-machine table; an instance type is a data sheet's name."""
    table = pd.read_csv(folder / "gpu_step_times.csv")
    table = table[table["devices"] == 1].reset_index(drop=True)
    names = table["gpu"] + table["form"].fillna("").where(table["gpu"] == "H100", "")
    kind = [_SHEETS.get(name, ("rtx" if name[0] in "234" else "") + name.lower()) for name in names]
    sheets = data_sheets().loc[sorted(set(kind))]
    tf32 = sheets["tf32_tflops"].notna()[kind].to_numpy() & (table["precision"] == "fp32")
    runs = table.drop(columns="devices").assign(
        provider="ec2",
        workload=table["network"],
        precision=table["precision"].mask(tf32, "tf32"),
        cluster="1x" + pd.Series(kind),
    )
    types = sheets.assign(device=sheets.index, name=sheets.index, devices=1)
    columns = {"fp32_tflops": "device_tflops", "memory_gb": "device_memory_gib"}
    return data_of(runs=runs, instance_types=types.rename(columns=columns))


def transformer_data(folder: Path = DATA) -> TrainingData:
    """Published steps of transformers; a workload is a network at a length of sequences."""
    table = pd.read_csv(folder / "public_steps.csv").dropna(subset="layers")
    kind = table["device"].map({name: machine[0] for name, machine in _PUBLISHED.items()})
    types = pd.DataFrame(_PUBLISHED.values(), columns=["name", "device", "device_memory_gib"])
    return data_of(
        runs=table.assign(
            provider="ec2",
            workload=table["network"] + "-" + table["sequence"].astype(int).astype(str),
            cluster=table["machines"].astype(str) + "x" + kind,
            switches=table["switches"].fillna("none"),
        ).reset_index(drop=True),
        instance_types=types.assign(devices=8),
    )


def claims_of(table: pd.DataFrame) -> list[Claim]:
    """One claim a line of the table with a target."""
    found = []
    for name, row in table.iterrows():
        mean, median = TARGETS.get(str(name), (np.nan, np.nan))
        result = f"{row['mean']:.1f} / {row['median']:.1f} %; covers {row['covers']:.0f} %"
        met = bool(row["mean"] <= mean and row["median"] <= median) if mean > 0 else None
        target = f"{mean:g} / {median:g} %" if mean > 0 else ""
        found.append(Claim(str(name), target, result, met))
    return found


def main(
    folder: Annotated[Path, typer.Option(help="Where the measured data are.")] = DATA,
    final: Annotated[bool, typer.Option(help="Groups of the final score: five looks.")] = False,
    draws: Annotated[int, typer.Option(min=1, help="Draws of pilots and of twelve rows.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Lines of the table, by name.")] = None,
    write: Write = False,
) -> None:
    """Print errors and coverage by group and by line of the table."""
    if not (folder / "training_runs_gpus.csv").exists():
        typer.echo(f"no measured data in {folder}")
        raise typer.Exit(1)
    data, gpus, transformers = (
        read(folder) for read in (training_data, gpu_data, transformer_data)
    )
    started = time.perf_counter()
    parts = [
        (data, groups(data.runs, final=final, draws=draws)),
        (gpus, gpu_groups(gpus.runs, final=final, draws=min(draws, 3))),
        (transformers, transformer_groups(transformers.runs)),
    ]
    with single_thread():
        scored = [
            score(known, group)
            for known, found in parts
            for group in found
            if not only or group.table in only
        ]
    rows = pd.concat(scored, ignore_index=True)
    typer.echo(figures(rows, ["table", "group"]).round(1).to_string())
    table = summary(rows)
    typer.echo(table.round(1).to_string())
    typer.echo(f"{time.perf_counter() - started:.0f} s")
    report("held_out", claims_of(table), write=write)


if __name__ == "__main__":
    typer.run(main)

"""Errors and interval coverage on held-out groups of measured rows, three GPU kinds.

The groups are those for choosing between models (held_out_groups.py). `--final` takes the others,
which may be looked at five times in all. Needs the files of ../shared/data.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from models.domain.numeric import Z_90
from models.step_time.dataset import TrainingData
from models.step_time.machine_specs import data_sheets
from models.step_time.one_device import OneDevice
from tasks.workspace.blas_threads import one_thread
from tests.benchmarks.claims import ROOT, Claim, Write, report
from tests.benchmarks.held_out_groups import (
    RTX,
    T4,
    TARGETS,
    V100,
    described,
    gpu_groups,
    groups,
)
from tests.benchmarks.scores import Group, figures, score, scored, summary

DATA = ROOT.parent / "shared" / "data"
# Devices, device, cores and Gbit/s of the machines that the measurements are from.
MACHINES = {
    T4: (4, "t4", 48.0, 50.0),
    RTX: (8, "rtx2080ti", 40.0, 50.0),
    V100: (8, "v100", 40.0, 100.0),
}
# Data sheets of the one-machine table's GPUs whose names differ.
_SHEETS = {"H100PCIe": "h100-pcie", "H100SXM": "h100"}


def training_data(folder: Path = DATA) -> TrainingData:
    """The rows of the three kinds, as `described`, with facts and instance types."""
    names = ("training_runs.csv", "training_runs_gpus.csv")
    runs = pd.concat([pd.read_csv(folder / name) for name in names], ignore_index=True)
    columns = ["name", "devices", "device", "cores", "bandwidth_gbps"]
    types = [(name, *machine) for name, machine in MACHINES.items()]
    none = pd.DataFrame()
    return TrainingData(
        runs=described(runs.assign(provider="ec2")),
        profiles=none,
        buckets=none,
        probes=none,
        workloads=pd.read_csv(folder / "workloads.csv"),
        instance_types=pd.DataFrame(types, columns=columns),
    )


def read_gpu_table(folder: Path) -> pd.DataFrame:
    """One-device rows of the one-machine table; `workload` is network|precision, `kind` a sheet."""
    table = pd.read_csv(folder / "gpu_step_times.csv")
    table = table[table["devices"] == 1].reset_index(drop=True)
    names = table["gpu"] + table["form"].fillna("").where(table["gpu"] == "H100", "")
    return table.assign(
        workload=table["network"] + "|" + table["precision"],
        kind=[
            _SHEETS.get(name, ("rtx" if name[0] in "234" else "") + name.lower()) for name in names
        ],
        batch=table["batch_per_device"].astype(float),
    )


def gpu_sheets(table: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """By `kind|workload`: memory bandwidth, and the rate at that precision."""
    sheets = data_sheets()
    found: dict[str, tuple[float, float, float]] = {}
    for kind, workload in sorted(set(zip(table["kind"], table["workload"], strict=True))):
        sheet = sheets.loc[kind]
        plain = sheet["fp32_tflops" if np.isnan(sheet["tf32_tflops"]) else "tf32_tflops"]
        rate = sheet["fp16_tflops"] if workload.endswith("fp16") else plain
        found[f"{kind}|{workload}"] = (float(sheet["bandwidth_gbytes_s"]), float(rate), 1.0)
    return found


def score_gpu(table: pd.DataFrame, group: Group) -> pd.DataFrame:
    """As `score`, for a group of the one-machine table."""
    known, asked = table[group.known], table[group.asked]
    points = known.assign(log_s=np.log(known["step_s"].to_numpy(float)), sd=0.01)
    model = OneDevice.fit(points, sheets=gpu_sheets(table))
    wanted = model.at(list(asked["workload"]), list(asked["kind"]), asked["batch"].to_numpy(float))
    middle = model.predict(wanted)
    half = Z_90 * np.sqrt(np.diag(model.covariance(wanted, wanted)) + model.spread["run"] ** 2)
    low, high = np.exp(middle - half), np.exp(middle + half)
    return scored(group, asked["step_s"], np.exp(middle), low, high)


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
    data, gpus, started = training_data(folder), read_gpu_table(folder), time.perf_counter()
    parts = []
    with one_thread():
        for group in groups(data.runs, final=final, draws=draws):
            if not only or group.table in only:
                parts.append(score(data, group))
        for group in gpu_groups(gpus, final=final, draws=min(draws, 3)):
            if not only or group.table in only:
                parts.append(score_gpu(gpus, group))
    rows = pd.concat(parts, ignore_index=True)
    typer.echo(figures(rows, ["table", "group"]).round(1).to_string())
    table = summary(rows)
    typer.echo(table.round(1).to_string())
    typer.echo(f"{time.perf_counter() - started:.0f} s")
    report("held_out", claims_of(table), write=write)


if __name__ == "__main__":
    typer.run(main)

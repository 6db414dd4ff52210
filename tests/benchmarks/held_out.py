"""How good is the step-time model on groups of rows that it has not seen: the table of held-out groups, by one command.

`python -m tests.benchmarks.held_out` prints error (mean, median), coverage and median width of the 90 % intervals by
line of the table, then by group. The groups are those for choosing between models; `--final` takes the others, which
may be looked at five times in all: docs/lab-notes.md has each. `--rivals` adds the mean errors of four others
(rivals.py), `--ablations` what each term adds by kind, `--choices` how good what is chosen among the kinds is.
Needs the files of ../shared/data; without them it says so and exits 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from models.domain.numeric import Z_90, BoolArray
from models.step_time import formula, levels
from models.step_time.dataset import TrainingData
from models.step_time.machine_specs import data_sheets
from models.step_time.model import StepTimeModel, fit
from models.step_time.one_device import OneDevice
from tasks.reporting.tables import print_frame
from tasks.workspace.blas_threads import one_thread
from tests.benchmarks.choice_scores import contests, scores
from tests.benchmarks.held_out_groups import (
    ALONE,
    CHOOSING_CELLS,
    FINAL_CELLS,
    KIND,
    NEIGHBOURS,
    ONE_BATCH,
    RTX,
    T4,
    TARGETS,
    TWELVE,
    V100,
    Group,
    described,
    gpu_groups,
    groups,
)
from tests.benchmarks.rivals import (
    by_kind,
    predict_adaptdl,
    predict_srifty,
    predict_textbook,
    predict_trees_alone,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
# The devices of the machines that the measurements are from, and the one-machine table's names where they are others.
_DEVICES = {
    T4: (4, "t4", 48.0, 50.0),
    RTX: (8, "rtx2080ti", 40.0, 50.0),
    V100: (8, "v100", 40.0, 100.0),
}
_SHEET_OF = {
    "2070": "rtx2070",
    "2080": "rtx2080",
    "2080Super": "rtx2080super",
    "2080Ti": "rtx2080ti",
}
_SHEET_OF |= {
    "3070": "rtx3070",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "H100PCIe": "h100-pcie",
    "H100SXM": "h100",
}
RIVALS = ("textbook", "adaptdl", "trees", "srifty")
_CANDIDATES, _TARGETS = 400, 250  # rows that the model's own pilots are chosen among, and for
# What a parameter is where its term is left out: nothing of it.
NEUTRAL: dict[str, float] = {
    "machines": 0.0,
    "two": 0.0,
    "log_gamma": 0.0,
    "log_alpha": -20.0,
    "log_last": -10.0,
    "inside_devices": 0.0,
    "log_slowdown": -20.0,
    "slowdown_batch": 0.0,
    "log_crowding": -20.0,
}


def read_runs(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Runs as `described`, facts of the workloads, instance types."""
    runs = pd.concat(
        [pd.read_csv(folder / name) for name in ("training_runs.csv", "training_runs_gpus.csv")],
        ignore_index=True,
    )
    types = [
        {"name": name, "devices": count, "device": device, "cores": cores, "bandwidth_gbps": gbps}
        for name, (count, device, cores, gbps) in _DEVICES.items()
    ]
    return (
        described(runs.assign(provider="ec2")),
        pd.read_csv(folder / "workloads.csv"),
        pd.DataFrame(types),
    )


class Bench:
    """The rows, and what is fitted to them."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.facts, self.types = read_runs(folder)
        self.table = read_gpu_table(folder)

    def data(self, known: BoolArray) -> TrainingData:
        """The known rows as the warehouse would have them."""
        none = pd.DataFrame()
        return TrainingData(
            runs=self.runs[known],
            profiles=none,
            buckets=none,
            probes=none,
            workloads=self.facts,
            instance_types=self.types,
        )

    def fit(self, known: BoolArray) -> StepTimeModel:
        """The model on the known rows."""
        return fit(self.data(known), seed=0)

    def score(self, group: Group, *, rivals: bool = False) -> pd.DataFrame:
        """The asked rows with predictions: columns table, group, kind, measured_s, ours, low_s, high_s, rivals."""
        known, asked = group.known, group.asked
        model = self.fit(known)
        if group.choose:
            chosen = self._own_choice(model, asked, group.choose)
            known, asked = known | chosen, asked & ~chosen
            model = self.fit(known)
        rows = self.runs[asked]
        hidden = rows.drop(columns=["step_s", "sync_s"])
        ours = model.predict(hidden)
        found = pd.DataFrame(
            {
                "table": group.table,
                "group": group.name,
                "draw": group.draw,
                "kind": rows["kind"],
                "measured_s": rows["step_s"],
                "ours": ours["step_s"],
                "low_s": ours["step_low_s"],
                "high_s": ours["step_high_s"],
            }
        )
        if rivals:
            devices = {name: one[0] for name, one in _DEVICES.items()}
            facts = self.facts.set_index("workload")["gradient_bytes"]
            with_facts = self.runs.assign(gradient_bytes=self.runs["workload"].map(facts))
            gbps = {name: one[3] for name, one in _DEVICES.items()}
            pair = with_facts[known], with_facts[asked].drop(columns=["step_s", "sync_s"])
            found["textbook"] = predict_textbook(*pair, devices)
            found["adaptdl"] = predict_adaptdl(*pair, devices)
            found["trees"] = predict_trees_alone(by_kind(pair[0]), by_kind(pair[1]), devices)
            found["srifty"] = predict_srifty(*pair, devices, gbps)
        return found

    def _own_choice(self, model: StepTimeModel, asked: BoolArray, count: int) -> BoolArray:
        """The rows that together take most off the variance of the others, chosen one after the other."""
        places = np.flatnonzero(asked)
        places = np.sort(np.random.default_rng(0).permutation(places)[:_CANDIDATES])
        _, covariance, noise = model.joint(
            self.runs.iloc[places].drop(columns=["step_s", "sync_s"])
        )
        chosen: list[int] = []
        for _ in range(count):
            gain = (covariance[:_TARGETS] ** 2).sum(axis=0) / (np.diag(covariance) + noise)
            gain[chosen] = -1
            best = int(gain.argmax())
            chosen.append(best)
            column = covariance[:, best].copy()
            covariance = covariance - np.outer(column, column) / (column[best] + noise[best])
        mask = np.zeros(len(self.runs), dtype=bool)
        mask[places[chosen]] = True
        return mask

    def score_gpu(self, group: Group) -> pd.DataFrame:
        """The same of a group of the one-machine table."""
        known, asked = self.table[group.known], self.table[group.asked]
        points = known.assign(log_s=np.log(known["step_s"].to_numpy(float)), sd=0.01)
        model = OneDevice.fit(points, sheets=gpu_sheets(self.table))
        wanted = model.at(
            list(asked["workload"]), list(asked["kind"]), asked["batch"].to_numpy(float)
        )
        middle = model.predict(wanted)
        spread = np.sqrt(np.diag(model.covariance(wanted, wanted)) + model.spread["run"] ** 2)
        return pd.DataFrame(
            {
                "table": group.table,
                "group": group.name,
                "draw": group.draw,
                "kind": asked["kind"],
                "measured_s": asked["step_s"],
                "ours": np.exp(middle),
                "low_s": np.exp(middle - Z_90 * spread),
                "high_s": np.exp(middle + Z_90 * spread),
            }
        )


def read_gpu_table(folder: Path) -> pd.DataFrame:
    """One-device rows of the one-machine table; `workload` is network|precision, `kind` a data sheet."""
    table = pd.read_csv(folder / "gpu_step_times.csv")
    table = table[table["devices"] == 1].reset_index(drop=True)
    form = table["form"].fillna("").where(table["gpu"] == "H100", "")
    name = table["gpu"] + form
    return table.assign(
        workload=table["network"] + "|" + table["precision"],
        kind=[_SHEET_OF.get(one, one.lower()) for one in name],
        batch=table["batch_per_device"].astype(float),
    )


def gpu_sheets(table: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """By `kind|workload`: the rate at that precision."""
    sheet = data_sheets()
    found: dict[str, tuple[float, float, float]] = {}
    for kind, workload in sorted(set(zip(table["kind"], table["workload"], strict=True))):
        own = sheet.loc[kind]
        plain = own["fp32_tflops"] if np.isnan(own["tf32_tflops"]) else own["tf32_tflops"]
        rate = own["fp16_tflops"] if workload.endswith("fp16") else plain
        found[f"{kind}|{workload}"] = (float(own["bandwidth_gbytes_s"]), float(rate), 1.0)
    return found


def figures(scored: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean and median error, coverage and median width in per cent: of each draw, then the mean of the draws."""
    measured = scored["measured_s"].to_numpy(float)
    errors = scored.assign(
        error=100 * np.abs(scored["ours"] / measured - 1),
        inside=100.0 * ((scored["low_s"] <= measured) & (measured <= scored["high_s"])),
        width=100 * (scored["high_s"] - scored["low_s"]) / scored["ours"],
    )
    named = {"mean": ("error", "mean"), "median": ("error", "median")}
    named |= {"covers": ("inside", "mean"), "width": ("width", "median")}
    for rival in RIVALS:
        if rival in scored:
            errors[rival] = 100 * np.abs(scored[rival] / measured - 1)
            named[rival] = (rival, "mean")
    return errors.groupby([*by, "draw"], sort=False).agg(**named).groupby(by, sort=False).mean()


def summary(scored: pd.DataFrame) -> pd.DataFrame:
    """By line of the table: the mean of its groups, its worst coverage and its targets."""
    each = figures(scored, ["table", "group"])
    found = each.groupby("table", sort=False).mean()
    found.insert(3, "worst", each.groupby("table", sort=False)["covers"].min())
    found["target"] = [
        "{} / {}".format(*TARGETS[name]) if name in TARGETS else "" for name in found.index
    ]
    return found


@contextmanager
def without(name: str) -> Iterator[None]:
    """The formula without a parameter's term, or without the residual (`residual`) or a level (`level kind`)."""
    arrays = (formula.MEAN, *formula.LEVELS.values())
    saved, spreads = [one.copy() for one in arrays], levels.SPREADS.copy()
    try:
        if name in NEUTRAL:
            at = formula.NAMES.index(name)
            for one, value in zip(
                arrays, (NEUTRAL[name], *[0.0] * len(formula.LEVELS)), strict=True
            ):
                one[at] = value
        elif name == "residual":
            levels.SPREADS[:2] = 1e-3
        elif name.startswith("deviations by "):
            formula.LEVELS[name.removeprefix("deviations by ")][:] = 0.0
        yield
    finally:
        for one, old in zip(arrays, saved, strict=True):
            one[:] = old
        levels.SPREADS[:] = spreads


def ablations(bench: Bench, wanted: list[str], *, draws: int) -> pd.DataFrame:
    """Mean error by kind and what it grows by without each term, over the choosing groups of ALONE."""
    every = ["", "residual", *(f"deviations by {one}" for one in ("kind", "cell")), *NEUTRAL]
    names = ["", *wanted] if wanted else every
    asked = [one for one in groups(bench.runs, draws=draws) if one.table == ALONE]
    found = {}
    for name in names:
        with without(name):
            scored = pd.concat([bench.score(group) for group in asked], ignore_index=True)
        found[name or "everything"] = figures(scored, ["kind", "table"])["mean"].unstack(0).mean()
        typer.echo(
            f"  {name or 'everything'}: " + str(found[name or "everything"].round(2).to_dict())
        )
    table = pd.DataFrame(found).T
    return pd.concat([table.iloc[:1], table.iloc[1:] - table.iloc[0]])


_SHORT: Mapping[str, str] = {
    "neighbours": NEIGHBOURS,
    "alone": ALONE,
    "pilots": ONE_BATCH,
    "twelve": TWELVE,
    "kind": KIND,
}


# Dollars an hour: EC2's of the T4 machine and Azure's list price of the V100 one. Nobody rents out the 2080 Ti one; its
# figure is made up, between the others' by the device.
_PRICES = {T4: 3.912, RTX: 12.0, V100: 22.03}


def choices_across_kinds(bench: Bench) -> Iterator[tuple[str, pd.DataFrame]]:
    """Titles and tables of what is chosen among all three kinds of machine, each workload held out in turn."""
    devices = {name: one[0] for name, one in _DEVICES.items()}
    for pilots in (0, 3):
        data = bench.data(np.ones(len(bench.runs), dtype=bool))
        found = [one for _, _, one in contests(data, devices, _PRICES, pilots=pilots, seed=0)]
        for what, table in scores(found, seed=0):
            yield (
                f"{len(found)} global batches, each workload held out, {pilots} recommended pilots: {what}",
                table,
            )


def held_out(
    folder: Annotated[Path, typer.Option(help="Where the measured data are.")] = DATA,
    final: Annotated[
        bool, typer.Option(help="The groups of the final score: five looks in all.")
    ] = False,
    draws: Annotated[int, typer.Option(min=1, help="Draws of pilots and of twelve rows.")] = 3,
    rivals: Annotated[bool, typer.Option(help="The mean errors of other models too.")] = False,
    ablate: Annotated[bool, typer.Option("--ablations", help="What each term adds.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="What is chosen among the kinds.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Lines of the table, or terms: alone, pilots, ...")
    ] = None,
) -> None:
    """Errors and interval coverage on groups held out, beside their targets."""
    if not (folder / "training_runs_gpus.csv").exists():
        typer.echo(f"no measured data in {folder}: nothing to judge by")
        raise typer.Exit(1)
    bench = Bench(folder)
    if ablate:
        with one_thread():
            typer.echo(ablations(bench, only or [], draws=draws).round(2).to_string())
        return
    if choices:
        with one_thread():
            for title, table in choices_across_kinds(bench):
                print_frame(table, title)
        return
    lines = {_SHORT.get(one, one) for one in only or []}
    scored, started = [], time.perf_counter()
    with one_thread():
        for group in groups(bench.runs, final=final, draws=draws):
            if not lines or group.table in lines:
                scored.append(bench.score(group, rivals=rivals))
        for group in gpu_groups(bench.table, final=final, draws=min(draws, 3)):
            if not lines or group.table in lines:
                scored.append(bench.score_gpu(group))
    every = pd.concat(scored, ignore_index=True)
    typer.echo(figures(every, ["table", "group"]).round(1).to_string())
    typer.echo("")
    near = every[every["table"] == NEIGHBOURS]
    if len(near):
        typer.echo(figures(near, ["kind"]).round(1).to_string() + "\n")
    typer.echo(summary(every).round(1).to_string())
    cells = FINAL_CELLS if final else CHOOSING_CELLS
    typer.echo(f"\n{len(cells)} cells, {draws} draws, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    typer.run(held_out)

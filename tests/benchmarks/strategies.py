"""Strategies against their claims: selection, bytes on a link, the shared update, compressed steps.

    selection   MSTopK against torch.topk: seconds and energy of the picked values
    bytes       bytes sent on a link against the formula
    update      ddp against zero1: losses and memory of a rank
    steps       dense and compressed steps of local hosts at several bandwidths (root, a quiet
                machine): the bandwidth below which compression pays, and the planner's choice

Predictions of a setup come from a model that has seen its type's dense steps and other types'
compressed ones. Adasum, parameter servers and split tables were judged before (BENCHMARKS.md).
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from models.domain.workload import MSTOPK_SENT, UPDATES_SHARED, Mode
from models.planner.compression import unproven
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, fit, with_compressed
from models.step_time.setup_arrays import read_setups
from tasks.node.entrypoint import build
from tasks.node.precision import Arithmetic
from tasks.node.strategies.compression import DENSITY
from tasks.node.strategies.mstopk import largest
from tasks.workspace.workspace import Workspace
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.hosts import (
    Unseen,
    cluster_of,
    launch_of,
    measure_all,
    project,
    trial_name,
    type_text,
    workload_text,
)
from tests.benchmarks.memory import SIZED, profile_item
from tests.benchmarks.ranks import CPU, WORKLOADS, sent_a_step, served, workload_file
from tests.benchmarks.tensor import crossed_at
from tests.formulas import dense_bytes, sparse_bytes
from warehouse.reads import training_frames

SIZES, REPEATS = (1_000_000, 10_000_000, 100_000_000), 3
MBITS = (50, 200, 800, 3200)
BATCHES = {"residual_cnn": 8, "transformer_lm": 8, "wide_mlp": 32, "recommender": 128}
CROSSING = "wide_mlp"  # most bytes: compression pays on a usual link
PAIR = ("ddp", MSTOPK_SENT)
_STEPS = 10  # whose losses are compared


def selection() -> list[Claim]:
    """Time and energy of MSTopK's selection on one thread."""
    torch.set_num_threads(1)
    ratios, energies, exact = [], [], True
    for size, power in product(SIZES, (1, 3)):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size)) ** power
        count = int(DENSITY * size)
        seconds: list[tuple[float, float]] = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            best = values.abs().topk(count, sorted=False).indices
            between = time.perf_counter()
            picked = largest(values, count)
            seconds.append((between - started, time.perf_counter() - between))
        most, kept = (float((values[at].double() ** 2).sum()) for at in (best, picked))
        ratios.append(median(ours / theirs for theirs, ours in seconds))
        energies.append(kept / most)
        exact = exact and len(picked) == count
    took = f"{min(ratios):.2f} to {max(ratios):.2f} of torch.topk's seconds"
    energy = min(energies)
    met = exact and energy >= 0.9
    return [
        Claim("MSTopK picks exactly k; energy", "0.9", f"{energy:.3f}", met),
        Claim("MSTopK over torch.topk, 1 to 100 M values", "1", took, max(ratios) < 1),
    ]


def link_bytes() -> list[Claim]:
    """Bytes that one of two machines sends in a step."""
    built = build(
        WORKLOADS, workload_file(CROSSING), seed=0, rank=0, computing=Arithmetic("fp32", CPU)
    )
    size = 4.0 * built.sizes["parameters"]
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in built.model.buffers()) / 2
    dense = dense_bytes(size, 2, 1)
    formula = {"ddp": dense, "ddp-fp16": dense / 2, MSTOPK_SENT: sparse_bytes(size, 2, 1)}
    claims = []
    for name, expected in formula.items():
        off = abs((sent_a_step(CROSSING, name) - buffers) / expected - 1)
        claims.append(Claim(f"bytes of {name} by the formula", "2 %", f"{off:.2%}", off <= 0.02))
    return claims


def update() -> list[Claim]:
    """Losses and memory of zero1 on two ranks of this machine."""
    claims = []
    for sized in SIZED:
        file = workload_file(sized.name, dict(sized.arguments))
        profiled = profile_item(sized)
        (alone,) = served(file, [profiled], world=1)
        items = [
            replace(
                profiled,
                kind="train",
                nodes=[0, 1],
                batches=[sized.batches[0]] * 2,
                strategy=name,
                least_steps=5,
                most_steps=5,
                most_s=15.0,
            )
            for name in ("ddp", UPDATES_SHARED)
        ]
        dense, shared = (answer["peak_bytes"] for answer in served(file, items, world=2))
        first, second = (answer["losses"] for answer in served(file, items, world=2, losses=_STEPS))
        states = max(alone["checkpoint_bytes"] - alone["gradient_bytes"], 0)
        off = abs(dense - shared - states / 2) / states
        met = first == second and off <= 0.1
        result = f"{'equal' if first == second else 'other'} losses; {off:.1%} of the states off"
        claims.append(Claim(f"zero1, {sized.name}", "bits of ddp; 10 %", result, met))
    return claims


def measure_steps(here: Workspace) -> TrainingData:
    """Each workload dense and compressed, on two and three hosts of each type, at two batches."""
    for hosts, scale in product((2, 3), (1, 2)):
        launches = []
        runs = training_frames(here.warehouse, "local")["runs"]
        known = set()
        if len(runs):
            columns = ("workload", "cluster", "strategy", "batch_per_device")
            known = set(zip(*(runs[name].astype(str) for name in columns), strict=True))
        for mbit in MBITS:
            cluster = cluster_of(here, f"{hosts}xb{mbit}")
            items = [
                Unseen(
                    workload=name,
                    nodes=tuple(range(hosts)),
                    batches=(scale * batch,) * hosts,
                    mode=Mode(strategy=strategy),
                )
                for (name, batch), strategy in product(BATCHES.items(), PAIR)
                if (name, cluster.name, strategy, str(scale * batch)) not in known
            ]
            if items:
                launches.append(launch_of(cluster, items, "to judge compression", item_s=20.0))
        measure_all(here, launches, trial_name("strategies"))
    return TrainingData(**training_frames(here.warehouse, "local"))


def models_of(data: TrainingData, here: Workspace) -> dict[str, StepTimeModel]:
    """By type, a model that never saw it compress."""
    found = {}
    compressed = data.runs["strategy"] == MSTOPK_SENT
    for mbit in MBITS:
        held = compressed & data.runs["cluster"].str.endswith(f"xb{mbit}")
        model = fit(replace(data, runs=data.runs[~held]), seed=0)
        for workload in here.measurable:
            model = with_compressed(model, workload)
        found[f"b{mbit}"] = model
    return found


def gains(data: TrainingData, models: dict[str, StepTimeModel]) -> pd.DataFrame:
    """A row a setup: log of dense over compressed seconds, measured and predicted; regret."""
    columns = ["workload", "cluster", "batch_per_device"]
    runs = data.runs.assign(batch_per_device=data.runs["batch_per_device"].astype(str))
    seconds = runs.pivot_table(
        index=columns, columns="strategy", values="step_s", aggfunc="median"
    ).dropna()
    rows = []
    for times in seconds.reset_index().to_dict("records"):
        named = {name: times[name] for name in columns}
        kind = str(named["cluster"]).split("x")[1]
        setups = pd.DataFrame([named | {"strategy": name} for name in PAIR])
        arrays = read_setups(setups, {})
        predicted = models[kind].predict_arrays(arrays)
        dense, sparse = np.log(predicted["step_s"].to_numpy(float))
        proven = not unproven(models[kind], arrays, predicted, {Mode()})[1]
        taken_s = times[MSTOPK_SENT] if proven else times["ddp"]
        row = {"gbps": float(kind[1:]) / 1000, "predicted": dense - sparse}
        row |= {
            "gain": math.log(times["ddp"] / times[MSTOPK_SENT]),
            "regret": taken_s / min(times["ddp"], times[MSTOPK_SENT]) - 1,
        }
        rows.append(named | row)
    return pd.DataFrame(rows)


def steps(home: Path | None) -> list[Claim]:
    """Speed, crossing, sign and regret of compressed steps."""
    text = "".join(type_text(f"b{mbit}", cores=0.4, gbps=mbit / 1000) for mbit in MBITS)
    more = f'strategies = ["ddp", "{MSTOPK_SENT}"]\n'
    text += "".join(workload_text(name, 2 * size, more=more) for name, size in BATCHES.items())
    with project(text, {}, home) as here:
        data = measure_steps(here)
        table = gains(data, models_of(data, here))
    show("logs of dense seconds over compressed ones", table)
    rows = table[(table["workload"] == CROSSING) & table["cluster"].str.startswith("2x")]
    rows = rows[rows["batch_per_device"] == str(BATCHES[CROSSING])].sort_values("gbps")
    times = math.exp(float(rows["gain"].iloc[0]))
    gbps = rows["gbps"].tolist()
    true, predicted = (crossed_at(gbps, rows[name].tolist()) for name in ("gain", "predicted"))
    off = abs(predicted / true - 1)
    signs = float((np.sign(table["gain"]) == np.sign(table["predicted"])).mean())
    lost = float(table["regret"].mean())
    crossing = f"{true:.2f} Gbit/s, predicted {predicted:.2f}"
    return [
        Claim("compressed step at 0.05 Gbit/s", "1.25 times", f"{times:.1f} times", times >= 1.25),
        Claim("bandwidth below which compression pays", "20 % off", crossing, off <= 0.2),
        Claim("sign of `compression pays`", "95 %", f"{signs:.0%}", signs >= 0.95),
        Claim("regret of choosing ddp or ddp-mstopk", "3 %", f"{lost:.1%}", lost <= 0.03),
    ]


PARTS: dict[str, Callable[[], list[Claim]]] = {
    "selection": selection,
    "bytes": link_bytes,
    "update": update,
}


def main(
    parts: Annotated[str, typer.Option(help="What to judge.")] = "selection,bytes,update,steps",
    home: Annotated[Path | None, typer.Option(help="Keeps the measured steps.")] = None,
    write: Write = False,
) -> None:
    """Print the claims of the parts."""
    claims: list[Claim] = []
    for name in parts.split(","):
        claims += steps(home) if name == "steps" else PARTS[name]()
    report("strategies", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

"""What each strategy gives and costs, against its claims: exits 1 where one falls short.

`make bench-strategies` (root, a quiet machine) prints, each with its noise:

    selection    MSTopK against torch.topk: seconds and energy of what is picked
    bytes        sent on a link, against the formula
    tensor       divided layers: how exact, bytes on links, where one grid overtakes another, and what several squares
                 gain over one where activations dominate, as `tensor` has them
    adasum       steps to a loss with Adasum against averaging at tuned rates, as `adasum` has them
    placement    seconds of a step's traffic in the order of machines that is chosen, as `placement` has them
    update       ddp against zero1, whose optimizers share the update: losses, seconds and memory of a rank
    cache        epochs with and without a cache of decoded samples, and what Srift measures of them, as `data_cache`
                 has them
    elastic      torchrun jobs that lose machines: no checkpoint lost, and seconds as predicted, as `elastic` has them
    learning     losses of the learning runs that campaigns make, dense and compressed, and the planner's verdict on
                 each strategy, by `models/planner/learning.py`
    servers      steps with one, two and four parameter servers against their number by the sizing rule
    tables       embedding tables on hosts of one kind and the rest on another, against each kind alone (two_kinds)
    choice       machines and strategy chosen together, among all that was measured, as `joint_choice` has it
    steps        dense and compressed steps of local hosts at several bandwidths: how much faster at the slowest link;
                 the bandwidth below which compression pays, and of every setup whether it does, predicted and measured

Predictions of a setup come from a model that has seen its type's dense steps and other types' compressed ones; beside
them what it says before any compressed step. `--home` keeps what was measured: what is there is not measured again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

from flows.cli import explained
from models.campaign.campaign import Launch
from models.domain.numeric import FloatArray
from models.domain.suggestions import nearest_names
from models.domain.workload import (
    ADASUM,
    COMPRESSED,
    MSTOPK_SENT,
    SERVED,
    TABLES,
    TENSOR_2D,
    TENSOR_25D,
    UPDATES_SHARED,
    Mode,
    Workload,
)
from models.planner.compression import unproven
from models.planner.learning import LEARNING_WINDOWS, verdict
from models.planner.sizing import servers_busy
from models.step_time.compression import adasum_bytes, dense_bytes, served_bytes, sparse_bytes
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.setup_arrays import read_setups
from models.step_time.unmeasured import with_compressed
from tasks.market.offers import note_definitions, snapshot_offers
from tasks.node.entrypoint import build
from tasks.node.precision import arithmetic
from tasks.node.record import LEARN, Item, WorkloadFile
from tasks.node.strategies.compression import DENSITY
from tasks.node.strategies.mstopk import largest
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.workspace.workspace import Workspace, new_refresh_id, open_workspace
from tests.benchmarks import data_cache, elastic, joint_choice, tensor, two_kinds
from tests.benchmarks.adasum import JOBS, adasum_steps
from tests.benchmarks.choice_scores import RECOMMENDED
from tests.benchmarks.commands import ROOT
from tests.benchmarks.elastic import elastic_jobs, errors
from tests.benchmarks.input_wait import cluster_of
from tests.benchmarks.memory import SIZED, Sized
from tests.benchmarks.placement import (
    NOISE,
    as_network,
    host_networks,
    host_rows,
    networks,
    on_hosts,
    orders_of,
)
from tests.benchmarks.ranks import WORKLOADS, served
from tests.benchmarks.sent_bytes import RANKS, sent_a_step
from tests.benchmarks.trial import Unseen, launch_of, measure_all
from warehouse.reads import training_frames

SIZES = (1_000_000, 10_000_000, 100_000_000)
MBITS = (50, 200, 800, 3200)
BATCHES = {"residual_cnn": 8, "transformer_lm": 8, "wide_mlp": 32, "recommender": 128}  # a device's
CROSSING = (
    "wide_mlp"  # of the four the one with most bytes: it has something to gain on a usual link
)
PARTS = (
    *(
        "selection",
        "bytes",
        "adasum",
        "tensor",
        "placement",
        "update",
        "cache",
        "elastic",
        "learning",
        "steps",
    ),
    *("servers", "tables", "choice"),
)
ADASUM_SEEDS, FEWER_STEPS = 5, 0.30
PLACEMENT_SEEDS = 5  # of each five networks
_LEAST_ENERGY, _BYTES_OFF, _CROSSING_OFF, _LEAST_GAIN, _LEAST_SIGNS = 0.9, 0.02, 0.20, 0.25, 0.95
_MOST_REGRET = 0.03
_TWO_KINDS = 2.1  # times as fast as either kind alone
SERVED_HOSTS, _ALIKE = 4, 0.05  # of steps that are taken to be as fast
USD_PER_HOUR = {
    f"b{mbit}": 0.04 + 0.01 * at for at, mbit in enumerate(MBITS)
}  # made up: a faster link costs more
_OVER_BEST = 0.05
_SAVING_OFF = 0.10  # of the states that are shared out
_UPDATE_STEPS = 10  # whose losses are compared
LEAST_LOSSES, _ELASTIC_OFF = 30, 0.05
_NOT_EXACT, _LEAST_TIMES = 1e-5, 1.45
_REMOTE_MS, _FIRST_LONGER, _OFF_WAIT = 10.0, 1.10, 0.1  # of a read; of a first epoch; of an epoch
_REPEATS = 3
_LEARNING_BATCH = 8  # of each of two ranks


def selections(sizes: Sequence[int]) -> pd.DataFrame:
    """A row a size and kind of values: seconds of torch.topk and ours, their ratio and its noise, kept energy."""
    torch.set_num_threads(1)
    rows = []
    for size, tails in product(sizes, ("normal", "heavy")):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        values = values if tails == "normal" else values**3
        count = int(DENSITY * size)
        seconds = {"topk_s": [], "mstopk_s": []}  # type: dict[str, list[float]]
        for _ in range(_REPEATS):
            for name, own in seconds.items():
                began = time.perf_counter()
                if name == "topk_s":
                    picked = values.abs().topk(count, sorted=False).indices
                    most = float((values[picked].double() ** 2).sum())
                else:
                    picked = largest(values, count)
                    kept = float((values[picked].double() ** 2).sum())
                own.append(time.perf_counter() - began)
        ratios = [ours / theirs for theirs, ours in zip(*seconds.values(), strict=True)]
        row = {
            "values": size,
            "tails": tails,
            **{name: median(own) for name, own in seconds.items()},
        }
        row |= {
            "ratio": median(ratios),
            "ratio_from": min(ratios),
            "ratio_to": max(ratios),
            "energy": kept / most,
        }
        rows.append(row | {"picked": len(picked), "asked": count})
    return pd.DataFrame(rows)


def bytes_of(file: Path) -> tuple[float, float, int]:
    """Of a workload: those of its gradients, and of the buffers that DDP's first rank sends before each step; and how
    many parameters have gradients.
    """
    workload = WorkloadFile(name=file.stem, digest=file.stem, file=file.name, function="build")
    built = build(
        file.parent, workload, seed=0, rank=0, computing=arithmetic("fp32", torch.device("cpu"))
    )
    buffers = float(sum(one.numel() * one.element_size() for one in built.model.buffers()))
    return (
        4.0 * built.parameters,
        buffers,
        sum(one.requires_grad for one in built.model.parameters()),
    )


def link_bytes(names: Iterable[str]) -> pd.DataFrame:
    """A row a workload and strategy: bytes that one of two machines sends in a step, and by the formula."""
    rows = []
    for name in names:
        size, buffers, parameters = bytes_of(WORKLOADS / f"{name}.py")
        formula = {"ddp": dense_bytes(size, 2, 1), "ddp-fp16": dense_bytes(size, 2, 1) / 2}
        formula |= {
            MSTOPK_SENT: sparse_bytes(size, 2, 1),
            ADASUM: adasum_bytes(size, parameters, RANKS),
        }
        formula |= {"ps-2": served_bytes(size, RANKS, 1, 2)}
        for strategy, expected in formula.items():
            sent = sent_a_step(WORKLOADS / f"{name}.py", strategy)
            row = {"workload": name, "strategy": strategy, "sent": sent, "formula": expected}
            rows.append(row | {"buffers": buffers / RANKS})
    table = pd.DataFrame(rows)
    return table.assign(off=(table["sent"] - table["buffers"]) / table["formula"] - 1)


def updates(asked: Iterable[tuple[Sized, int]]) -> pd.DataFrame:
    """A row a workload and number of ranks, each a process of this machine: seconds and bytes of a step of ddp and of
    zero1, in turns; seconds of one device's optimizer, states less that a rank holds by the formula, and whether losses
    are alike to the last bit.
    """
    rows = []
    for sized, world in asked:
        file = WorkloadFile(name=sized.name, digest=sized.name, file=f"{sized.name}.py", function="build",
                            arguments=dict(sized.arguments))  # fmt: skip
        plain: dict[str, Any] = {"run_id": "", "workload": sized.name}
        profile = Item(**plain, kind="profile", nodes=[0], batches=[sized.batches[0]])
        (alone,) = served(file, [profile], world=1)
        batches = [sized.batches[0]] * world
        items = [Item(**plain, kind="train", nodes=list(range(world)), batches=batches, strategy=one, least_steps=5,
                      most_steps=5, most_s=15.0) for one in ("ddp", UPDATES_SHARED)]  # fmt: skip
        turns = served(file, items * _REPEATS, world=world)
        dense, shared = turns[:2]
        seconds = [[one["step_s"] for one in turns[place::2]] for place in range(2)]
        losses = [one["losses"] for one in served(file, items, world=world, losses=_UPDATE_STEPS)]
        states = max(alone["checkpoint_bytes"] - alone["gradient_bytes"], 0)
        row = {
            "workload": sized.name,
            "ranks": world,
            "optimizer_s": alone["rows"][0]["optimizer_s"],
        }
        row |= {
            "ddp_s": median(seconds[0]),
            "zero1_s": median(seconds[1]),
            "ddp_bytes": dense["peak_bytes"],
        }
        row |= {"apart": max((max(one) - min(one)) / median(one) for one in seconds)}
        row |= {"saved_bytes": dense["peak_bytes"] - shared["peak_bytes"], "states_bytes": states}
        rows.append(row | {"formula": (1 - 1 / world) * states, "alike": losses[0] == losses[1]})
        print(pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1), flush=True)
    return pd.DataFrame(rows)


def learning(names: Iterable[str], *, seeds: int, steps: int) -> pd.DataFrame:
    """A row a workload and strategy: losses after as many steps, what is allowed, and the verdict of the planner."""
    rows = []
    for name in names:
        modes = (Mode(), *(Mode(strategy=one) for one in COMPRESSED))
        workload = Workload(
            name=name,
            digest=name,
            samples=1,
            global_batch_least=1,
            global_batch_most=1,
            goals=(),
            modes=modes,
        )
        asked = list(product(range(1, seeds + 1), modes))
        plain: dict[str, Any] = {
            "run_id": "",
            "kind": LEARN,
            "nodes": list(range(RANKS)),
            "workload": name,
        }
        plain |= {
            "batches": [_LEARNING_BATCH] * RANKS,
            "most_steps": steps,
            "windows": LEARNING_WINDOWS,
        }
        items = [
            Item(**plain, **mode._asdict(), seed=seed, most_s=math.inf) for seed, mode in asked
        ]
        file = WorkloadFile(name=name, digest=name, file=f"{name}.py", function="build")
        alike = {
            "workload": name,
            "workload_digest": name,
            "cluster": "",
            "layout": "",
            "batch_per_device": "",
        }
        alike |= {"status": "measured", "told_by": "node"}
        runs = pd.DataFrame(
            [
                alike | mode._asdict() | {"seed": seed} | values
                for (seed, mode), values in zip(
                    asked, served(file, items, world=RANKS), strict=True
                )
            ]
        )
        for mode in modes[1:]:
            found = verdict(runs, workload, mode)
            row = {"workload": name, "strategy": mode.strategy, "seeds": seeds}
            if found is not None:
                row |= {
                    "steps": found.steps,
                    "dense_loss": found.dense,
                    "loss": found.loss,
                    "allowed": found.allowed,
                }
            rows.append(
                row
                | {
                    "verdict": "not shown"
                    if found is None
                    else "passes"
                    if found.passes
                    else "fails"
                }
            )
    return pd.DataFrame(rows)


def settings() -> str:
    """srift.toml of four workloads on a type of local host a bandwidth."""
    text = ""
    for mbit in MBITS:
        text += (
            f"[local.instance_types.b{mbit}]\ncores = 0.4\nmemory_gib = 3.0\nbandwidth_gbps = {mbit / 1000}\n"
            f"usd_per_hour = {USD_PER_HOUR[f'b{mbit}']:.2f}\n"
            "spot_usd_per_hour = 0.02\nspot_interruptions_per_hour = 0.1\n\n"
        )
    for name, batch in BATCHES.items():
        text += (
            f'[workloads.{name}]\nentrypoint = "{name}.py:build"\nsamples = 100000\nglobal_batch = {2 * batch}\n'
            f'strategies = {json.dumps((*joint_choice.STRATEGIES, *SERVED))}\ngoals = [{{ goal = "cheapest" }}]\n\n'
        )
    return text + two_kinds.SETTINGS


def wanted(here: Workspace, hosts: int, scale: int) -> list[Launch]:
    """A launch a type, of what was not measured yet: each workload dense and compressed."""
    launches, runs = [], training_frames(here.warehouse, "local")["runs"]
    for mbit in MBITS:
        cluster = cluster_of(here, f"{hosts}xb{mbit}")
        items = []
        for (name, batch), strategy in product(BATCHES.items(), ("ddp", MSTOPK_SENT)):
            known = (
                runs[(runs["cluster"] == cluster.name) & (runs["workload"] == name)]
                if len(runs)
                else runs
            )
            known = known[known["strategy"] == strategy] if len(known) else known
            if not len(known) or str(scale * batch) not in set(
                known["batch_per_device"].astype(str)
            ):
                items.append(
                    Unseen(
                        workload=name,
                        mode=Mode(strategy=strategy),
                        nodes=tuple(range(hosts)),
                        batches=(scale * batch,) * hosts,
                    )
                )
        if items:
            launch = launch_of(cluster, items, "to judge compression")
            launches.append(replace(launch, est_s=2 * launch.est_s))
    return launches


def models_of(data: TrainingData, here: Workspace, seed: int) -> dict[str, StepTimeModel]:
    """By type one that never saw it compress, and one under "" that never saw any."""
    compresses, types = (
        data.runs["strategy"] == MSTOPK_SENT,
        data.runs["cluster"].str.split("x").str[1],
    )
    found = {}
    for left_out in ("", *sorted(set(types))):
        own = compresses & ((types == left_out) | (left_out == ""))
        model = fit(replace(data, runs=data.runs[~own]), seed=seed)
        for workload in here.measurable:
            model = with_compressed(model, workload)
        found[left_out] = model
    return found


def setups_of(data: TrainingData, models: dict[str, StepTimeModel]) -> pd.DataFrame:
    """A row a setup that was measured in both ways: log of dense seconds over compressed ones, measured and predicted.

    `noise` is the standard deviation of the measured log, by the spread of steps of both runs; `regret` of choosing
    between the two as the planner does: seconds of what it takes over those of the faster one, less 1.
    """
    keys = ["workload", "cluster", "batch_per_device"]
    runs = data.runs.assign(batch_per_device=data.runs["batch_per_device"].astype(str))
    figures = ["step_s", "step_spread"]
    both = [
        runs[runs["strategy"] == one].groupby(keys)[figures].median()
        for one in ("ddp", MSTOPK_SENT)
    ]
    table = (
        both[0]
        .merge(both[1], left_index=True, right_index=True, suffixes=("_dense", "_sparse"))
        .reset_index()
    )
    measured = np.log(table["step_s_dense"] / table["step_s_sparse"])
    spread = (
        np.hypot(table["step_spread_dense"], table["step_spread_sparse"]) / 1.349
    )  # of one step: above it
    said: dict[str, FloatArray] = {}
    for label, regrets in (("predicted", "regret"), ("by_physics", "regret_by_physics")):
        logs, taken = [], []
        for row in table[keys].to_dict("records"):
            model = models[str(row["cluster"]).split("x")[1] if label == "predicted" else ""]
            asked = pd.DataFrame([row | {"strategy": one} for one in ("ddp", MSTOPK_SENT)])
            arrays = read_setups(asked, {})
            predicted = model.predict_arrays(arrays)
            dense, sparse = np.log(predicted["step_s"].to_numpy(float))
            logs.append(dense - sparse)
            taken.append(not unproven(model, arrays, predicted, {Mode()})[1])
        said[label] = np.array(logs)
        steps_s = np.where(taken, table["step_s_sparse"], table["step_s_dense"])
        said[regrets] = (
            steps_s / table[["step_s_dense", "step_s_sparse"]].min(axis=1).to_numpy(float) - 1
        )
    gbps = table["cluster"].str.split("xb").str[1].astype(float) / 1000
    return table.assign(gbps=gbps, gain=measured, noise=spread, **said)


def crossing(table: pd.DataFrame, column: str) -> float:
    """Gbit/s at which a log of gain is 0, between the two nearest bandwidths; NaN where it never changes its sign."""
    own = table.sort_values("gbps")
    x, y = np.log(own["gbps"].to_numpy(float)), own[column].to_numpy(float)
    for at in range(len(x) - 1):
        if y[at] > 0 >= y[at + 1]:
            return float(np.exp(x[at] + (x[at + 1] - x[at]) * y[at] / (y[at] - y[at + 1])))
    return float("nan")


def served_launches(here: Workspace) -> list[Launch]:
    """A launch a type, of what was not measured yet: each workload with each number of servers."""
    launches, runs = [], training_frames(here.warehouse, "local")["runs"]
    for mbit in MBITS:
        cluster = cluster_of(here, f"{SERVED_HOSTS}xb{mbit}")
        known = (
            runs[runs["cluster"] == cluster.name]
            if len(runs)
            else pd.DataFrame(columns=["workload", "strategy"])
        )
        have = set(zip(known["workload"], known["strategy"], strict=True))
        items = [
            Unseen(
                workload=name,
                mode=Mode(strategy=strategy),
                nodes=tuple(range(SERVED_HOSTS)),
                batches=(batch,) * SERVED_HOSTS,
            )
            for (name, batch), strategy in product(BATCHES.items(), SERVED)
            if (name, strategy) not in have
        ]
        launches += (
            [launch_of(cluster, items, "to judge how many servers hide an exchange")]
            if items
            else []
        )
    return [replace(one, est_s=2 * one.est_s) for one in launches]


def server_counts(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a workload and type: steps with each number of servers, the least number that is as fast as the fastest to
    _ALIKE, and the least of them that the rule of sizing asks for, or the most; `noise` of a step.
    """
    own = runs[runs["strategy"].isin(SERVED) & (runs["cluster"].str.startswith(f"{SERVED_HOSTS}x"))]
    counts = {one: Mode(strategy=one).servers for one in SERVED}
    rows = []
    for (name, cluster), each in own.groupby(["workload", "cluster"]):
        steps = {
            counts[str(one)]: float(some["step_s"].median())
            for one, some in each.groupby("strategy")
        }
        if len(steps) < len(SERVED):
            continue
        gbps = float(str(cluster).split("xb")[1]) / 1000
        compute_s = float((each["step_s"] - each["sync_s"]).median())
        needed = 2 * servers_busy(
            float(each["gradient_bytes"].median()), SERVED_HOSTS, gbps, compute_s
        )
        enough = [one for one in sorted(steps) if steps[one] <= (1 + _ALIKE) * min(steps.values())]
        row = {"workload": name, "cluster": cluster, "compute_s": compute_s} | {
            f"ps-{n}": s for n, s in steps.items()
        }
        rule = next((one for one in sorted(steps) if one >= needed), max(steps))
        rows.append(row | {"needed": needed, "rule": rule, "measured": enough[0],
                           "noise": float(each["step_spread"].median()) / 1.349})  # fmt: skip
    return pd.DataFrame(rows)


class Claims:
    """Lines that are printed at the end, and whether all hold."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def add(self, claim: str, shown: str, noise: str, holds: bool) -> None:
        """One line."""
        self.rows.append(
            {"claim": claim, "shown": shown, "noise": noise, "holds": "yes" if holds else "NO"}
        )

    @property
    def hold(self) -> bool:
        """All of them?"""
        return all(one["holds"] == "yes" for one in self.rows)


def judge_selection(claims: Claims, most: int) -> None:
    """Time and energy of the selection."""
    table = selections([one for one in SIZES if one <= most])
    print_frame(table, "selection on one thread")
    energy, exact = table["energy"].min(), (table["picked"] == table["asked"]).all()
    ratios = f"{table['ratio'].min():.2f} to {table['ratio'].max():.2f} times torch.topk's seconds"
    within = f"repeats from {table['ratio_from'].min():.2f} to {table['ratio_to'].max():.2f}"
    claims.add("MSTopK picks exactly k with 0.9 of the energy", f"energy {energy:.4f}; {ratios}", within,
               bool(exact and energy >= _LEAST_ENERGY))  # fmt: skip


def judge_bytes(claims: Claims) -> None:
    """Bytes on a link."""
    table = link_bytes((CROSSING, "transformer_lm"))
    print_frame(table, "bytes that one of two machines sends in a step")
    dense = float(table[table["strategy"] == "ddp"]["off"].abs().max())
    for strategy in (MSTOPK_SENT, ADASUM, "ps-2"):
        off = float(table[table["strategy"] == strategy]["off"].abs().max())
        claims.add(f"bytes of {strategy} within 2 % of the formula", f"{off:.2%} off", f"dense ones {dense:.2%}",
                   off <= _BYTES_OFF)  # fmt: skip


def judge_adasum(claims: Claims, seeds: int) -> None:
    """Steps to a loss: at least FEWER_STEPS fewer somewhere, and where they are not fewer at the largest batch."""
    table = adasum_steps(JOBS, seeds=seeds)
    print_frame(table, "steps to a loss, Adasum's over averaging's")
    largest = table[
        table["ranks"] == table.groupby("workload")["ranks"].transform("max")
    ].sort_values("ratio")
    best = largest.iloc[0]
    least = largest.drop_duplicates("workload").set_index("workload")["ratio"]
    without = ", ".join(str(name) for name, ratio in least.items() if not ratio < 1) or "none"
    claims.add(f"Adasum at the largest batch takes at least {FEWER_STEPS:.0%} fewer steps on a workload",
               f"{best['ratio'] - 1:+.0%} ({best['workload']}, {best['form']}, {best['ranks']} ranks);"
               f" no fewer: {without}",
               f"sd of {seeds} seeds {best['sd']:.2f}", bool(best["ratio"] <= 1 - FEWER_STEPS))  # fmt: skip


def judge_placement(claims: Claims, seed: int) -> None:
    """Orders of machines against the best of all and breadth-first ones; all-reduces of hosts in several orders."""
    found = {hosts: on_hosts(hosts, seed) for hosts in host_networks(seed)}
    table = orders_of(
        [*networks(range(PLACEMENT_SEEDS)), *(as_network(*one) for one in found.items())]
    )
    grouped = table.groupby(["network", "traffic"], sort=False)
    figures = {"over_best": ["mean", "max"], "searched_over_best": ["mean", "max"], "breadth_first": ["mean", "max"],
               "as_they_come": ["mean"], "changed": ["mean"]}  # fmt: skip
    shown = grouped.agg(figures)
    shown.columns = shown.columns.map(" ".join)
    print_frame(
        shown.reset_index(),
        "orders of 8 machines: over the best, and other orders over the chosen one",
    )
    rows = pd.DataFrame([row for one in found.items() for row in host_rows(*one)])
    print_frame(rows, "all-reduces of 8 local hosts")
    for hosts, said in found.items():
        print(f"{hosts.name}: {said['pairs']['took_s']:.1f} s of measuring links; {said['reason']}")
    worst, mean = table["over_best"].max(), table["over_best"].mean()
    searched = table["searched_over_best"].max()
    claims.add("order of 8 machines within 5 % of the best of all 40,320", f"{mean:.1%}, at most {worst:.1%} over it;"
               f" of a local search at most {searched:.1%}", f"pairs measured with {NOISE:.0%}; {len(table)} cases",
               bool(max(worst, searched) <= _OVER_BEST))  # fmt: skip
    differs = table[table["changed"]]
    breadth, comes = differs["breadth_first"], differs["as_they_come"]
    claims.add("breadth-first order takes longer than the chosen one",
               f"{breadth.mean():.2f} times, {breadth.min():.2f} to {breadth.max():.2f}; machines as they come"
               f" {comes.mean():.2f}", f"the {len(differs)} cases in which an order was chosen",
               bool(breadth.mean() > 1))  # fmt: skip
    alike = table[table["network"].isin(["all alike", "one slow machine"])]["changed"]
    claims.add("where no order is faster, machines stay as they come", f"{1 - alike.mean():.0%} of {len(alike)} cases",
               f"{NOISE:.0%} of a pair", not alike.any())  # fmt: skip
    others = rows[rows["order"] != "chosen"]
    ratios = others.groupby("order")["over_chosen"].mean()
    least = others.sort_values("over_chosen").iloc[0]
    by_network = "; ".join(f"{one['hosts']} {one['over_chosen']:.2f}" for _, one in
                           others[others["order"] == "breadth first"].iterrows())  # fmt: skip
    holds = (
        others["over_chosen"]
        >= 1 - rows.groupby("hosts")["apart"].max().reindex(others["hosts"]).to_numpy()
    )
    claims.add("on local hosts no order tried is faster than the chosen one, but for noise",
               f"breadth first takes {ratios['breadth first']:.2f} times its seconds ({by_network}), as they come"
               f" {ratios['as they come']:.2f}, least {least['over_chosen']:.2f} ({least['hosts']}, {least['order']})",
               f"repeats {rows['apart'].median():.0%} apart, at most {rows['apart'].max():.0%}",
               bool(holds.all() and ratios["breadth first"] > 1))  # fmt: skip


def judge_updates(claims: Claims) -> None:
    """The sharded update, on and off."""
    table = updates((one, RANKS) for one in SIZED)
    print_frame(table, "ddp and zero1 on ranks of this machine")
    claims.add("zero1 trains to the last bit as ddp", f"{table['alike'].mean():.0%} of {len(table)} cases",
               f"{_UPDATE_STEPS} steps", bool(table["alike"].all()))  # fmt: skip
    off = (table["saved_bytes"] - table["formula"]) / table["states_bytes"]
    claims.add("zero1 holds as much less as the formula says, within 10 % of the states",
               f"off by {off.abs().mean():.1%}, at most {off.abs().max():.1%} of the states", "one peak each",
               bool(off.abs().max() <= _SAVING_OFF))  # fmt: skip


def judge_cache(claims: Claims, rounds: int) -> None:
    """Epochs with and without a cache."""
    rows = data_cache.epochs(_REMOTE_MS, [0, 2], rounds)
    print_frame(
        data_cache.summary(rows),
        f"{data_cache.EPOCHS} epochs, each photo read after {_REMOTE_MS:g} ms asleep",
    )
    noise = f"without, again: {data_cache.spread(data_cache.ratios(rows, 'later_s', data_cache.AGAIN))} times"
    alike = rows.groupby("workers")["weights"].nunique().eq(1).all()
    claims.add("a cache trains to the same bits", f"{len(rows)} trainings", "none", bool(alike))
    for kind in ("memory", "disk", "half + disk"):
        later, first = (data_cache.ratios(rows, name, kind) for name in ("later_s", "first_s"))
        claims.add(f"later epochs are shorter with a cache ({kind}), the first no longer than by a tenth",
                   f"later {data_cache.spread(later)}, first {data_cache.spread(first)} times those without", noise,
                   all(max(own) < 1 for own in later.values())
                   and all(median(own) <= _FIRST_LONGER for own in first.values()))  # fmt: skip
    off = rows["srift_wait_s"] - rows["steady_wait_s"]
    share = (off / rows["later_s"]).groupby([rows["workers"], rows["variant"]]).median()
    claims.add("the wait that is measured is that of later epochs, to a tenth of an epoch",
               f"off by {share.abs().mean():.1%} of an epoch in the mean, at most {share.abs().max():.1%}",
               f"single rounds {(off / rows['later_s']).min():+.1%} to {(off / rows['later_s']).max():+.1%}",
               bool(share.abs().max() <= _OFF_WAIT))  # fmt: skip


def judge_elastic(claims: Claims, here: Workspace, rounds: int, minutes: float) -> None:
    """Lost machines, checkpoints, and seconds of jobs."""
    table = elastic_jobs(here, rounds=rounds, minutes=minutes)
    print_frame(table, "elastic jobs, in the order in which they ran")
    taken, wrong = int(table["taken"].sum()), int(table["wrong"].sum())
    finite = bool(np.isfinite(table["loss"]).all())
    claims.add(f"no checkpoint lost in at least {LEAST_LOSSES} revocations", f"{wrong} lost in {taken} revocations of"
               f" {len(table)} jobs", f"{int(table['lost_steps'].sum())} steps made again",
               wrong == 0 and finite and taken >= LEAST_LOSSES)  # fmt: skip
    off, judged = errors(table), table[table["judged"]]
    shown = f"{off['told']:.1%} off in the mean of {len(judged)} jobs with {int(judged['taken'].sum())} revocations"
    shown += f"; with steps as the jobs made them {off['spot']:.1%}, {off['spot_running']:.1%} from the first step on"
    shown += (
        f"; as told {off['running']:.1%} from the first step on; all together {off['sum']:+.1%}"
    )
    shown += f"; moments unknown {off['blind']:+.1%}; by the prior {off['prior']:.0%}"
    claims.add("seconds of elastic jobs within 5 %", shown, f"standard error {off['noise']:.1%}",
               off["told"] <= _ELASTIC_OFF)  # fmt: skip


def judge_tensor(claims: Claims) -> None:
    """Tensor parallelism: exactness, bytes, crossings of grids, and steps where activations dominate."""
    exact = tensor.exactness()
    print_frame(
        exact, "weights after three steps against the whole model's, as parts of the largest"
    )
    off = float(exact["off"].max())
    claims.add(
        "divided layers train as whole ones to 1e-5", f"{off:.1e}", "rounding", off <= _NOT_EXACT
    )
    sent = tensor.link_bytes()
    print_frame(sent, "bytes that a rank sends in a step, without packets' headers")
    off = float(sent["off"].abs().max())
    claims.add("bytes of [2,2,1], [2,2,2] and [4,4,1] within 2 % of the formula", f"{off:.2%} off", "none",
               off <= _BYTES_OFF)  # fmt: skip
    steps, crossed = tensor.crossings()
    print_frame(steps, "steps about the crossings")
    print_frame(crossed, "rows of a rank from which the other grid is faster")
    for row in crossed.to_dict("records"):
        pair = f"{row['other']} overtakes {row['one']} on {row['ranks']} ranks of {row['width']} features"
        claims.add(f"{pair} within 20 % of the rows",
                   f"{row['measured']:.0f} rows, predicted {row['predicted']:.0f} ({row['off']:+.0%})",
                   f"{row['noise']:.0%} of the rows", bool(abs(row["off"]) <= _CROSSING_OFF))  # fmt: skip
    large = tensor.dominated()
    print_frame(large, "steps where activations weigh more than weights")
    square, squares = (large[large["strategy"] == one].iloc[0] for one in (TENSOR_2D, TENSOR_25D))
    times = float(square["step_s"] / squares["step_s"])
    noise = times * math.hypot(float(square["spread"]), float(squares["spread"]))
    claims.add("tensor-2.5d at least 1.45 times as fast as tensor-2d where activations dominate",
               f"{times:.2f} times; by bytes {square['formula'] / squares['formula']:.2f}", f"{noise:.2f}",
               times >= _LEAST_TIMES)  # fmt: skip


def judge_steps(claims: Claims, data: TrainingData, here: Workspace, seed: int) -> None:
    """Speed, crossing and signs."""
    table = setups_of(data, models_of(data, here, seed))
    columns = [
        "workload",
        "cluster",
        "batch_per_device",
        "step_s_dense",
        "step_s_sparse",
        "gain",
        "noise",
    ]
    print_frame(
        table[[*columns, "predicted", "by_physics", "regret"]],
        "logs of dense seconds over compressed ones",
    )
    own = table[(table["workload"] == CROSSING) & table["cluster"].str.startswith("2x")]
    own = own[own["batch_per_device"] == str(BATCHES[CROSSING])]
    slowest = own.sort_values("gbps").iloc[0]
    gain = float(np.exp(slowest["gain"]) - 1)
    claims.add(f"in its regime at least 25 % faster ({CROSSING}, {slowest['gbps']:g} Gbit/s)", f"{gain:+.0%}",
               f"{slowest['noise']:.1%} of a step", gain >= _LEAST_GAIN)  # fmt: skip
    mean, most = float(table["regret"].mean()), float(table["regret"].max())
    always, never = (float((table[one] / table[["step_s_dense", "step_s_sparse"]].min(axis=1)).mean() - 1)
                     for one in ("step_s_sparse", "step_s_dense"))  # fmt: skip
    claims.add("regret of choosing between ddp and ddp-mstopk at most 3 % in the mean",
               f"{mean:.1%}, at most {most:.0%}; before any run of it {table['regret_by_physics'].mean():.1%}",
               f"always dense {never:.0%}, always compressed {always:.0%}", mean <= _MOST_REGRET)  # fmt: skip
    true, predicted, physics = (
        crossing(own, column) for column in ("gain", "predicted", "by_physics")
    )
    off = predicted / true - 1
    slope = np.abs(
        np.gradient(own.sort_values("gbps")["gain"], np.log(own.sort_values("gbps")["gbps"]))
    ).max()
    claims.add(f"bandwidth below which it pays within 20 % ({CROSSING})",
               f"{true:.2f} Gbit/s, predicted {predicted:.2f} ({off:+.0%}); before any run of it {physics:.2f}",
               f"{own['noise'].median() / slope:.0%} of the bandwidth", bool(abs(off) <= _CROSSING_OFF))  # fmt: skip
    right = np.sign(table["gain"]) == np.sign(table["predicted"])
    by_physics = np.sign(table["gain"]) == np.sign(table["by_physics"])
    decided = table["gain"].abs() >= table["noise"]
    shown = (
        f"{right.mean():.0%} of {len(table)} setups; before any run of it {by_physics.mean():.0%}"
    )
    noise = f"{right[decided].mean():.0%} of the {int(decided.sum())} that are farther from 0 than a step's noise"
    claims.add(
        "sign of 'compression pays' right in 95 %", shown, noise, bool(right.mean() >= _LEAST_SIGNS)
    )


def judge_servers(claims: Claims, runs: pd.DataFrame) -> None:
    """Their number by the rule."""
    table = server_counts(runs)
    print_frame(table, f"seconds a step of {SERVED_HOSTS} hosts by parameter servers")
    right = table["rule"] == table["measured"]
    taken = [float(row[f"ps-{row['rule']}"]) for _, row in table.iterrows()]
    best = table[[f"ps-{Mode(strategy=one).servers}" for one in SERVED]].min(axis=1)
    lost = float(np.mean(np.array(taken) / best)) - 1
    lacking = len(MBITS) * len(BATCHES) - len(table)
    said = f"{int(right.sum())} of {len(table)}; {lost:.1%} slower by it" + (
        f"; {lacking} not measured" * (lacking > 0)
    )
    claims.add("number of servers right in every sweep", said, f"a step's noise {table['noise'].median():.1%}",
               bool(lacking == 0 and right.all()))  # fmt: skip


def judge_tables(claims: Claims, runs: pd.DataFrame) -> None:
    """Two kinds of hosts in one training against either alone."""
    table = two_kinds.steps_of(runs)
    print_frame(table, f"seconds a step at a global batch of {two_kinds.BATCH}")
    measured = set(zip(table["cluster"], table["strategy"], strict=True))
    asked = [
        (cluster, strategy)
        for cluster, setups in two_kinds.SETUPS.items()
        for strategy, _ in setups
    ]
    lacking = [
        f"{cluster} in {strategy}"
        for cluster, strategy in asked
        if (cluster, strategy) not in measured
    ]
    found = table[(table["kinds"] == 2) & (table["strategy"] == TABLES)]
    if lacking or not len(found):
        said = f"not measured: {', '.join(lacking)}"
        claims.add("tables on one kind of host, the rest on another", said, "-", False)
        return
    both = found.iloc[0]
    alone = table[table["kinds"] == 1].drop_duplicates("cluster")
    ratios = {
        str(row["cluster"]): float(row["step_s"] / both["step_s"]) for _, row in alone.iterrows()
    }
    claims.add(f"tables on one kind of host, the rest on another: {_TWO_KINDS} times as fast as either kind alone",
               ", ".join(f"{ratio:.2f} of {name}" for name, ratio in ratios.items()),
               f"{both['step_spread'] / 1.349:.1%} of a step",
               min(ratios.values()) >= _TWO_KINDS)  # fmt: skip


def judge_choice(claims: Claims, data: TrainingData, seed: int) -> None:
    """Regret of the planner's choice of machines and strategy."""
    for known in (1, 2):
        table, by_workload = joint_choice.scores(
            data, USD_PER_HOUR, BATCHES, known=known, seed=seed
        )
        runs = f"{known} run{'s' * (known > 1)} in each strategy"
        print_frame(table, f"choices of machines and strategy after {runs}, per cent")
        print_frame(by_workload, "the planner's by workload, per cent")
        ours = table[table["chooser"] == RECOMMENDED].set_index("kind")
        others = (
            table[table["chooser"].str.endswith("everywhere")].groupby("chooser")["lost"].mean()
        )
        by_kind = ", ".join(
            f"{kind} {row['mean']:.1f} ({row['missed']:.0f} missed)"
            for kind, row in ours.iterrows()
        )
        claims.add(f"regret of machines and strategy together at most 3 %, {runs}",
                   f"{ours['mean'].mean():.1f} %: {by_kind}",
                   f"lost {ours['lost'].mean():.0f} %, {others.idxmin()} {others.min():.0f} %",
                   bool(ours["mean"].mean() <= 100 * _MOST_REGRET))  # fmt: skip


@contextmanager
def project(text: str, workloads: Iterable[str], home: Path | None) -> Iterator[Workspace]:
    """A folder with `text` as its srift.toml and built-in workloads beside it; `home` outlives it, where given."""
    with tempfile.TemporaryDirectory() as folder, reporting_to(live_reporter()):
        Path(folder, "srift.toml").write_text(text)
        for name in workloads:
            shutil.copy(WORKLOADS / f"{name}.py", folder)
        os.environ["SRIFT_HOME"] = str((home or Path(folder, "home")).resolve())
        os.chdir(folder)
        here, now = open_workspace("local"), datetime.now(UTC)
        here.warehouse.migrate()
        note_definitions(here, now)
        snapshot_offers(here, new_refresh_id(now), now)
        yield here
        os.chdir(ROOT)


def main(
    hosts: Annotated[list[int], typer.Option(help="machines of a cluster, several times")] = [2, 3],  # noqa: B006
    scales: Annotated[list[int], typer.Option(help="times the usual batch, repeatable")] = [1, 2],  # noqa: B006
    most_values: Annotated[int, typer.Option(help="of a selection")] = SIZES[-1],
    seeds: Annotated[int, typer.Option(help="trainings in each mode", min=2)] = 2,
    steps: Annotated[int, typer.Option(min=40, help="of each training")] = 200,
    parts: Annotated[str, typer.Option(help="what to judge")] = ",".join(PARTS),
    rounds: Annotated[int, typer.Option(min=1, help="of twelve elastic jobs each")] = 1,
    minutes: Annotated[
        float, typer.Option(help="after which no elastic job begins; `--home` has those before")
    ] = 60.0,
    home: Annotated[Path | None, typer.Option(help="keeps what was measured")] = None,
    seed: int = 0,
) -> None:
    """Print each table, and the claims at the end."""
    asked = parts.split(",")
    if unknown := sorted(set(asked) - set(PARTS)):
        raise typer.BadParameter(f"no part {unknown[0]!r}; {nearest_names(unknown[0], PARTS)}")
    claims = Claims()
    if "selection" in asked:
        judge_selection(claims, most_values)
    if "bytes" in asked:
        judge_bytes(claims)
    if "adasum" in asked:
        judge_adasum(claims, max(seeds, ADASUM_SEEDS))
    if "tensor" in asked:
        judge_tensor(claims)
    if "placement" in asked:
        judge_placement(claims, seed)
    if "update" in asked:
        judge_updates(claims)
    if "cache" in asked:
        judge_cache(claims, _REPEATS)
    if "learning" in asked:
        print_frame(learning(BATCHES, seeds=seeds, steps=steps), f"losses after {steps} steps")
    if "elastic" in asked:
        with project(elastic.settings(), elastic.WORKLOADS, home and home / "elastic") as here:
            judge_elastic(claims, here, rounds, minutes)
    if {"steps", "servers", "tables", "choice"} & set(asked):
        with project(settings(), BATCHES, home) as here:
            launches = (
                [wanted(here, *both) for both in product(hosts, scales)] if "steps" in asked else []
            )
            launches += (
                [joint_choice.wanted(here, list(USD_PER_HOUR), BATCHES)]
                if "choice" in asked
                else []
            )
            launches += [served_launches(here)] if "servers" in asked else []
            runs = training_frames(here.warehouse, "local")["runs"]
            launches += [two_kinds.launches(here, runs)] if "tables" in asked else []
            for some in launches:
                measure_all(here, some, f"strategies-{new_refresh_id(datetime.now(UTC))}")
            every = TrainingData(**training_frames(here.warehouse, "local"))
            data = replace(every, runs=every.runs[every.runs["workload"].isin(BATCHES)])
            if "steps" in asked:
                judge_steps(claims, data, here, seed)
            if "servers" in asked:
                judge_servers(claims, data.runs)
            if "tables" in asked:
                judge_tables(claims, every.runs)
            if "choice" in asked:
                judge_choice(claims, data, seed)
    print_frame(pd.DataFrame(claims.rows), "claims")
    if not claims.hold:
        raise typer.Exit(1)


if __name__ == "__main__":
    with explained():
        typer.run(main)

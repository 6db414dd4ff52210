"""Does the model pick the right grid: steps of local hosts in plain data parallelism and with divided layers.

`python -m tests.benchmarks.strategies --parts grids` measures two workloads on two and four hosts of a slow and a
faster link at two batches, in every strategy that so many hosts can train in. Beside it is what the planner would take,
by a model that has seen no divided layers but counted what they exchange, and by one that has seen them on the other
link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from models.campaign.campaign import Launch
from models.campaign.candidates import Measurement
from models.domain.setup_table import read_setups
from models.domain.workload import STRATEGIES, TENSOR, TENSOR_1D, TENSOR_2D, Mode, grid_shape, variant
from models.planner.compression import unproven
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.unmeasured import with_compressed
from tasks.workspace.workspace import Workspace
from tests.benchmarks.input_wait import cluster_of
from tests.benchmarks.trial import Unseen, launch_of

DDP = STRATEGIES[0]
MBITS = (50, 400)
HOSTS = (2, 4)
BATCHES = {"wide_mlp": (4, 32), "transformer_lm": (1, 8)}  # a device's
_KEYS = ["workload", "cluster", "batch_per_device"]


def settings() -> str:
    """srift.toml of the workloads on a type of local host a link."""
    text = ""
    for mbit in MBITS:
        text += (
            f"[local.instance_types.b{mbit}]\ncores = 0.4\nmemory_gib = 3.0\nbandwidth_gbps = {mbit / 1000}\n"
            "usd_per_hour = 0.05\nspot_usd_per_hour = 0.02\nspot_interruptions_per_hour = 0.1\n\n"
        )
    for name, batches in BATCHES.items():
        text += (
            f'[workloads.{name}]\nentrypoint = "{name}.py:build"\nsamples = 100000\nglobal_batch = {batches[-1]}\n'
            f'strategies = ["{DDP}", "{TENSOR_1D}", "{TENSOR_2D}"]\ngoals = [{{ goal = "cheapest" }}]\n\n'
        )
    return text


def strategies(hosts: int) -> list[str]:
    """In which so many hosts of one device can train."""
    return [DDP, *(one for one in (TENSOR_1D, TENSOR_2D) if grid_shape(one, hosts) is not None)]


def launches(here: Workspace) -> list[Launch]:
    """A launch a type and number of hosts, the first of a type with a profile of each workload."""
    found = []
    for mbit, hosts in product(MBITS, HOSTS):
        cluster, nodes = cluster_of(here, f"{hosts}xb{mbit}"), tuple(range(hosts))
        items = [
            Unseen(workload=variant(name, Mode(strategy=strategy)), nodes=nodes, batches=(batch,) * hosts)
            for name, batches in BATCHES.items()
            for batch, strategy in product(batches, strategies(hosts))
        ]
        launch = launch_of(cluster, items, "to judge the choice of grids")
        profiles: Sequence[Measurement] = ()
        if hosts == HOSTS[0]:
            first = launch.items[0]
            profiles = [
                replace(first, kind="profile", workload=name, nodes=(0,), batches=(*batches, 2 * batches[-1]))
                for name, batches in BATCHES.items()
            ]
        found.append(replace(launch, items=(*profiles, *launch.items), est_s=3 * launch.est_s))
    return found


def choices(data: TrainingData, here: Workspace, seed: int) -> pd.DataFrame:
    """A row a setup: seconds of each strategy, measured and predicted before any run of divided layers; what is picked
    then, and once they were seen on the other link, and what that costs over the best.
    """
    divided, types = data.runs["strategy"].isin(TENSOR), data.runs["cluster"].str.split("x").str[1]
    models: dict[str, StepTimeModel] = {}
    for left_out in ("", *sorted(set(types))):
        own = divided & ((types == left_out) | (left_out == ""))
        model = fit(replace(data, runs=data.runs[~own]), seed=seed)
        for workload in here.measurable:
            model = with_compressed(model, workload)
        models[left_out] = model
    runs = data.runs.assign(batch_per_device=data.runs["batch_per_device"].astype(str))
    measured = runs.pivot_table(index=_KEYS, columns="strategy", values="step_s", aggfunc="median").reset_index()
    rows = []
    for one in measured.to_dict("records"):
        setup = {name: str(one[name]) for name in _KEYS}
        known = [name for name in (DDP, *TENSOR) if pd.notna(one.get(name))]
        row: dict[str, Any] = dict(setup) | {f"{name}_s": one[name] for name in known}
        best = min(known, key=lambda name: one[name])
        row["best"] = best
        for label, model in (("before", models[""]), ("seen", models[setup["cluster"].split("x")[1]])):
            arrays = read_setups(pd.DataFrame([setup | {"strategy": name} for name in known]), {})
            predicted = model.predict_arrays(arrays)
            steps_s = predicted["step_s"].where(~unproven(model, arrays, predicted, {setup["workload"]}))
            picked = known[int(steps_s.argmin())]
            fastest = known[int(predicted["step_s"].argmin())]
            row |= {f"{label}_{name}_s": value for name, value in zip(known, predicted["step_s"], strict=True)}
            row |= {f"{label}_fastest": fastest, f"{label}_picked": picked}
            row[f"{label}_regret"] = float(one[picked] / one[best] - 1)
        rows.append(row)
    return pd.DataFrame(rows)

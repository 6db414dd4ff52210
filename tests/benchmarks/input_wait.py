"""Is a step that waits for its loader predicted, and is input named as what limits it? Measured on local hosts (root).

`python -m tests.benchmarks.input_wait` trains one network with four loaders: samples that cost next to nothing, and
ones that are unpacked for milliseconds, by the rank itself, by one worker and by two. It profiles them on two instance
types, trains them on each alone and on one cluster of two, fits what ships on that, predicts clusters of other sizes or
types, and then measures these. `loading_s` is what a step takes longer than the same network's with samples that cost
nothing, measured and predicted; input limits truly where that is over a fifth of it, and no less than what was waited
for gradients. Exits 1 where hosts were refused, as they are while others of this machine run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from flows.cli import explained
from models.campaign.campaign import Launch
from models.campaign.candidates import Measurement
from models.domain.cluster import Cluster
from models.step_time.model import StepTimeModel, TrainingData, fit
from tasks.market.offers import current_offers, note_definitions, snapshot_offers
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.workspace.workspace import Workspace, new_refresh_id, offers_of_market, open_workspace
from tests.benchmarks.commands import ROOT
from tests.benchmarks.trial import Unseen, launch_of, measure_all
from warehouse.reads import training_frames

BATCH = 16
PROFILED = ("lc.medium", "lc.large")
KNOWN = ("1xlc.medium", "1xlc.large", "2xlc.medium")
ASKED = ("3xlc.medium", "4xlc.small", "1xlc.whole", "2xln.medium", "1xlc.large+1xlc.medium")
_LIMITS = 0.2  # part of a step
_ITEM_S = 40.0  # at most, of a run: a slow loader's on a busy machine

WORKLOAD = '''
"""Small images, packed; `unpacked` says how often each is unpacked until it is given."""

import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, unpacked):
        draw = torch.Generator().manual_seed(1)
        self.unpacked = unpacked
        pixels = [torch.randint(0, 64, (3, 48, 48), dtype=torch.uint8, generator=draw) for _ in range(64)]
        self.packed = [zlib.compress(one.numpy().tobytes()) for one in pixels]

    def __len__(self):
        return 10_000

    def __getitem__(self, place):
        for _ in range(self.unpacked):
            pixels = zlib.decompress(self.packed[place % 64])
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(3, 48, 48)
        return image.float() / 64, place % 10


def build(unpacked, workers):
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10),
    )
    loader = DataLoader(Images(unpacked), batch_size=1, num_workers=workers)
    return model, nn.CrossEntropyLoss(), loader, torch.optim.SGD(model.parameters(), lr=0.01)
'''


def settings(slow: int) -> str:
    """srift.toml of the four workloads, on the local types of this project's own."""
    text = (ROOT / "srift.toml").read_text()
    types = text[text.index("[local.") : text.index("# EC2:")]
    for name, unpacked, workers in (
        ("fast", 1, 1),
        ("alone", slow, 0),
        ("one", slow, 1),
        ("two", slow, 2),
    ):
        types += (
            f'\n[workloads.{name}]\nentrypoint = "images.py:build"\nsamples = 100000\nglobal_batch = {BATCH}\n'
            f'arguments = {{ unpacked = {unpacked}, workers = {workers} }}\ngoals = [{{ goal = "cheapest" }}]\n'
        )
    return types


def cluster_of(here: Workspace, name: str) -> Cluster:
    """Machines on demand, by the cluster's name."""
    offers = {
        one.instance_type.name: one for one in offers_of_market(current_offers(here), "on-demand")
    }
    counted = [one.split("x", 1) for one in name.split("+")]
    return Cluster.of(*((int(count), offers[kind]) for count, kind in counted))


def training(here: Workspace, clusters: Iterable[str], workloads: Iterable[str]) -> list[Launch]:
    """A launch a cluster that trains each workload on all of it."""
    launches = []
    for name in clusters:
        cluster = cluster_of(here, name)
        nodes = tuple(range(len(cluster.members)))
        items = [
            Unseen(workload=one, nodes=nodes, batches=(BATCH,) * len(nodes)) for one in workloads
        ]
        launches.append(patient(launch_of(cluster, items, "to judge what is said of input")))
    return launches


def profiling(here: Workspace, names: Iterable[str], workloads: Iterable[str]) -> list[Launch]:
    """A launch a type that profiles each workload."""
    launches = []
    for name in names:
        items = tuple(
            Measurement(
                kind="profile",
                workload=one,
                nodes=(0,),
                batches=(BATCH // 2, BATCH, 2 * BATCH),
                accumulation_steps=1,
                message_bytes=(),
                reason="profile",
                est_s=_ITEM_S,
            )
            for one in workloads
        )
        empty = launch_of(cluster_of(here, f"1x{name}"), [], "profiles")
        launches.append(patient(replace(empty, items=items)))
    return launches


def patient(launch: Launch) -> Launch:
    """With time for slow loaders."""
    est_s = launch.est_s + _ITEM_S * len(launch.items)
    return replace(
        launch, est_s=est_s, est_usd=(launch.cluster.total_usd_per_hour or 0.0) * est_s / 3600
    )


def judged(model: StepTimeModel, measured: pd.DataFrame) -> pd.DataFrame:
    """A row a run: seconds measured and predicted, whether within the interval, and what limits."""
    predicted = model.predict(
        measured.drop(columns=["step_s", "sync_s", "step_spread", "input_s", "taken_share"])
    )
    step_s = measured["step_s"].to_numpy(float)
    free = measured[measured["workload"] == "fast"].groupby("cluster")["step_s"].median()
    longer = step_s - measured["cluster"].map(free).to_numpy(float)
    most = np.maximum(_LIMITS * step_s, np.nan_to_num(measured["sync_s"].to_numpy(float)))
    truly = np.where(longer > most, "input", "other")
    return pd.DataFrame(
        {
            "workload": measured["workload"],
            "cluster": measured["cluster"],
            "step_s": step_s,
            "predicted": predicted["step_s"],
            "low": predicted["step_low_s"],
            "high": predicted["step_high_s"],
            "off_%": 100 * (predicted["step_s"] / step_s - 1),
            "within": (predicted["step_low_s"] <= step_s) & (step_s <= predicted["step_high_s"]),
            "sync_s": measured["sync_s"],
            "waited_s": measured["input_s"],
            "loading_s": longer,
            "loading predicted": predicted["input_s"],
            "truly": truly,
            "limited by": predicted["bottleneck"],
            "more": predicted["input_by"],
        }
    )


def main(
    slow: Annotated[
        int, typer.Option(min=2, help="how often a sample of a slow loader is unpacked")
    ] = 60,
    seed: int = 0,
    keep: Annotated[Path | None, typer.Option(help="file to write the table to, as CSV")] = None,
) -> None:
    """Print what was profiled, and each run beside what was predicted of it."""
    names = ("fast", "alone", "one", "two")
    with tempfile.TemporaryDirectory() as folder, reporting_to(live_reporter()):
        Path(folder, "srift.toml").write_text(settings(slow))
        Path(folder, "images.py").write_text(WORKLOAD)
        os.environ["SRIFT_HOME"] = str(Path(folder, "home"))
        os.chdir(folder)
        here, now = open_workspace("local"), datetime.now(UTC)
        here.warehouse.migrate()
        note_definitions(here, now)
        snapshot_offers(here, new_refresh_id(now), now)
        measure_all(
            here, [*profiling(here, PROFILED, names), *training(here, KNOWN, names)], "known"
        )
        data = TrainingData(**training_frames(here.warehouse, "local"))
        if len(data.profiles) < len(names) * len(PROFILED) or len(data.runs) < len(names):
            print("too little was measured: see above")
            raise typer.Exit(1)
        model = fit(data, seed=seed)
        measured = measure_all(here, training(here, ASKED, names), "asked")
        os.chdir(ROOT)
    loaded = data.profiles[data.profiles["batch"] == BATCH]
    columns = [
        "workload",
        "instance_type",
        "forward_s",
        "backward_s",
        "input_s",
        "load_s",
        "load_wait_s",
    ]
    print_frame(loaded[[*columns, "loader_workers"]].round(5), f"profiles at {BATCH} samples")
    known = data.runs[["workload", "cluster", "step_s", "input_s", "sync_s"]]
    print_frame(known.round(4), "learned from")
    table = judged(model, measured)
    print_frame(table.round(3), f"{len(table)} setups never measured, on types profiled and not")
    waiting = table["truly"] == "input"
    print(
        f"median error {table['off_%'].abs().median():.1f} % (with slow loaders"
        f" {table['off_%'][table['workload'] != 'fast'].abs().median():.1f} %), {table['within'].mean():.0%} within"
        f" their interval; limited by input {int(waiting.sum())}, of which so named"
        f" {int((table['limited by'][waiting] == 'input').sum())}; so named and not so"
        f" {int((table['limited by'][~waiting] == 'input').sum())}; factors found {model.loaders.off}"
    )
    if keep is not None:
        table.to_csv(keep, index=False)


if __name__ == "__main__":
    with explained():
        typer.run(main)

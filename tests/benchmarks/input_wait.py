"""Is a step that waits for its loader predicted, and is input named as its bottleneck? (root)

One network trains with four loaders: free samples, and samples unpacked for milliseconds by the
rank, by one worker and by two. It is profiled on two local types, trained on three clusters, and
predicted on five others before they are measured. Input limits a step if loading adds over a fifth
of it, and more than the wait for gradients.
"""

import numpy as np
import pandas as pd
import typer

from models.campaign.candidates import PlannedRun
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, fit
from tests.benchmarks.claims import ROOT, Claim, Write, report, show
from tests.benchmarks.hosts import (
    Unseen,
    cluster_of,
    launch_of,
    launch_with,
    measure_all,
    project,
    workload_text,
)
from warehouse.reads import training_frames

BATCH, UNPACKED, ITEM_S = 16, 60, 40.0
PROFILED = ("lc.medium", "lc.large")
KNOWN = ("1xlc.medium", "1xlc.large", "2xlc.medium")
CLUSTERS = ("3xlc.medium", "4xlc.small", "1xlc.whole", "2xln.medium", "1xlc.large+1xlc.medium")
# How often a sample is unpacked, and loader workers.
LOADERS = {"fast": (1, 1), "alone": (UNPACKED, 0), "one": (UNPACKED, 1), "two": (UNPACKED, 2)}
WORKLOAD = '''
"""Small packed images; `unpacked` says how often each is unpacked."""

import zlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, unpacked):
        draw, self.unpacked = torch.Generator().manual_seed(1), unpacked
        size = (3, 48, 48)
        pixels = [torch.randint(0, 64, size, dtype=torch.uint8, generator=draw) for _ in range(64)]
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
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10),
    )
    loader = DataLoader(Images(unpacked), batch_size=1, num_workers=workers)
    return model, nn.CrossEntropyLoss(), loader, torch.optim.SGD(model.parameters(), lr=0.01)
'''


def settings() -> str:
    """srift.toml of the four workloads, on the types of the repository's srift.toml."""
    text = (ROOT / "srift.toml").read_text()
    found = text[text.index("[local.") : text.index("# EC2:")]
    for name, (unpacked, workers) in LOADERS.items():
        more = f"arguments = {{ unpacked = {unpacked}, workers = {workers} }}\n"
        found += "\n" + workload_text(name, BATCH, file="images", more=more)
    return found


def judged(model: StepTimeModel, measured: pd.DataFrame) -> pd.DataFrame:
    """A row a run: measured and predicted seconds, in the interval, the true and named limit."""
    drop = ["step_s", "sync_s", "step_spread", "input_s", "taken_share"]
    predicted = model.predict(measured.drop(columns=drop))
    step_s = measured["step_s"]
    free = measured[measured["workload"] == "fast"].groupby("cluster")["step_s"].median()
    loading_s = step_s - measured["cluster"].map(free)
    waits = loading_s > np.maximum(0.2 * step_s, measured["sync_s"].fillna(0.0))
    return measured[["workload", "cluster", "step_s"]].assign(
        off=100 * (predicted["step_s"] / step_s - 1),
        inside=predicted["step_low_s"].le(step_s) & predicted["step_high_s"].ge(step_s),
        waits=waits,
        named=predicted["bottleneck"] == "input",
    )


def main(write: Write = False) -> None:
    """Print each run beside its prediction."""
    with project(settings(), {"images.py": WORKLOAD}) as here:

        def measured(clusters: tuple[str, ...], trial: str) -> pd.DataFrame:
            launches = []
            for name in clusters:
                cluster = cluster_of(here, name)
                nodes = tuple(range(len(cluster.members)))
                batches = (BATCH,) * len(nodes)
                items = [
                    Unseen(workload=loader, nodes=nodes, batches=batches) for loader in LOADERS
                ]
                launches.append(launch_of(cluster, items, "to judge input", item_s=ITEM_S))
            return measure_all(here, launches, trial)

        profiles = tuple(
            PlannedRun(
                kind="profile",
                workload=name,
                nodes=(0,),
                batches=(BATCH // 2, BATCH, 2 * BATCH),
                message_bytes=(),
                reason="profile",
                est_s=ITEM_S,
            )
            for name in LOADERS
        )
        clusters = [cluster_of(here, f"1x{name}") for name in PROFILED]
        measure_all(
            here, [launch_with(cluster, profiles, "profile") for cluster in clusters], "profiles"
        )
        measured(KNOWN, "known")
        model = fit(TrainingData(**training_frames(here.warehouse, "local")), seed=0)
        table = judged(model, measured(CLUSTERS, "asked"))
    show("setups never measured", table)
    off, covers = float(table["off"].abs().median()), 100 * float(table["inside"].mean())
    right = int((table["waits"] == table["named"]).sum())
    rows = len(table)
    claims = [
        Claim("steps with loaders: median error", "10 %", f"{off:.1f} %", off <= 10),
        Claim("steps with loaders: coverage", "85 %", f"{covers:.0f} %", covers >= 85),
        Claim("input named as the bottleneck", "all", f"{right} of {rows} right", right == rows),
    ]
    report("input_wait", claims, write=write)


if __name__ == "__main__":
    typer.run(main)

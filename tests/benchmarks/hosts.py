"""Runs on local hosts that judge Srift: projects in temporary folders, launches, measured runs."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster, parse_cluster, parse_numbers
from models.domain.workload import MODE_COLUMNS, Mode
from tasks.campaign.campaign import serve_launch
from tasks.campaign.spending import Tally
from tasks.execution.collect import collect_launch
from tasks.market.offers import current_offers, note_definitions, snapshot_offers
from tasks.reporting.progress import reporter
from tasks.workspace.workspace import Workspace, new_refresh_id, open_workspace
from tests.benchmarks.claims import ROOT

WORKLOADS = ROOT / "tasks" / "node" / "workloads"
ITEM_S, START_S = 9.0, 25.0  # at most, of one run and of a launch's start
MODE = Mode()

Key = tuple[str, Mode, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A setup to measure on a cluster: its instances `nodes`, and the samples of each in a step."""

    workload: str
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    accumulation_steps: int = 1
    mode: Mode = MODE


def key(workload: str, types: Sequence[str], batches: Sequence[int], mode: Mode = MODE) -> Key:
    """Identity of a setup, whatever the order of its machines."""
    return workload, mode, tuple(sorted(zip(types, batches, strict=True)))


def keys_of(runs: pd.DataFrame) -> set[Key]:
    """Setups that were measured."""
    found = set()
    for row in runs.to_dict("records"):
        types = parse_cluster(str(row["cluster"]))
        batches = parse_numbers(str(row["batch_per_device"]), len(types), "batch_per_device")
        mode = Mode(*(str(row.get(name) or known[0]) for name, known in MODE_COLUMNS.items()))
        found.add(key(str(row["workload"]), types, batches, mode))
    return found


def split_by_cores(cores: Sequence[float], total: int) -> tuple[int, ...]:
    """Split `total` samples in proportion to `cores` by largest remainder, at least one each."""
    share = np.asarray(cores, dtype=float) / sum(cores) * total
    batches = np.maximum(1, np.floor(share)).astype(int)
    short = max(0, total - int(batches.sum()))
    batches[np.argsort(batches - share, kind="stable")[:short]] += 1
    return tuple(batches.tolist())


def launch_of(
    cluster: Cluster, items: Iterable[Unseen], reason: str, *, item_s: float = ITEM_S
) -> PlannedLaunch:
    """A launch that measures exactly `items`, in order; equal items are repeats."""
    wanted = tuple(
        PlannedRun(
            kind="train",
            workload=item.workload,
            mode=item.mode,
            nodes=item.nodes,
            batches=item.batches,
            accumulation_steps=item.accumulation_steps,
            message_bytes=(),
            reason=reason,
            est_s=item_s,
        )
        for item in items
    )
    return launch_with(cluster, wanted, reason)


def launch_with(cluster: Cluster, items: tuple[PlannedRun, ...], reason: str) -> PlannedLaunch:
    """A launch of measurements, with its seconds and dollars."""
    est_s = START_S + sum(item.est_s for item in items)
    est_usd = (cluster.total_usd_per_hour or 0.0) * est_s / 3600.0
    return PlannedLaunch(cluster=cluster, items=items, est_s=est_s, est_usd=est_usd, reason=reason)


def trial_name(name: str) -> str:
    """A name that no other trial has; run ids begin with it."""
    return f"{name}-{new_refresh_id(datetime.now(UTC))}"


def measure_all(here: Workspace, launches: Sequence[PlannedLaunch], trial: str) -> pd.DataFrame:
    """Serve `launches` and return their measured runs, with taken_share, by run id."""
    # disturbed runs are measured again, hence twice the time
    limit_s = 2 * sum(launch.est_s for launch in launches)
    tally = Tally(cap_usd=float("inf"), stop_at=time.monotonic() + limit_s)
    for number, launch in enumerate(launches):
        served = serve_launch(here, launch, f"{trial}-{number:02d}", tally)
        collected = collect_launch(here, served, datetime.now(UTC))
        tally.add(served, collected, launch.cluster)
        done = f"{len(served.recorded)} of {len(launch.items)} runs"
        reporter().say(f"  {launch.cluster.name}: {done}, {served.outcome}")
    runs = here.warehouse.select("runs", {"provider": "local"})
    shares = here.warehouse.select("run_details", {"provider": "local"})[["run_id", "taken_share"]]
    rows = runs[runs["run_id"].str.startswith(trial)].merge(shares, on="run_id", how="left")
    return rows.sort_values("run_id").reset_index(drop=True)


def cluster_of(here: Workspace, name: str) -> Cluster:
    """On-demand machines by the cluster's name."""
    offers = [offer for offer in current_offers(here) if offer.market == "on-demand"]
    by_type = {offer.instance_type.name: offer for offer in offers}
    counted = [pool.split("x", 1) for pool in name.split("+")]
    return Cluster.of(*((int(count), by_type[kind]) for count, kind in counted))


def type_text(name: str, *, cores: float, gbps: float, usd: float = 0.05, more: str = "") -> str:
    """A type of local host in srift.toml."""
    return (
        f"[local.instance_types.{name}]\ncores = {cores}\nmemory_gib = 3.0\n"
        f"bandwidth_gbps = {gbps}\nusd_per_hour = {usd}\nspot_usd_per_hour = 0.02\n"
        f"spot_interruptions_per_hour = 0.1\n{more}\n"
    )


def workload_text(name: str, batch: int, *, file: str = "", more: str = "") -> str:
    """A workload in srift.toml, built by `file` (default: named as the workload)."""
    return (
        f'[workloads.{name}]\nentrypoint = "{file or name}.py:build"\nsamples = 100000\n'
        f'global_batch = {batch}\ngoals = [{{ goal = "cheapest" }}]\n{more}\n'
    )


@contextmanager
def project(text: str, files: dict[str, str], home: Path | None = None) -> Iterator[Workspace]:
    """A folder with `text` as srift.toml, `files` and built-in workloads; `home` outlives it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "srift.toml").write_text(text)
        for workload in WORKLOADS.glob("*.py"):
            shutil.copy(workload, folder)
        for name, body in files.items():
            Path(folder, name).write_text(body)
        os.environ["SRIFT_HOME"] = str((home or Path(folder, "home")).resolve())
        os.chdir(folder)
        here, now = open_workspace("local"), datetime.now(UTC)
        here.warehouse.create()
        note_definitions(here, now)
        snapshot_offers(here, new_refresh_id(now), now)
        yield here
        os.chdir(ROOT)

"""The main job as a stranger runs it: a folder with a srift.toml and a workload of their own, and the command `srift`.

Hosts, torchrun, measurements, model, registry and table are real. What is asserted is what the stranger would notice.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.leases import LeaseStore
from tasks.providers.local.network import detect
from tasks.providers.local.processes import hosts

pytestmark = pytest.mark.local

SCRIPT = Path(sys.executable).with_name("srift")
SRIFT = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-c", "from flows.cli import main; main()"]
GOALS = {"cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"}

PROJECT = """
[campaign]
max_usd = 1.0
max_minutes = 1.2
max_hosts = 2
seed = 7
market = "on-demand"

[local.instance_types."e.part"]
cores = 0.4
memory_gib = 1.0
bandwidth_gbps = 0.5
usd_per_hour = 0.05
spot_usd_per_hour = 0.02

[local.instance_types."e.most"]
cores = 0.8
memory_gib = 1.0
bandwidth_gbps = 1.0
usd_per_hour = 0.11
spot_usd_per_hour = 0.05

[local.instance_types."e.whole"]
cores = 1.0
memory_gib = 1.0
bandwidth_gbps = 1.0
usd_per_hour = 0.16

[workloads.mine]
entrypoint = "jobs/mine.py:build"
samples = 200_000
global_batch = 32
goals = [
    { goal = "cheapest_within_deadline", hours = 2.0 },
    { goal = "fastest_within_budget", usd = 0.5 },
]

[workloads.broader]
entrypoint = "jobs/mine.py:build"
arguments = { width = 320 }
samples = 100_000
global_batch = [16, 64]
goals = [
    { goal = "cheapest_within_deadline", hours = 2.0 },
    { goal = "fastest_within_budget", usd = 0.5 },
]
"""

OWN_WORKLOAD = '''
import torch
from torch import nn


def build(width: int = 128):
    """Fit a sine with a small network: what to train, its loss, its batches, its optimizer."""
    model = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def make_batch(size):
        x = torch.randn(size, 32)
        return x, torch.sin(x.sum(dim=1, keepdim=True))

    return model, nn.MSELoss(), make_batch, torch.optim.Adam(model.parameters())
'''


@dataclass(frozen=True)
class Project:
    """A stranger's folder, and the command run in it as from a shell without a terminal."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "state"

    @property
    def published(self) -> Path:
        return self.home / "published"

    def srift(self, *words: str) -> subprocess.CompletedProcess[str]:
        ours = ("SRIFT_", "PREFECT_", "MLFLOW_", "COVERAGE", "PYTEST")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment |= {"SRIFT_HOME": str(self.home)}
        return subprocess.run(
            [*SRIFT, *words], cwd=self.folder / "jobs", env=environment, capture_output=True, text=True, timeout=400
        )

    def json(self, *words: str) -> Any:
        ended = self.srift(*words, "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.published / "recommendations.duckdb"), read_only=True) as connection:
            return connection.execute(query).fetchall()

    def left_running(self) -> list[str]:
        """Processes that carry this project's home in their environment or command, its hosts, its CPU groups."""
        store = LeaseStore(self.home)
        found = [str(mark) for mark in hosts() if store.token in mark.home]
        found += [str(group) for group in local_cpu.detect().groups(store.prefix)]
        needle = os.fsencode(self.home)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            except OSError:
                continue
            if needle in told:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    until = time.monotonic() + 60.0
    while hosts():
        assert time.monotonic() < until, f"hosts of another controller hold this machine's cores: {list(hosts())}"
        threading.Event().wait(0.5)
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "mine.py").write_text(OWN_WORKLOAD)
    (folder / "srift.toml").write_text(PROJECT)
    made = Project(folder)
    yield made
    made.srift("reap")
    shutil.rmtree(folder, ignore_errors=True)


def test_a_dry_run_says_what_would_be_bought_and_writes_nothing(project: Project) -> None:
    before = project.files()
    launches = project.json("refresh", "--dry-run")
    assert {item["workload"] for launch in launches for item in launch["items"]} >= {"mine", "broader"}
    assert all(launch["est_usd"] > 0 for launch in launches)
    assert project.files() == before
    assert not project.left_running()


def test_a_refresh_measures_registers_and_publishes(project: Project) -> None:
    ended = project.srift("refresh")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "prices are illustrative" in ended.stdout

    wanted = {(workload, goal) for workload in ("mine", "broader") for goal in GOALS}
    firsts = project.rows("select workload, goal, status, usd from recommendations where rank = 1")
    assert {row[:2] for row in firsts} == wanted
    assert {row[2] for row in firsts} == {"recommended"}, firsts
    assert all(row[3] > 0 for row in firsts)
    assert not project.rows("select 1 from recommendations where provider <> 'local' or model_version <> '1'")
    count = project.rows("select count(*) from recommendations")[0][0]
    assert len(pd.read_parquet(project.published / "recommendations.parquet")) == count
    with (project.published / "recommendations.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == count
    with duckdb.connect(str(project.home / "warehouse.duckdb"), read_only=True) as connection:
        assert connection.execute("select count(*) from raw_leases where outcome <> 'released'").fetchall() == [(0,)]
        records = connection.execute("select kind, status, json_array_length(body, '$.item.nodes') from raw_records")
        runs = [(str(kind), str(status), int(nodes)) for kind, status, nodes in records.fetchall()]
    assert {status for _, status, _ in runs} == {"measured"}, runs
    assert {kind for kind, _, _ in runs} >= {"profile", "train"}
    if detect().namespaces and not local_cpu.detect().why_not:
        assert {nodes for kind, _, nodes in runs if kind == "train"} >= {1, 2}, "no hosts trained together"
    wait_until_quiet(project)
    assert not list((project.home / "leases").glob("*/")), "a lease was not loaded and forgotten"
    assert {name for name in project.files() if not name.startswith("state/")} == {"srift.toml", "jobs/mine.py"}


def test_the_table_is_read_and_the_champion_asked(project: Project) -> None:
    table = project.json("table")
    assert len(table) == project.rows("select count(*) from recommendations")[0][0]
    asked = project.json("recommend", "mine", "--deadline", "2h", "--top", "2")
    assert {row["goal"] for row in asked} == {"cheapest_within_deadline"}
    assert asked[0]["status"] == "recommended" and asked[0]["p_meets_constraint"] >= 0.9
    mine = next(row for row in table if row["workload"] == "mine" and row["goal"] == asked[0]["goal"])
    assert asked[0]["cluster"] == mine["cluster"], "the same champion, prices and question gave another answer"


def test_status_and_reap_find_nothing_left(project: Project) -> None:
    status = project.json("status")
    assert status["at_work"] is None and status["leases"] == []
    assert [one for one in status["stale"] if not one.startswith("model version")] == []  # a short campaign's may err
    assert status["published"]["model_version"] == "1"
    assert project.json("reap") == {"ended": [], "not_swept": {}}


def test_a_refresh_without_dollars_measures_nothing_and_publishes_anew(project: Project) -> None:
    measured = _records(project)
    outcome = project.json("refresh", "--max-usd", "0")
    assert outcome["measured"]["launches"] == 0
    assert _records(project) == measured
    publications = project.rows("select distinct publication_id from recommendation_history")
    assert len(publications) == 2
    assert project.rows("select distinct publication_id from recommendations") == [(outcome["refresh_id"],)]
    wait_until_quiet(project)


def _records(project: Project) -> int:
    with duckdb.connect(str(project.home / "warehouse.duckdb"), read_only=True) as connection:
        found = connection.execute("select count(*) from raw_records").fetchone()
    return int(found[0]) if found else 0


def wait_until_quiet(project: Project, within_s: float = 10.0) -> None:
    """A server that the command started may take a moment to end after it."""
    until = time.monotonic() + within_s
    while left := project.left_running():
        assert time.monotonic() < until, left
        threading.Event().wait(0.1)

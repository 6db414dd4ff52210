"""The main job as a stranger runs it: a folder with a srift.toml and a workload of their own, and
the command `srift`.

Hosts, torchrun, measurements, model, registry and table are real. What is asserted is what the
stranger would notice.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import duckdb
import pandas as pd
import pytest

from tasks.providers.local.processes import hosts
from tests.local.command import Project, known
from tests.local.hosts import ISOLATION, SHARES, wait_for

pytestmark = pytest.mark.local

GOALS = {"cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"}

PROJECT = """
[campaign]
max_usd = 0.002
max_minutes = 3
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
    hidden = [nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(width, 1))

    def make_batch(size):
        x = torch.randn(size, 32)
        return x, torch.sin(x.sum(dim=1, keepdim=True))

    return model, nn.MSELoss(), make_batch, torch.optim.Adam(model.parameters())
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    wait_for(
        lambda: not hosts(),
        60.0,
        lambda: f"another controller holds this machine's cores: {list(hosts())}",
    )
    made = Project(tmp_path_factory.mktemp("stranger"))
    (made.folder / "jobs").mkdir()
    (made.folder / "jobs" / "mine.py").write_text(OWN_WORKLOAD)
    (made.folder / "srift.toml").write_text(PROJECT)
    yield made
    made.end()


def files(project: Project) -> set[str]:
    return {
        str(path.relative_to(project.folder))
        for path in project.folder.rglob("*")
        if path.is_file()
    }


def rows(project: Project, query: str) -> list[tuple[Any, ...]]:
    table = project.home / "published" / "recommendations.duckdb"
    with duckdb.connect(str(table), read_only=True) as connection:
        return connection.execute(query).fetchall()


def test_a_refresh_measures_registers_and_publishes(project: Project) -> None:
    code, out, err = project.run("refresh")
    assert code == 0 and "Traceback" not in err and "it/s" not in err, err
    assert "\x1b" not in out + err and "prices are illustrative" in out

    wanted = {(workload, goal) for workload in ("mine", "broader") for goal in GOALS}
    firsts = rows(project, "select workload, goal, status, usd from recommendations where rank = 1")
    assert {row[:2] for row in firsts} == wanted
    assert {row[2] for row in firsts} == {"recommended"}, firsts
    assert all(row[3] > 0 for row in firsts)
    assert not rows(
        project, "select 1 from recommendations where provider <> 'local' or model_version <> '1'"
    )
    count = rows(project, "select count(*) from recommendations")[0][0]
    assert len(pd.read_parquet((project.home / "published") / "recommendations.parquet")) == count
    with ((project.home / "published") / "recommendations.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == count
    with duckdb.connect(str(project.home / "warehouse.duckdb"), read_only=True) as connection:
        assert connection.execute(
            "select count(*) from raw_leases where outcome <> 'released'"
        ).fetchall() == [(0,)]
        records = connection.execute("select kind, status, len(nodes) from raw_runs")
        runs = [(str(kind), str(status), int(nodes)) for kind, status, nodes in records.fetchall()]
    assert {status for _, status, _ in runs} == {"measured"}, runs
    assert {kind for kind, _, _ in runs} >= {"profile", "train"}
    if ISOLATION.namespaces and not SHARES.why_not:
        assert {nodes for kind, _, nodes in runs if kind == "train"} >= {1, 2}
    project.nothing_is_left()
    assert not list((project.home / "leases").glob("*/"))
    assert {name for name in files(project) if not name.startswith("state/")} == {
        "srift.toml",
        "jobs/mine.py",
    }


def test_the_table_is_read_and_the_champion_asked(project: Project) -> None:
    table = project.json("table")
    assert len(table) == rows(project, "select count(*) from recommendations")[0][0]
    asked = project.json("recommend", "mine", "--deadline", "2h", "--top", "2")
    assert {row["goal"] for row in asked} == {"cheapest_within_deadline"}
    assert asked[0]["status"] == "recommended" and asked[0]["p_meets_constraint"] >= 0.9
    mine = next(
        row for row in table if row["workload"] == "mine" and row["goal"] == asked[0]["goal"]
    )
    assert asked[0]["cluster"] == mine["cluster"]


def test_a_refresh_without_dollars_measures_nothing_and_publishes_anew(project: Project) -> None:
    measured = known(project.home)
    outcome = project.json("refresh", "--max-usd", "0")
    assert outcome["measured"]["launches"] == 0
    assert known(project.home) == measured
    publications = rows(project, "select distinct publication_id from recommendation_history")
    assert len(publications) == 2
    assert rows(project, "select distinct publication_id from recommendations") == [
        (outcome["refresh_id"],)
    ]
    project.nothing_is_left()

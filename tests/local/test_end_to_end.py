"""The main job as a stranger runs it. Hosts, torchrun, measurements, model and table are real."""

from itertools import product

import duckdb
import pandas as pd
import pytest

from tasks.providers.local.processes import hosts
from tests.local.command import Project
from tests.local.hosts import ISOLATION, SHARES, wait_for

pytestmark = pytest.mark.local

GOALS = {"cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"}

PROJECT = """
[campaign]
max_usd = 0.003
max_minutes = 1
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

WORKLOAD_CODE = '''
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
def project(tmp_path_factory):
    why = lambda: f"another controller holds this machine's cores: {list(hosts())}"  # noqa: E731
    wait_for(lambda: not hosts(), 60.0, why)
    settings = PROJECT
    if SHARES.why_not:
        settings = settings.replace("cores = 0.4", "cores = 1").replace("cores = 0.8", "cores = 2")
    files = {"jobs/mine.py": WORKLOAD_CODE, "srift.toml": settings}
    yield from Project.made(tmp_path_factory.mktemp("stranger"), files)


def rows(project, query, file="published/recommendations"):
    with duckdb.connect(f"{project.home}/{file}.duckdb", read_only=True) as connection:
        return connection.execute(query).fetchall()


def test_a_refresh_measures_registers_and_publishes(project):
    code, out, err = project.run("refresh")
    assert code == 0 and "Traceback" not in err and "it/s" not in err, err
    assert "\x1b" not in out + err and "prices are illustrative" in out

    firsts = rows(project, "select workload, goal, status, usd from recommendations where rank = 1")
    assert {row[:2] for row in firsts} == set(product(("mine", "broader"), GOALS))
    assert {row[2] for row in firsts} == {"recommended"} and all(row[3] > 0 for row in firsts)
    sources = rows(project, "select distinct provider, model_version from recommendations")
    assert sources == [("local", "1")]
    [(count,)] = rows(project, "select count(*) from recommendations")
    published = project.home / "published"
    assert len(pd.read_parquet(published / "recommendations.parquet")) == count
    assert len(pd.read_csv(published / "recommendations.csv")) == count
    assert rows(project, "select distinct outcome from raw_leases", "warehouse") == [("released",)]
    runs = rows(project, "select kind, status, len(nodes) from raw_runs", "warehouse")
    assert {status for _, status, _ in runs} == {"measured"}, runs
    assert {kind for kind, _, _ in runs} >= {"profile", "train"}
    if ISOLATION.namespaces and not SHARES.why_not:
        assert {nodes for kind, _, nodes in runs if kind == "train"} >= {1, 2}
    project.nothing_is_left()
    assert not list((project.home / "leases").glob("*/"))
    assert {path.name for path in project.folder.iterdir()} == {"srift.toml", "jobs", "state"}

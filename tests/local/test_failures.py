"""Accidents on real hosts: what was reported is in the warehouse, and nothing is left running."""

import os
import signal
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from models.domain.cluster import Cluster
from tasks import node
from tasks.execution.collect import collect
from tasks.execution.mailbox import Mailbox
from tasks.execution.session import serve
from tasks.node.record import Item, WorkloadFile
from tasks.providers.local.catalogue import most_cores
from tasks.providers.local.processes import started_from
from tasks.providers.local.provider import LocalProvider
from tasks.workspace.settings import load_settings
from tasks.workspace.sources import Source, file_source
from tasks.workspace.workspace import Workspace
from tests.fakes import job_of
from tests.local.hosts import ISOLATION, SHARES, left_over
from tests.warehouse.builders import known
from warehouse.database import Warehouse

pytestmark = pytest.mark.local

CORES = 1.0 if SHARES.why_not else 0.8
needs_two_hosts = pytest.mark.skipif(
    not ISOLATION.namespaces or most_cores() < 2 * CORES, reason="no two hosts fit here"
)

TINY = """
import torch

def build():
    model = torch.nn.Linear(16, 4)
    def make_batch(batch):
        return torch.randn(batch, 16), torch.randn(batch, 4)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.01)
"""
PROJECT = f"""
[campaign]
max_minutes = 2.0
max_hosts = 1
market = "on-demand"
[local.instance_types.part]
cores = {CORES}
memory_gib = 1.0
bandwidth_gbps = 0.5
usd_per_hour = 0.05
[workloads.tiny]
entrypoint = "tiny.py:build"
samples = 100_000
global_batch = [16, 64]
goals = [{{ goal = "cheapest" }}]
"""


def laid_out(folder, monkeypatch, settings=PROJECT, code=TINY):
    """Lay out a project; end its hosts afterwards."""
    (folder / "srift.toml").write_text(settings)
    (folder / "tiny.py").write_text(code)
    monkeypatch.setenv("SRIFT_HOME", f"{folder}/state")
    yield folder
    here(folder).provider.reap(datetime.max.replace(tzinfo=UTC))


@pytest.fixture
def project(tmp_path, monkeypatch):
    yield from laid_out(tmp_path, monkeypatch)


def here(project):
    settings = load_settings(project / "srift.toml")
    package = Path(node.__file__).parent
    provider = LocalProvider(settings.home, settings.local.instance_types, package, sys.executable)
    warehouse = Warehouse(settings.home / "warehouse.duckdb")
    warehouse.create()
    return Workspace(settings=settings, warehouse=warehouse, provider=provider)


def job(installation, count, runs, text=TINY):
    """Return short runs of the workload tiny, whose file is `text`, on `count` hosts, each changed
    as `runs` says.
    """
    spec = WorkloadFile(
        name="tiny",
        digest=Source(files={}, entry="").digest({"": text.encode()}, "build", {}),
        file="workloads/tiny.py",
        function="build",
    )
    item = Item(
        run_id="",
        kind="train",
        nodes=list(range(count)),
        workload="tiny",
        batches=[8] * count,
        least_steps=4,
        most_s=1.0,
    )
    return job_of(
        [replace(item, run_id=run_id, **changes) for run_id, changes in runs.items()],
        count,
        cluster=Cluster.of((count, installation.provider.offers(datetime.now(UTC))[0])),
        files=((spec, file_source(installation.settings.root, "tiny.py", "")),),
        deadline_s=440.0,
    )


def test_a_run_that_exceeds_the_memory_of_its_host_fails_and_says_so(project):
    text = TINY.replace("torch.nn.Linear(16, 4)", "torch.nn.Linear(16, 17_000_000)")  # 1.09 GB
    (project / "tiny.py").write_text(text)
    installation = here(project)
    runs, stop_at = job(installation, 1, {"large": {}}, text), time.monotonic() + 400.0
    serve(installation.provider, runs, stop_at=stop_at, watch=lambda *_: None)
    collect(installation, datetime.now(UTC))
    [reason] = installation.warehouse.select("raw_runs")["reason"]
    assert "memory" in reason


ENDLESS = {"least_steps": 1_000_000, "most_steps": 1_000_000, "most_s": 60.0}


def kill_a_rank(cluster):
    for process in started_from(cluster.mailbox.parent / "code"):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        if b"node.worker" in words and b"torch.distributed.run" not in words:
            os.kill(process.pid, signal.SIGKILL)
            return
    pytest.fail("no rank runs")


@needs_two_hosts
def test_a_killed_rank_and_a_revoked_host_cost_the_runs_that_they_hit(project, clusters):
    installation = here(project)
    accidents = {"killed": kill_a_rank, "revoked": lambda cluster: cluster.revoke(1)}

    def watch(run_id, done, usd):
        """Let the accident happen once the nodes are at the run."""
        [cluster] = clusters
        reports = Mailbox(path=cluster.mailbox, nodes=2)
        if run_id in accidents and any(run_id in reports.under_way(n) for n in (1, 2, 3)):
            accidents.pop(run_id)(cluster)

    runs = {"before": {}, "killed": ENDLESS, "between": {}, "revoked": ENDLESS, "after": {}}
    stop_at = time.monotonic() + 400.0
    served = serve(installation.provider, job(installation, 2, runs), stop_at=stop_at, watch=watch)
    reasons = {row["run_id"]: row["reason"] for row in served.rows}
    assert set(reasons) == {"killed", "revoked"}, served.outcome
    assert "(SIGKILL)" in reasons["killed"] and "revoked on request" in reasons["revoked"]
    assert left_over(installation.home) == []
    collect(installation, datetime.now(UTC))
    assert known(installation.home) == {
        "before": "measured",
        "killed": "failed",
        "between": "measured",
        "revoked": "interrupted",
    }

"""When things go wrong on real machines: what was reported is in the warehouse, and nothing is left
running.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from models.domain.cluster import Cluster
from tasks import node
from tasks.campaign.campaign import serve
from tasks.execution import mailbox
from tasks.execution.collect import collect
from tasks.execution.job import Job, Served
from tasks.node.record import CPU, Devices, Item, WorkloadFile
from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.catalogue import most_cores
from tasks.providers.local.cluster import LocalCluster
from tasks.providers.local.network import detect
from tasks.providers.local.processes import started_from
from tasks.providers.local.provider import LocalProvider
from tasks.workspace.settings import Settings, load_settings
from tasks.workspace.sources import digest_of, file_source
from tasks.workspace.workspace import Workspace
from tests.local.command import known
from tests.local.hosts import left_over
from tests.warehouse.builders import setup
from warehouse.database import Warehouse

pytestmark = pytest.mark.local

CORES = 1.0 if local_cpu.detect().why_not else 0.8
TOO_SMALL = not detect().namespaces or most_cores() < 2 * CORES
needs_two_hosts = pytest.mark.skipif(TOO_SMALL, reason="no two hosts fit on this machine")

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


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "srift.toml").write_text(PROJECT)
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    yield tmp_path
    here(tmp_path).provider.reap(datetime.now(UTC), all_of_them=True)


def here(project: Path) -> Workspace:
    settings: Settings = load_settings(project / "srift.toml")
    package = Path(node.__file__).parent
    provider = LocalProvider(settings.home, settings.local.instance_types, package, sys.executable)
    warehouse = Warehouse(settings.home / "warehouse.duckdb")
    warehouse.create()
    return Workspace(settings=settings, warehouse=warehouse, provider=provider)


def job(
    installation: Workspace, count: int, runs: dict[str, dict[str, Any]], text: str = TINY
) -> Job:
    """Short runs of the tiny workload, whose file is `text`, on `count` hosts, each changed as
    `runs` says.
    """
    content = text.encode()
    spec = WorkloadFile(
        name="tiny",
        digest=digest_of(content, "build", {}),
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
    return Job(
        lease_id="r-00",
        cluster=Cluster.of((count, installation.provider.offers(datetime.now(UTC))[0])),
        expected=(Devices(name=CPU, count=1),) * count,
        items=tuple(replace(item, run_id=run_id, **changes) for run_id, changes in runs.items()),
        run_setups={run_id: setup(kind="train") for run_id in runs},
        files=((spec, file_source(installation.settings.root, "tiny.py", "")),),
        seed=1,
        deadline_s=120.0,
    )


ENDLESS = {"least_steps": 1_000_000, "most_steps": 1_000_000, "most_s": 60.0}


class Accident:
    """Calls `happens` with the running cluster once the nodes say that they are at a run."""

    def __init__(self, **happens: Callable[[LocalCluster], object]) -> None:
        self.happens = happens
        self.cluster: LocalCluster | None = None

    def watch(self, run_id: str, done: int, usd: float | None) -> None:
        assert self.cluster is not None
        said = mailbox.Mailbox(path=self.cluster.mailbox, nodes=len(self.cluster.addresses))
        if run_id in self.happens and any(
            run_id in said.under_way(attempt) for attempt in (1, 2, 3)
        ):
            self.happens.pop(run_id)(self.cluster)

    def serve(self, installation: Workspace, asked: Job, monkeypatch: pytest.MonkeyPatch) -> Served:
        acquire = LocalProvider.acquire

        @contextmanager
        def acquired(*arguments: Any, **named: Any) -> Iterator[LocalCluster]:
            with acquire(*arguments, **named) as self.cluster:
                yield self.cluster

        monkeypatch.setattr(LocalProvider, "acquire", acquired)
        return serve(
            installation.provider, asked, stop_at=time.monotonic() + 100.0, watch=self.watch
        )


def kill_a_rank(cluster: LocalCluster) -> None:
    for process, _ in started_from(cluster.mailbox.parent / "code"):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        if b"node.worker" in words and b"torch.distributed.run" not in words:
            os.kill(process.pid, signal.SIGKILL)
            return
    pytest.fail("no rank runs")


@needs_two_hosts
def test_a_killed_rank_and_a_revoked_host_cost_the_runs_that_they_hit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = here(project)
    accident = Accident(killed=kill_a_rank, revoked=lambda cluster: cluster.revoke(1))
    asked = job(
        installation,
        2,
        {"before": {}, "killed": ENDLESS, "between": {}, "revoked": ENDLESS, "after": {}},
    )
    served = accident.serve(installation, asked, monkeypatch)
    reasons = {row["run_id"]: row["reason"] for row in served.rows}
    assert set(reasons) == {"killed", "revoked"}, served.outcome
    assert "(SIGKILL)" in reasons["killed"] and "revoked on request" in reasons["revoked"]
    assert left_over(installation.home) == []
    collect(installation, "r", datetime.now(UTC))
    assert known(installation.home) == {
        "before": "measured",
        "killed": "failed",
        "between": "measured",
        "revoked": "interrupted",
    }

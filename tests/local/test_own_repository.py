"""A user's repository on a real host: a folder, requirements from a wheel, variables; and
requirements that clash.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.collect import collect
from tasks.execution.job import Job
from tasks.node.record import CPU, Devices, Item
from tasks.workspace.environments import environment_at, not_installable
from tests.local.command import known
from tests.local.hosts import left_over
from tests.local.test_failures import CORES, here
from tests.warehouse.builders import setup
from tests.wheels import wheel
from warehouse.reads import mart

pytestmark = [pytest.mark.local, pytest.mark.slow]

TRAIN = """
import os, socket, sys
import greeting
from .net import net

def build():
    assert greeting.WORD == os.environ["WORD"], "the variable, or the requirement, is another"
    assert os.path.exists("config.txt") and "SECRET" not in os.environ
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=2).close()
    except OSError:
        return net()
    raise AssertionError("a local host has a way out")
"""
NET = """
import torch

def net():
    model = torch.nn.Linear(16, 4)
    def make_batch(batch):
        return torch.randn(batch, 16), torch.randn(batch, 4)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.01)
"""
PROJECT = """
[local.instance_types.part]
cores = {cores}
memory_gib = 1.0
bandwidth_gbps = 0.5
usd_per_hour = 0.05
[workloads.repo]
path = "repo"
entrypoint = "train.run:build"
requirements = "requirements.txt"
env = {{ WORD = "hello" }}
samples = 100_000
global_batch = 16
[workloads.clash]
path = "repo"
entrypoint = "train.run:build"
requirements = "clash.txt"
env = {{ WORD = "hello" }}
samples = 100_000
global_batch = 16
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SECRET", "x")
    files = {"train/__init__.py": "", "train/run.py": TRAIN, "train/net.py": NET, "config.txt": ""}
    offline = "--no-index\n--find-links wheels\n"
    files |= {"requirements.txt": f"{offline}greeting\n", "clash.txt": f"{offline}ancient\n"}
    for name, text in files.items():
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_text(text)
    wheel(tmp_path / "repo" / "wheels", "greeting", "1.0", "WORD = 'hello'\n")
    wheel(tmp_path / "repo" / "wheels", "ancient", "1.0", "", "torch<2")
    (tmp_path / "srift.toml").write_text(PROJECT.format(cores=CORES))
    return tmp_path


def test_a_repository_is_measured_and_clashing_requirements_cost_their_own_runs_alone(
    project: Path,
) -> None:
    installation = here(project)
    settings = installation.settings
    [(name, why)] = not_installable(settings).items()
    assert name == "clash" and "ancient 1.0" in why
    files = {name: settings.travelling(name) for name in ("repo", "clash")}
    at_home = replace(
        files["repo"][0], environment=str(environment_at(settings.home, files["repo"][0]))
    )
    # as a rented machine does it, whose disk is another: the host installs the wheel that travelled
    itself = replace(files["repo"][0], name="itself", env={"WORD": "hello", "AGAIN": "1"})
    itself = replace(
        itself, digest=files["repo"][1].digest(files["repo"][1].read(), "build", {}, env=itself.env)
    )
    specs = [files["clash"], (at_home, files["repo"][1]), (itself, files["repo"][1])]
    items = [
        Item(
            run_id=spec.name,
            kind="train",
            nodes=[0],
            workload=spec.name,
            batches=[8],
            least_steps=4,
            most_s=1.0,
        )
        for spec, _ in specs
    ]
    asked = Job(
        lease_id="r-00",
        cluster=Cluster.of((1, installation.provider.offers(datetime.now(UTC))[0])),
        expected=(Devices(name=CPU, count=1),),
        items=tuple(items),
        run_setups={item.run_id: setup(kind="train") for item in items},
        files=specs,
        seed=1,
        deadline_s=240.0,
    )
    served = serve(
        installation.provider, asked, stop_at=time.monotonic() + 200.0, watch=lambda *_: None
    )
    assert (served.recorded, served.rows) == ({"repo", "itself", "clash"}, []), served.outcome
    collect(installation, "r", datetime.now(UTC))
    assert known(installation.home) == {"repo": "measured", "itself": "measured", "clash": "failed"}
    [failed] = mart(installation.warehouse, "failed_runs").to_dict("records")
    assert "ancient 1.0" in failed["reason"]
    assert (failed["told_by"], failed["cause"] or "") == ("node", "")
    assert left_over(installation.home) == []

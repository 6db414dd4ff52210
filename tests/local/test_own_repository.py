"""A user's repository on a real host: a folder, requirements from a wheel, variables; and
requirements that clash.
"""

import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.collect import collect
from tasks.node.record import Item
from tasks.workspace.environments import environment_at, not_installable
from tests.fakes import job_of
from tests.local.hosts import left_over
from tests.local.test_failures import CORES, TINY, here
from tests.warehouse.builders import known
from tests.wheels import wheel
from warehouse.reads import mart

pytestmark = [pytest.mark.local, pytest.mark.slow]

TRAIN = """
import os, socket, sys
import greeting
from .net import build as net

def build():
    assert greeting.WORD == os.environ["WORD"], "the variable, or the requirement, is another"
    assert os.path.exists("config.txt") and "SECRET" not in os.environ
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=2).close()
    except OSError:
        return net()
    raise AssertionError("a local host has a way out")
"""
WORKLOAD = """
[workloads.{name}]
path = "repo"
entrypoint = "train.run:build"
requirements = "{name}.txt"
env = {{ WORD = "hello" }}
samples = 100_000
global_batch = 16
"""
PROJECT = f"""
[local.instance_types.part]
cores = {CORES}
memory_gib = 1.0
bandwidth_gbps = 0.5
usd_per_hour = 0.05
{WORKLOAD.format(name="repo")}
{WORKLOAD.format(name="clash")}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SECRET", "x")
    files = {"train/__init__.py": "", "train/run.py": TRAIN, "train/net.py": TINY, "config.txt": ""}
    offline = "--no-index\n--find-links wheels\n"
    files |= {"repo.txt": f"{offline}greeting\n", "clash.txt": f"{offline}ancient\n"}
    for name, text in files.items():
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_text(text)
    wheel(tmp_path / "repo" / "wheels", "greeting", "1.0", "WORD = 'hello'\n")
    wheel(tmp_path / "repo" / "wheels", "ancient", "1.0", "", "torch<2")
    (tmp_path / "srift.toml").write_text(PROJECT)
    return tmp_path


def test_a_repository_is_measured_and_clashing_requirements_cost_their_own_runs_alone(project):
    installation = here(project)
    settings = installation.settings
    [(name, why)] = not_installable(settings).items()
    assert name == "clash" and "ancient 1.0" in why
    clash, (repo, source) = settings.travelling("clash"), settings.travelling("repo")
    at_home = replace(repo, environment=str(environment_at(settings.home, repo)))
    files = [clash, (at_home, source)]
    items = [
        Item(run_id=spec.name, kind="train", nodes=[0], workload=spec.name, batches=[8], most_s=1.0)
        for spec, _ in files
    ]
    offers = installation.provider.offers(datetime.now(UTC))
    asked = job_of(
        items,
        1,
        cluster=Cluster.of((1, offers[0])),
        files=files,
        deadline_s=240.0,
    )
    stop_at = time.monotonic() + 200.0
    served = serve(installation.provider, asked, stop_at=stop_at, watch=lambda *_: None)
    assert (served.recorded, served.rows) == ({"repo", "clash"}, []), served.outcome
    collect(installation, datetime.now(UTC))
    assert known(installation.home) == {"repo": "measured", "clash": "failed"}
    [failed] = mart(installation.warehouse, "failed_runs").to_dict("records")
    assert "ancient 1.0" in failed["reason"]
    assert (failed["told_by"], failed["cause"] or "") == ("node", "")
    assert left_over(installation.home) == []

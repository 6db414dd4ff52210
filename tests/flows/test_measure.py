"""`srift measure`: named machines and pilots, under the caps of a campaign."""

import importlib
import json
import shutil
from contextlib import nullcontext

import pytest
from prefect import Task

from models.campaign.budget import Allowance
from tests.fakes import FakeProvider, armed, ready
from tests.flows.test_cli import enter, printed, srift
from tests.installed import DescribedMachines, furnished, write_project
from tests.warehouse.builders import PROFILE
from warehouse.database import Warehouse

flow = importlib.import_module("flows.measure")
LOCAL = "tasks.providers.local.provider.LocalProvider"
MEASURED = {"step_s": 0.1234, "parameters": 10, "gradient_bytes": 40}


def report(cluster):
    """Each run of the plan is measured."""
    plan = json.loads((cluster.mailbox / "plan.json").read_text())
    digest = plan["workloads"][0]["digest"]
    for item in plan["items"]:
        values = PROFILE if item["kind"] == "profile" else MEASURED
        cluster.report(item["run_id"], kind=item["kind"], values=values, workload_digest=digest)


class Measuring(DescribedMachines):
    """Machines that measure whatever they are given."""

    def __init__(self, home):
        super().__init__()
        self.fake, self.requested = FakeProvider(home), []
        self.ended, self.forget = self.fake.ended, self.fake.forget  # type: ignore[method-assign]

    def acquire(self, cluster, **words):
        self.requested.append(cluster.name)
        self.fake.scripts = iter([[ready, armed(1), report]])
        return self.fake.acquire(cluster, **words)


@pytest.fixture
def described(described_machines, monkeypatch):
    """Machines are described, and flows run as plain functions."""
    monkeypatch.setattr(Task, "__call__", lambda self, *a, **k: self.fn(*a, **k))
    for name in ("measure_named", "market", "reap"):
        monkeypatch.setattr(flow, name, getattr(flow, name).fn)
    monkeypatch.setattr("tasks.workspace.prefect_server.local_server", nullcontext)


@pytest.fixture
def machines(described, monkeypatch, tmp_path):
    """Machines of a project with a champion of conv and lm."""
    shutil.copytree(furnished(), tmp_path / "project")
    made = Measuring(tmp_path / "project/state")
    monkeypatch.setattr(LOCAL, lambda *_, **__: made)
    enter(tmp_path / "project", monkeypatch)
    return made


def test_named_machines_are_measured_beside_predictions_and_nothing_is_published(machines):
    before = printed("table")
    found = printed("measure", "conv", "--on", "2xs.small", "--on", "1xs.large")
    assert machines.requested == ["2xs.small", "1xs.large"]
    assert [(row["kind"], row["cluster"], row["step_s"]) for row in found["runs"]] == [
        ("profile", "1xs.small", None),
        ("train", "2xs.small", 0.1234),
        ("profile", "1xs.large", None),
        ("train", "1xs.large", 0.1234),
    ]
    assert all(row["measured"] and row["reason"] == "" for row in found["runs"])
    for row in found["runs"][1::2]:
        low, middle, high = (row[f"predicted_step_{bound}s"] for bound in ("low_", "", "high_"))
        assert low < middle < high
    assert printed("table") == before
    assert found["refresh_id"] in json.dumps(printed("spend", "--by", "campaign"))
    runs = Warehouse(machines.fake.home / "warehouse.duckdb").select("run_details", {})
    assert set(runs["cluster"]) == {"2xs.small", "1xs.large"}


@pytest.mark.parametrize("cap", [("--max-usd", "0.00001"), ()])
def test_what_a_cap_does_not_pay_for_is_not_launched(machines, monkeypatch, cap):
    if not cap:  # of the worst case
        refused = Allowance(refusal="the month is over its cap")
        monkeypatch.setattr("tasks.campaign.campaign.allowance", lambda *_: refused)
    result = srift("measure", "conv", "--on", "1xs.small", *cap)
    assert result.exit_code == 1 and machines.requested == []
    assert "1xs.small" in result.stdout


def test_a_dry_run_starts_nothing_and_plans_profiles_of_an_unprofiled_workload_first(
    described, monkeypatch, tmp_path
):
    write_project(tmp_path)
    enter(tmp_path, monkeypatch)
    [launch] = printed("measure", "conv", "--on", "1xs.small+1xs.large", "--dry-run")
    kinds = [(item["kind"], len(item["nodes"])) for item in launch["items"]]
    assert kinds == [("profile", 1), ("profile", 1), ("train", 2)]
    assert sum(launch["items"][-1]["batches"]) == 48
    assert not (tmp_path / "state/warehouse.duckdb").exists()

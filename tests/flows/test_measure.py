"""`srift measure`: named machines and pilots, under the caps of a campaign."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prefect import Task

from models.campaign.budget import Allowance
from models.domain.cluster import Cluster
from tasks.campaign.named import Wish, clusters_of
from tasks.providers.base import EndedLease
from tasks.workspace.workspace import open_workspace
from tests.fakes import FakeProvider, armed, finished, ready
from tests.flows.test_cli import assert_fails, enter, printed, srift
from tests.installed import DescribedMachines, furnish, furnished, write_project
from tests.warehouse.builders import NOON, PROFILE
from warehouse.database import Warehouse

flow = importlib.import_module("flows.measure")
MEASURED = {
    "step_s": 0.1234,
    "step_spread": 0.01,
    "sync_s": 0.01,
    "parameters": 10,
    "gradient_bytes": 40,
}


def report(cluster: Any) -> None:
    """Each run of the plan is measured."""
    plan = json.loads((cluster.mailbox / "plan.json").read_text())
    digest = plan["workloads"][0]["digest"]
    for item in plan["items"]:
        values = PROFILE if item["kind"] == "profile" else MEASURED | {"flops_per_sample": None}
        cluster.report(item["run_id"], kind=item["kind"], values=values, workload_digest=digest)


@dataclass
class Acting(DescribedMachines):
    """Machines that measure whatever they are given."""

    home: Path = Path()
    asked: list[str] = field(default_factory=list)
    acting: FakeProvider | None = None

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[Any]:
        self.asked.append(cluster.name)
        self.acting = self.acting or FakeProvider(self.home)
        self.acting.scripts = iter([[ready, armed(1), report, finished(1)]])
        with self.acting.acquire(
            cluster, lease_id=lease_id, deadline_s=deadline_s, seed=seed
        ) as running:
            yield running

    def ended(self) -> list[EndedLease]:
        return self.acting.ended() if self.acting else []

    def forget(self, lease_id: str) -> None:
        assert self.acting is not None
        self.acting.forget(lease_id)


@pytest.fixture
def used(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a champion of the workloads conv and lm; read only."""
    monkeypatch.setattr(
        "tasks.providers.local.provider.LocalProvider", lambda *_, **__: DescribedMachines()
    )
    return enter(furnished(), monkeypatch)


@pytest.fixture
def acting(own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Acting:
    """The same of one's own, with machines that measure, without a server of Prefect."""
    folder = tmp_path / "project"
    furnish(folder)
    machines = Acting(home=folder / "state")
    monkeypatch.setattr("tasks.providers.local.provider.LocalProvider", lambda *_, **__: machines)
    monkeypatch.setattr(Task, "__call__", lambda self, *a, **k: self.fn(*a, **k))
    for name in ("measure_named", "market", "reap"):
        monkeypatch.setattr(flow, name, getattr(flow, name).fn)
    monkeypatch.setattr("tasks.workspace.prefect_server.own_server", nullcontext)
    enter(folder, monkeypatch)
    return machines


def test_named_machines_are_measured_beside_what_was_predicted_and_nothing_is_published(
    acting: Acting,
) -> None:
    before = printed("table")
    found = printed("measure", "conv", "--on", "2xs.small", "--on", "1xs.large")
    assert acting.asked == ["2xs.small", "1xs.large"]
    assert [(row["kind"], row["cluster"], row["step_s"]) for row in found["runs"]] == [
        ("profile", "1xs.small", None),
        ("train", "2xs.small", 0.1234),
        ("profile", "1xs.large", None),
        ("train", "1xs.large", 0.1234),
    ]
    for row in found["runs"]:
        assert row["measured"] and row["reason"] == ""
        if row["kind"] == "train":
            assert (
                row["predicted_step_low_s"] < row["predicted_step_s"] < row["predicted_step_high_s"]
            )
    assert printed("table") == before
    spent = printed("spend", "--by", "campaign")
    assert found["refresh_id"] in json.dumps(spent)
    runs = Warehouse(acting.home / "warehouse.duckdb").select("run_details", {})
    assert set(runs["cluster"]) == {"2xs.small", "1xs.large"}


def test_what_a_cap_does_not_pay_for_is_not_launched_and_said(acting: Acting) -> None:
    result = srift("measure", "conv", "--on", "1xs.small", "--max-usd", "0.00001")
    assert result.exit_code == 1 and acting.asked == []
    assert "1xs.small" in result.stdout


def test_a_worst_case_beyond_a_cap_is_refused_as_in_a_refresh(
    acting: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tasks.campaign.campaign.allowance",
        lambda *_: Allowance(refusal="the month is over its cap"),
    )
    result = srift("measure", "conv", "--on", "1xs.small")
    assert result.exit_code == 1 and acting.asked == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["conv", "--on", "2xs.smal"], "'s.small'"),
        (["convv", "--on", "2xs.small"], "'conv'"),
        (["conv", "--on", "s.small"], "4xNAME"),
        (["conv", "--on", "1xs.small", "--max-usd", "0"], "--max-usd"),
        (["conv", "--on", "1xs.small", "--provider", "ec2"], "--max-usd"),
        (["conv", "--on", "1xs.small", "--provider", "ec3"], "'ec2'"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_right_one_before_anything_starts(
    acting: Acting, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setattr(flow, "reap", lambda *_: pytest.fail("something was started"))
    assert_fails(srift("measure", *words), 2, says)


def test_what_is_sold_on_demand_alone_is_bought_so_and_a_cluster_in_two_spellings_once(
    used: Path,
) -> None:
    here = open_workspace("local")
    offers = [
        one
        for one in here.provider.offers(NOON)
        if one.market == "on-demand" or one.instance_type.name != "s.large"
    ]
    wish = Wish(workload="conv", clusters=("1xs.large", "2xs.small", "1xs.small+1xs.small"))
    found = [(one.name, one.members[0].market) for one in clusters_of(here, wish, offers)]
    assert found == [("1xs.large", "on-demand"), ("2xs.small", "spot")]


def test_without_names_it_is_the_pilots_that_recommend_proposes(used: Path) -> None:
    """The first goal with a constraint of srift.toml is 4 hours."""
    [first, *_] = printed("recommend", "conv", "--deadline", "4h", "--pilots", "2")
    wanted = sorted((run["cluster"], run["batch_per_device"]) for run in first["pilots"]["runs"])
    launches = printed("measure", "conv", "--pilots", "2", "--dry-run")
    found = [
        (one["cluster"], "+".join(map(str, dict.fromkeys(item["batches"]))))
        for one in launches
        for item in one["items"]
    ]
    assert sorted(found) == wanted and len(wanted) == 2


def test_a_dry_run_starts_nothing_and_a_workload_that_was_never_profiled_is_profiled_first(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "tasks.providers.local.provider.LocalProvider", lambda *_, **__: DescribedMachines()
    )
    write_project(tmp_path)
    enter(tmp_path, monkeypatch)
    [launch] = printed("measure", "conv", "--on", "1xs.small+1xs.large", "--dry-run")
    kinds = [(item["kind"], item["workload"], len(item["nodes"])) for item in launch["items"]]
    assert kinds == [("profile", "conv", 1), ("profile", "conv", 1), ("train", "conv", 2)]
    assert sum(launch["items"][-1]["batches"]) == 48
    assert not (tmp_path / "state" / "warehouse.duckdb").exists()

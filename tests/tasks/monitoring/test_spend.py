"""What was spent by day, campaign, workload and type, and what is held; an unknown price is no small sum."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.monitoring import spend
from tasks.providers.base import Lease
from tasks.reporting.tables import print_spend
from tasks.workspace.workspace import Workspace
from tests.installed import DescribedMachines, install
from warehouse.append import append, append_records

NOW = datetime.now(UTC).replace(tzinfo=None, microsecond=0)
DAY = timedelta(days=1)


def lease(
    name: str, refresh: str, usd: float | None, ago: timedelta, cluster: str = "2xs.small"
) -> dict[str, Any]:
    row = {
        "lease_id": name,
        "refresh_id": refresh,
        "usd": usd,
        "provider": "local",
        "cluster": cluster,
    }
    return row | {
        "market": "spot",
        "outcome": "finished",
        "started_at": NOW - ago,
        "ended_at": NOW - ago,
    }


def run(name: str, lease_id: str, workload: str, kind: str = "train") -> dict[str, Any]:
    return {
        "run_id": name,
        "lease_id": lease_id,
        "kind": kind,
        "status": "measured",
        "setup": {"workload": workload, "provider": "local"},
    }


@pytest.fixture
def machines() -> DescribedMachines:
    return DescribedMachines()


@pytest.fixture
def here(tmp_path: Path, machines: DescribedMachines, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = install(tmp_path, provider=machines)
    monkeypatch.setattr(spend, "open_workspace", lambda provider: made)
    with made.warehouse.transact() as connection:
        leases = [
            lease("a", "r", 0.4, 10 * DAY),
            lease("b", "s", 0.2, DAY, "1xs.small+1xs.whole"),
            lease("c", "s", None, 40 * DAY, "1xs.whole"),
        ]
        append(connection, "raw_leases", leases)
        records = [
            run("1", "a", "mlp"),
            run("2", "a", "mlp"),
            run("3", "a", "lm"),
            run("4", "b", "", "probe"),
        ]
        records += [run("5", "a", "mlp", "learn"), run("6", "b", "lm", "elastic")]
        append_records(connection, records, refresh_id="r", loaded_at=NOW)
    return made


def dollars(found: dict[str, Any]) -> dict[str, float | None]:
    return {row["of"]: row["usd"] for row in found["rows"]}


def test_a_lease_is_shared_by_its_runs_and_each_way_of_adding_up_gives_the_same_sum(
    here: Workspace,
) -> None:
    found = {by: spend.spend_of("local", by, days=30) for by in spend.BY}
    assert {by: pytest.approx(0.6) for by in spend.BY} == {
        by: one["total"]["usd"] for by, one in found.items()
    }
    assert dollars(found["workload"]) == pytest.approx({"mlp": 0.3, "lm": 0.2, "": 0.1})
    assert dollars(found["campaign"]) == pytest.approx({"r": 0.4, "s": 0.2})
    assert dollars(found["type"]) == pytest.approx({"s.small": 0.4, "s.small+s.whole": 0.2})
    assert dollars(found["day"]) == pytest.approx(
        {f"{NOW - 10 * DAY:%Y-%m-%d}": 0.4, f"{NOW - DAY:%Y-%m-%d}": 0.2}
    )
    assert found["workload"]["total"] == {"leases": 2, "runs": 6, "usd": pytest.approx(0.6)}


def test_an_unknown_price_makes_a_sum_unknown_and_days_leave_it_out(
    here: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    found = spend.spend_of("local", "campaign")
    assert found["total"]["usd"] is None and dollars(found)["s"] is None
    print_spend(found)
    assert "unknown" in capsys.readouterr().out
    assert spend.spend_of("local", "type", days=5)["total"]["usd"] == pytest.approx(0.2)


def test_what_is_held_may_cost_its_deadline_and_what_cannot_be_read_is_said(
    here: Workspace, machines: DescribedMachines, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    held = Lease(lease_id="h", provider="local", cluster="1xs.small", usd_per_hour=0.5,
                 started_at=now - timedelta(hours=1), deadline_at=now + timedelta(hours=1),
                 controller_pid=1, controller_alive=True)  # fmt: skip
    machines.held = [
        held,
        replace(held, lease_id="odd", usd_per_hour=None, problem="lease.json: unreadable"),
    ]
    found = spend.spend_of("local", "day", days=1)
    assert [
        (one["lease_id"], round(one["usd_so_far"], 2), one["usd_at_deadline"])
        for one in found["held"]
    ] == [("h", 0.5, pytest.approx(1.0))]
    print_spend(found)
    shown = capsys.readouterr().out
    assert "$0.5000 so far, $1.0000 at most" in shown and "what it costs is not known" in shown
    assert "no machine is held" not in shown and "nothing was spent" in shown

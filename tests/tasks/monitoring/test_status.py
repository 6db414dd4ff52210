"""What status says of leases, of the table's age, and of what a person should do about it."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks.monitoring import status
from tasks.providers.base import EndedLease, Lease
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.recommend import recommend_all
from tasks.reporting.tables import print_status
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, install, measured

HOUR = timedelta(hours=1)


def lease(name: str, *, alive: bool, usd_per_hour: float | None = 0.5) -> Lease:
    now = datetime.now(UTC)
    return Lease(
        lease_id=name,
        provider="local",
        cluster="2xs.small",
        usd_per_hour=usd_per_hour,
        started_at=now - 2 * HOUR,
        deadline_at=now + HOUR,
        controller_pid=1,
        controller_alive=alive,
    )


def publish(here: Workspace, at: datetime) -> None:
    rows = recommend_all(here, None, here.provider.offers(at), measured().runs)
    store_publication(here, rows, None, f"refresh-{at:%d%H}", at)
    export_copies(here)


@pytest.fixture
def machines() -> DescribedMachines:
    return DescribedMachines()


@pytest.fixture
def here(tmp_path: Path, machines: DescribedMachines, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = install(tmp_path, provider=machines)
    monkeypatch.setattr(status, "open_workspace", lambda provider: made)
    return made


def found(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    current = status.status_of("local")
    print_status(current)
    return current, capsys.readouterr().out


def test_leases_say_what_they_cost_so_far_and_who_lost_their_controller(
    here: Workspace, machines: DescribedMachines, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.held = [lease("good", alive=True), lease("lost", alive=False, usd_per_hour=None)]
    current, shown = found(capsys)
    assert current["leases"][0]["usd_so_far"] == pytest.approx(1.0, abs=0.01)
    assert current["leases"][1]["usd_so_far"] is None
    assert (
        "lease good: 2xs.small, $1.0" in shown
        and "lease lost: 2xs.small, at an unknown price" in shown
    )
    assert "lease lost has lost its controller: run `srift reap`" in shown
    assert "lease good has lost" not in shown
    machines.held = [
        replace(
            lease("r-1", alive=True, usd_per_hour=None),
            cluster="",
            problem="lease.json: unreadable",
        )
    ]
    body, shown = found(capsys)
    assert "lease r-1: lease.json: unreadable" in body["stale"] and not any(
        "reap" in one for one in body["stale"]
    )
    assert shown.count("lease r-1: lease.json: unreadable") == shown.count("lease r-1:") == 1
    assert "unknown price" not in shown and "no machine is held" not in shown


def test_ended_leases_wait_for_reap_unless_a_refresh_is_at_work(
    here: Workspace, machines: DescribedMachines, tmp_path: Path
) -> None:
    over = EndedLease(
        lease_id="L",
        cluster="1xs.small",
        market="spot",
        started_at=NOON,
        ended_at=NOON,
        usd=None,
        outcome="reaped",
        mailbox=tmp_path,
    )
    machines.over = [over, over]
    assert (
        "2 ended leases wait to be loaded: run `srift reap`" in status.status_of("local")["stale"]
    )
    with (here.home / "refresh.json").open("w") as file:
        json.dump({"refresh_id": "r-1", "pid": 77, "started_at": "noon"}, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        current = status.status_of("local")
        assert current["at_work"]["refresh_id"] == "r-1"
        assert not [sentence for sentence in current["stale"] if "ended leases" in sentence]
    assert status.status_of("local")["at_work"] is None, "the file of one that is gone was believed"


def test_an_old_table_and_a_missing_workload_are_stale(
    tmp_path: Path,
    here: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(here, datetime.now(UTC) - 72 * HOUR)
    current, _ = found(capsys)
    assert current["published"]["published_at_h_ago"] == pytest.approx(72, abs=0.1)
    assert "the published table is 3.0 days old: run `srift refresh`" in current["stale"]
    publish(here, datetime.now(UTC) - HOUR)
    current, shown = found(capsys)
    assert not [
        sentence for sentence in current["stale"] if sentence.startswith("the published table")
    ]
    assert "published: 8 rows, 1.0 h ago" in shown
    more = here.settings.model_copy(
        update={"workloads": {**here.settings.workloads, "added": None}}
    )
    added = Workspace(settings=more, warehouse=here.warehouse, provider=here.provider)
    monkeypatch.setattr(status, "open_workspace", lambda provider: added)
    assert (
        "workload added is not in the published table: run `srift refresh`"
        in status.status_of("local")["stale"]
    )

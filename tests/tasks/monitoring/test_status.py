"""What `srift status` and `srift spend` say of leases, dollars and ages."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tasks.monitoring import spend, status
from tasks.providers.base import Lease
from tasks.recommendation.publication import export_copies, store_publication
from tasks.reporting.tables import print_spend, print_status
from tests.installed import DescribedMachines, install
from tests.warehouse.builders import lease, load, recommendation, write
from warehouse.append import append

NOW = datetime.now(UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
HELD = Lease(
    lease_id="held",
    cluster="2xs.small",
    market="spot",
    usd_per_hour=0.5,
    started_at=NOW - 2 * HOUR,
    deadline_at=NOW + HOUR,
    controller=1,
)
LOST = replace(HELD, lease_id="lost", controller_alive=False, usd_per_hour=None)
ODD = replace(HELD, lease_id="odd", cluster="", usd_per_hour=None, problem="lease.json: unreadable")


@pytest.fixture
def machines():
    return DescribedMachines()


@pytest.fixture
def here(tmp_path, machines, monkeypatch):
    made = install(tmp_path, provider=machines)
    for module in (status, spend):
        monkeypatch.setattr(module, "open_workspace", lambda provider: made)
    return made


def test_leases_have_their_dollars_and_lost_ones_are_named(here, machines):
    held = replace(HELD, started_at=datetime.now(UTC) - 2 * HOUR)
    machines.held = [held, LOST, ODD]
    found = status.status_of("local")
    assert found["leases"][0]["usd_so_far"] == pytest.approx(1.0, abs=0.01)
    assert found["leases"][1]["usd_so_far"] is None
    named = [line for line in found["stale"] if "lost" in line or "odd" in line]
    assert len(named) == 2 and "srift reap" in named[0]
    print_status(found)


def test_ended_leases_wait_for_reap_unless_a_refresh_is_at_work(
    here, machines, tmp_path, monkeypatch
):
    machines.over = [replace(HELD, lease_id="L", ended_at=NOW, mailbox=tmp_path)]
    assert any("srift reap" in line for line in status.status_of("local")["stale"])
    working = {"refresh_id": "r", "pid": 7, "started_at": "now"}
    monkeypatch.setattr(status, "at_work", lambda home: working)
    found = status.status_of("local")
    assert found["at_work"] == working and not any("reap" in line for line in found["stale"])


def publish(here, at, **changes):
    ages = {"price_as_of": at, "newest_measurement_at": at}
    store_publication(here, [recommendation(**ages | changes)], None, f"refresh-{at:%d%H}", at)
    export_copies(here)


def test_the_table_is_stale_when_it_is_old_or_lacks_a_workload(here):
    assert status.status_of("local")["published"] is None
    publish(here, datetime.now(UTC) - 3 * DAY, reason="cheap; caution: doubtful")
    found = status.status_of("local")
    published = found["published"]
    assert published["published_at_h_ago"] == pytest.approx(72, abs=0.1)
    assert published["rows"] == 1 and published["model_version"] is None
    assert sum("3.0 days old" in line for line in found["stale"]) == 3
    assert "doubtful" in found["stale"] and found["report_page"] == str(here.report_page)
    publish(here, NOW)
    fresh = status.status_of("local")["stale"]
    assert not any("days old" in line for line in fresh)
    assert sum("not in the published table" in line for line in fresh) == len(here.workloads)


def run(name, lease_id, workload, kind="train"):
    of = {"workload": workload, "provider": "local"}
    return {"run_id": name, "lease_id": lease_id, "kind": kind, "status": "measured", "setup": of}


def test_each_way_of_adding_up_dollars_gives_the_same_sum_and_an_unknown_price_none(here, machines):
    leases = [
        lease(NOW - 10 * DAY, lease_id="a", usd=0.4, cluster="2xs.small"),
        lease(NOW - DAY, lease_id="b", usd=0.2, cluster="1xs.small+1xs.whole"),
        lease(NOW - 40 * DAY, lease_id="c", usd=None),
    ]
    write(here.warehouse, append, "raw_leases", leases)
    runs = (run("1", "a", "mlp"), run("2", "a", "lm"), run("3", "b", "", "probe"))
    load(here.warehouse, *runs, at=NOW)

    def dollars(by):
        return {row["of"]: row["usd"] for row in spend.spend_of("local", by, days=30)["rows"]}

    assert spend.spend_of("local", "day", days=10**9)["total"]["usd"] is None
    assert dollars("workload") == pytest.approx({"mlp": 0.2, "lm": 0.2, "": 0.2})
    assert dollars("type") == pytest.approx({"s.small": 0.4, "s.small+s.whole": 0.2})
    assert sorted(dollars("day").values()) == pytest.approx([0.2, 0.4])
    machines.held = [HELD, ODD]
    found = spend.spend_of("local", "campaign")
    assert found["total"]["usd"] is None and len(found["unreadable"]) == 1
    assert [row["usd_at_deadline"] for row in found["held"]] == [pytest.approx(1.5)]
    print_spend(found)

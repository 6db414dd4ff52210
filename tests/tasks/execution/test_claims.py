"""What campaigns of a team's machines may still spend of the month, as each of them sees it."""

import importlib
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from socket import gethostname
from types import SimpleNamespace

import pytest

from tasks.campaign.spending import Tally, caps_of
from tasks.execution.claims import claim, settle
from tasks.execution.collect import end_and_collect
from tasks.providers.base import NotSwept
from tasks.workspace.locking import refresh_lock
from tests.installed import NOON, DescribedMachines, changed, install
from tests.warehouse.builders import lease, write
from warehouse.append import append
from warehouse.database import WarehouseBusy


@pytest.fixture
def team(tmp_path):
    """Homes of three machines that share a warehouse, here a file, and 10 dollars a month."""
    homes = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        here = install(tmp_path / str(number), provider=DescribedMachines(name="ec2"))
        here = changed(here, "shared", host="db.example.org", data=str(tmp_path))
        here = changed(here, "ec2", max_usd_per_month=10.0, max_minutes=5.0)
        homes.append(replace(here, warehouse=(homes or [here])[0].warehouse))
    return homes


@pytest.fixture
def claimed(team):
    """The first home has claimed 6 dollars; with another home."""
    claim(team[0], "r-1", 6.0, NOON)
    return team[:2]


def month_of(here, refresh_id, now=NOON):
    """Return the month's cap as a launch of campaign `refresh_id` sees it."""
    tally = Tally(cap_usd=99.0, stop_at=time.monotonic(), refresh_id=refresh_id)
    (_, month), unknown = caps_of(here, tally, now, [])
    assert unknown == ""
    return month


def left(here, now=NOON):
    """Return dollars of the month for a campaign of `here` that has claimed nothing yet."""
    return month_of(here, "new", now).left_usd


def test_a_later_claim_leaves_to_earlier_ones_what_they_claimed(team):
    first, second, third = team
    claim(first, "r-1", 6.0, NOON)
    assert left(first) == 10.0
    claim(second, "r-2", 3.0, NOON)
    month = month_of(second, "r-2")
    assert month_of(first, "r-1").left_usd == 10.0 and month.left_usd == 4.0
    assert left(third) == 1.0
    assert f"6.00 claimed by refresh r-1 of {gethostname()}:{first.home}" in str(month)


def test_what_a_campaign_has_cost_is_spent_and_no_longer_claimed(claimed):
    here, other = claimed
    row = lease(lease_id="r-1-00", refresh_id="r-1", provider="ec2", usd=2.5)
    write(here.warehouse, append, "raw_leases", [row])
    month = month_of(other, "new")
    assert (month.spent_usd, month.claimed_usd) == (2.5, 3.5)
    settle(here, NOON)
    assert left(other) == pytest.approx(7.5)


def test_a_claim_is_settled_by_its_home_once_no_lease_is_left(claimed):
    here, other = claimed
    lease = SimpleNamespace(lease_id="r-1-00")
    settle(other, NOON)
    for here.provider.held, here.provider.over in (([lease], []), ([], [lease])):
        settle(here, NOON)
    here.provider.over = []
    with refresh_lock(here.home, "r-1"):
        settle(here, NOON)
        assert left(other) == 4.0
        settle(here, NOON, over="r-1")
    assert left(other) == 10.0
    settle(here, NOON)
    claim(here, "r-10", 6.0, NOON)
    here.provider.held = [lease]
    settle(here, NOON)
    assert left(other) == 10.0


def settles_later(here, other, monkeypatch, *change):
    """With the change nothing is settled, and without it everything."""
    with monkeypatch.context() as patched:
        patched.setattr(*change)
        settle(here, NOON)
    assert left(other) == 4.0
    settle(here, NOON)
    assert left(other) == 10.0


def test_a_warehouse_that_does_not_answer_delays_a_settlement_only(claimed, monkeypatch):
    def busy(*_):
        raise WarehouseBusy("another's turn")

    settles_later(*claimed, monkeypatch, type(claimed[0].warehouse), "transact", busy)


def test_a_claim_of_a_home_that_never_comes_back_counts_in_its_month(team):
    here, other, _ = team
    november = datetime(2026, 11, 1, tzinfo=UTC)
    hour = timedelta(hours=1)
    claim(here, "r-1", 6.0, november - 4 * hour)  # ends in October
    claim(here, "r-2", 3.0, november - hour)  # may reach into November
    assert left(other, november - hour / 2) == 1.0
    assert left(other, november + hour / 2) == 7.0
    assert left(other, november + 30 * 24 * hour) == 10.0


def test_a_campaign_that_begins_while_others_are_settled_keeps_its_claim(team, monkeypatch):
    here, other, _ = team
    begin = lambda _: claim(here, "r-1", 6.0, NOON)  # noqa: E731
    settles_later(here, other, monkeypatch, "tasks.execution.claims.at_work", begin)


def test_a_campaign_settles_its_own_claim_and_the_reaper_all_if_it_could_look_everywhere(claimed):
    here, other = claimed
    claim(here, "r-2", 3.0, NOON)
    settle(here, NOON, over="r-2")
    assert left(other) == 4.0
    here.provider.unswept = {"eu-west-1": "it does not answer"}
    with pytest.raises(NotSwept):
        end_and_collect(here, NOON)
    assert left(other) == 4.0
    here.provider.unswept = {}
    end_and_collect(here, NOON)
    assert left(other) == 10.0


def test_a_campaign_claims_before_its_first_launch_and_settles_however_it_ends(team, monkeypatch):
    here, other, _ = team
    flow = importlib.import_module("flows.measure")
    seen = []

    def launches(*_):
        seen.append(left(other))
        if len(seen) == 2:
            raise RuntimeError
        yield from ()

    monkeypatch.setattr(flow, "within", launches)
    monkeypatch.setattr(flow, "open_workspace", lambda _: here)
    for name in ("load_champion", "money_short"):
        monkeypatch.setattr(flow, name, lambda *_: None)
    flow.measure.fn("r-1", "ec2", 6.0)
    assert left(other, datetime.now(UTC)) == 10.0
    with pytest.raises(RuntimeError):
        flow.measure.fn("r-2", "ec2", 6.0)
    assert left(other, datetime.now(UTC)) == 10.0
    flow.measure.fn("r-3", "ec2", 0.0)
    assert seen == [4.0, 4.0, 10.0]

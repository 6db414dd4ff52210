"""What campaigns of a team's machines may still spend of the month, as each of them sees it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from models.campaign.budget import Cap
from models.domain.cluster import Cluster
from tasks.campaign.budget import Tally, caps_of
from tasks.execution.claims import claim, settle
from tasks.execution.collect import end_and_collect
from tasks.providers.base import EndedLease, Lease, NotSwept
from tasks.workspace.locking import refresh_lock
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, install
from warehouse.append import append
from warehouse.database import WarehouseBusy

MONTH = NOON.replace(day=1, hour=0, minute=0)


def team(
    folder: Path, provider: str = "ec2", host: str = "db.example.org", count: int = 2
) -> list[Workspace]:
    """Homes of machines that share a warehouse (the first one's file stands for it) and 10 dollars
    a month.
    """
    homes: list[Workspace] = []
    for number in range(count):
        (folder / str(number)).mkdir()
        one = install(folder / str(number), provider=DescribedMachines(name=provider))
        shared = one.settings.shared.model_copy(update={"host": host, "data": str(folder)})
        ec2 = one.settings.ec2.model_copy(update={"max_usd_per_month": 10.0, "max_minutes": 5.0})
        settings = one.settings.model_copy(update={"shared": shared, "ec2": ec2})
        homes.append(
            replace(
                one, settings=settings, warehouse=homes[0].warehouse if homes else one.warehouse
            )
        )
    return homes


def month_of(here: Workspace, refresh_id: str = "new", now: datetime = NOON) -> Cap:
    """What a launch of campaign `refresh_id` of `here` may cost under the month's cap."""
    (_, month), unknown = caps_of(
        here, Tally(cap_usd=99.0, stop_at=time.monotonic(), refresh_id=refresh_id), now, []
    )
    assert unknown == ""
    return month


def left(here: Workspace, now: datetime = NOON) -> float:
    """Dollars of the month that a campaign of `here` which has claimed nothing yet may cost."""
    return month_of(here, now=now).left_usd


def load(here: Workspace, refresh_id: str, usd: float) -> None:
    """A lease of the campaign is in the ledger."""
    row = {
        "lease_id": f"{refresh_id}-00",
        "provider": "ec2",
        "cluster": "1xs.large",
        "market": "spot",
        "usd": usd,
    }
    times = {"started_at": NOON, "ended_at": NOON, "refresh_id": refresh_id, "outcome": "released"}
    with here.warehouse.transact() as connection:
        append(connection, "raw_leases", [row | times])


def lease(lease_id: str, **changes: Any) -> Lease:
    words = {
        "lease_id": lease_id,
        "provider": "ec2",
        "cluster": "1xs.large",
        "controller_pid": 1,
        "usd_per_hour": 0.1,
    }
    times = {
        "started_at": NOON,
        "deadline_at": NOON + timedelta(minutes=1),
        "controller_alive": False,
    }
    return Lease(**words | times | changes)  # type: ignore[arg-type]


def over(lease_id: str, folder: Path) -> EndedLease:
    return EndedLease(
        lease_id=lease_id,
        cluster="1xs.large",
        market="spot",
        started_at=NOON,
        ended_at=NOON,
        usd=0.5,
        outcome="released",
        mailbox=folder,
    )


def test_who_claims_later_leaves_to_who_claimed_before_and_not_the_other_way_round(
    tmp_path: Path,
) -> None:
    one, other, third = team(tmp_path, count=3)
    claim(one, "r-1", 6.0, NOON)
    assert left(one) == 10.0
    claim(other, "r-2", 3.0, NOON)
    assert month_of(one, "r-1").left_usd == 10.0 and month_of(other, "r-2").left_usd == 4.0
    assert left(third) == 1.0
    said = str(month_of(other, "r-2"))
    assert said.endswith(
        f"(0.00 spent, 0.00 committed, 6.00 claimed by refresh r-1 of {gethostname()}:{one.home})"
    )
    assert "claimed" not in str(month_of(one, "r-1"))


def test_what_a_campaign_has_cost_is_spent_and_no_longer_claimed(tmp_path: Path) -> None:
    one, other = team(tmp_path)
    claim(one, "r-1", 6.0, NOON)
    load(one, "r-1", 2.5)
    month = month_of(other)
    assert (month.spent_usd, month.claimed_usd) == (2.5, 3.5)
    settle(one, NOON)
    assert left(other) == pytest.approx(7.5)


def test_a_claim_is_settled_by_its_own_home_once_nothing_of_it_is_held_or_waits(
    tmp_path: Path,
) -> None:
    one, other = team(tmp_path)
    machines = one.provider
    assert isinstance(machines, DescribedMachines)
    claim(one, "r-1", 6.0, NOON)
    settle(other, NOON)
    machines.held = [lease("r-1-00")]
    settle(one, NOON)
    machines.held, machines.over = [], [over("r-1-00", tmp_path)]
    settle(one, NOON)
    machines.over = []
    with refresh_lock(one.home, "r-1"):
        settle(one, NOON)
        assert left(other) == 4.0
        settle(one, NOON, over="r-1")
    assert left(other) == 10.0
    settle(one, NOON)
    claim(one, "r-10", 6.0, NOON)
    machines.held = [lease("r-1-00")]
    settle(one, NOON)
    assert left(other) == 10.0


def test_where_the_warehouse_does_not_answer_what_was_measured_is_not_lost_for_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = team(tmp_path)
    claim(one, "r-1", 6.0, NOON)

    def busy(*_: object) -> None:
        raise WarehouseBusy("another's turn")

    monkeypatch.setattr(type(one.warehouse), "transact", busy)
    settle(one, NOON)
    assert "another's turn" in capsys.readouterr().err
    monkeypatch.undo()
    assert left(other) == 4.0
    settle(one, NOON)
    assert left(other) == 10.0


def test_a_claim_of_a_home_that_never_comes_back_counts_in_its_month(tmp_path: Path) -> None:
    one, other = team(tmp_path)
    claim(
        one, "r-1", 6.0, datetime(2026, 10, 31, 20, 0, tzinfo=UTC)
    )  # of 5 minutes, which end in October
    claim(
        one, "r-2", 3.0, datetime(2026, 10, 31, 23, 0, tzinfo=UTC)
    )  # and may cost something in November
    assert left(other, datetime(2026, 10, 31, 23, 30, tzinfo=UTC)) == 1.0
    assert left(other, datetime(2026, 11, 1, 0, 30, tzinfo=UTC)) == 7.0
    assert left(other, datetime(2026, 12, 1, 0, 30, tzinfo=UTC)) == 10.0


def test_a_campaign_that_begins_while_others_are_settled_keeps_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = team(tmp_path)

    def nobody_yet(_: Path) -> None:
        claim(one, "r-1", 6.0, NOON)

    monkeypatch.setattr("tasks.execution.claims.at_work", nobody_yet)
    settle(one, NOON)
    monkeypatch.undo()
    assert left(other) == 4.0
    settle(one, NOON)
    assert left(other) == 10.0


def test_what_is_over_settles_no_other_claim_of_its_home(tmp_path: Path) -> None:
    """The reaper may know why that one stays: where it could not look everywhere."""
    one, other = team(tmp_path)
    claim(one, "r-1", 6.0, NOON)
    claim(one, "r-2", 3.0, NOON)
    settle(one, NOON, over="r-2")
    assert left(other) == 4.0


def test_the_reaper_settles_what_a_killed_campaign_claimed_where_it_could_look_everywhere(
    tmp_path: Path,
) -> None:
    one, other = team(tmp_path)
    machines = one.provider
    assert isinstance(machines, DescribedMachines)
    claim(one, "r-1", 6.0, NOON)
    machines.unswept = {"eu-west-1": "it does not answer"}
    with pytest.raises(NotSwept):
        end_and_collect(one, NOON)
    assert left(other) == 4.0
    machines.unswept = {}
    end_and_collect(one, NOON)
    assert left(other) == 10.0


def test_a_campaign_claims_before_it_asks_what_is_left_and_settles_once_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = importlib.import_module("flows.measure")
    one, other = team(tmp_path)
    seen: list[float] = []

    def launches(workspace: Workspace, *_: object) -> list[Cluster]:
        def within() -> Any:
            seen.append(left(other))
            yield from ()

        return within()

    for name, what in {
        "within": launches,
        "with_requirements_installed": lambda here: here,
    }.items():
        monkeypatch.setattr(flow, name, what)
    monkeypatch.setattr(flow, "open_workspace", lambda _: one)
    monkeypatch.setattr(flow, "load_champion", lambda *_: None)
    monkeypatch.setattr(flow, "_warn_of_money", lambda *_: None)
    flow.measure.fn("r-1", "ec2", 6.0)
    assert seen == [4.0] and left(other, datetime.now(UTC)) == 10.0
    flow.measure.fn("r-2", "ec2", 0.0)
    assert seen == [4.0, 10.0]

    def failing(*_: object) -> Iterator[Cluster]:
        raise RuntimeError("no launch was made")
        yield

    monkeypatch.setattr(flow, "within", failing)
    with pytest.raises(RuntimeError, match="no launch"):
        flow.measure.fn("r-3", "ec2", 6.0)
    assert left(other, datetime.now(UTC)) == 10.0

"""Whom the reaper ends on EC2, in which regions, and what is brought home of the dead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models.cloud import Cluster
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, SILENT, FakeAws, Fault, Killed


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def left_running(home: Home, lease_id: str = "r-1", region: str = "us-east-1") -> None:
    """A controller that is killed while its machines run."""
    cluster = Cluster.of((2, home.offer(zone=f"{region}a")))
    with pytest.raises(Killed), home.acquire(cluster, lease_id):
        home.world.faults = [Fault(action="", code=KILLED)]
    home.world.faults = []
    home.die()


def test_a_lease_without_its_controller_is_ended_and_its_records_fetched(home: Home) -> None:
    left_running(home)
    assert len(home.world.alive()) == 2
    home.world.s3.upload(home.world.now, "r-1", home.world.alive()[1].instance_id, "records/a.json", {"run_id": "a"})
    [sentence] = home.provider.reap(home.world.now)
    assert "r-1 (2xg4dn.12xlarge): its controller (process" in sentence and "2 machines in us-east-1" in sentence
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert ended.outcome == "reaped" and home.records() == {"a"}
    assert home.provider.reap(home.world.now) == []


def test_a_lease_that_is_looked_after_is_left_alone(home: Home) -> None:
    with home.acquire(home.two()):
        assert home.provider.reap(home.world.now) == [] and len(home.world.alive()) == 2
        assert len(home.provider.reap(home.world.now, all_of_them=True)) == 1 and home.world.alive() == []


def test_two_regions_are_looked_through_whoever_launched(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-1", "us-east-1")
    left_running(other, "o-2", "eu-west-1")
    for one in home.world.alive():
        one.deaf = True
    assert home.provider.reap(home.world.now) == [], "not past their deadline, and of another home"
    home.world.pass_s(2000)
    sentences = home.provider.reap(home.world.now)
    assert len(sentences) == 4 and sum("eu-west-1" in one for one in sentences) == 2
    assert all("its deadline was" in one for one in sentences) and home.world.alive() == []
    assert home.world.account.groups == {} and home.world.account.placements == {}


def test_machines_of_others_and_without_our_tag_are_none_of_ours(home: Home, tmp_path: Path) -> None:
    choices = home.choices.model_copy(update={"deployment": "theirs"})
    theirs = Home(tmp_path / "theirs", home.world, choices)
    left_running(theirs, "t-1")
    for one in home.world.alive():
        one.deaf = True
    home.world.pass_s(9000)
    assert home.provider.reap(home.world.now) == [] and len(home.world.alive()) == 2


def test_a_machine_that_shows_late_is_ended_too(home: Home) -> None:
    home.world.lag_s = 60.0
    cluster = home.two("on-demand")
    home.world.faults = [Fault(action="ec2:RunInstances", code=KILLED, after=True)]
    home.killed_in(cluster)
    [sentence] = home.provider.reap(home.world.now)
    assert "may still have been served" in sentence and len(home.provider.leases()) == 1
    home.world.pass_s(130)
    home.provider.reap(home.world.now)
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert ended.usd is not None and ended.usd > 2 * 3.912 * 120 / 3600, (
        "what was never heard of is paid for all the same"
    )


def test_a_torn_lease_loses_neither_machines_nor_records(home: Home) -> None:
    left_running(home)
    mailbox = home.leases.mailbox("r-1") / "node-0" / "records"
    mailbox.mkdir(parents=True)
    (mailbox / "a.json").write_text("{}")
    (home.leases.directory("r-1") / "lease.json").write_text("")
    sentences = home.provider.reap(home.world.now)
    assert any("moved to" in one for one in sentences) and home.world.alive() == []
    assert (home.path / "rejected" / "r-1" / "node-0" / "records" / "a.json").exists()


def test_a_region_that_does_not_answer_is_said_and_the_other_swept(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-2", "eu-west-1")
    home.world.pass_s(1801)
    for one in home.world.instances.values():
        one.ended_at = None
    home.world.faults = [
        Fault(action="ec2:DescribeInstances", code=SILENT, times=99, when=lambda words: words["region"] == "us-east-1")
    ]
    sentences = home.provider.reap(home.world.now)
    assert any("us-east-1 could not be looked through" in one for one in sentences) and home.world.alive() == []


def test_what_a_dead_controllers_machines_cost_ends_with_them(home: Home) -> None:
    left_running(home)
    home.world.pass_s(9 * 3600)
    assert home.world.alive() == [], "they ended themselves"
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    assert ended.usd == pytest.approx(2 * 1.2 * 1860 / 3600, rel=0.05)


@pytest.mark.parametrize("away_s", [2400.0, 3 * 3600.0], ids=["EC2 still shows them", "EC2 has forgotten them"])
def test_machines_that_were_never_heard_of_and_ended_themselves_are_paid_for(home: Home, away_s: float) -> None:
    cluster = home.two("on-demand")
    home.world.faults = [Fault(action="ec2:RunInstances", code=KILLED, after=True)]
    home.killed_in(cluster)
    home.world.pass_s(away_s)
    if away_s > 3600:
        home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    assert ended.usd is not None and 2 * 3.912 * 1800 / 3600 < ended.usd < 2 * 3.912 * 2200 / 3600


def test_machines_that_ec2_has_forgotten_cost_no_more_than_they_could_live(home: Home) -> None:
    left_running(home)
    home.world.pass_s(9 * 3600)
    home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    assert ended.usd is not None and 2 * 1.2 * 1800 / 3600 < ended.usd < 2 * 1.2 * 2200 / 3600


def test_what_a_machine_uploads_while_it_goes_down_is_fetched(home: Home) -> None:
    left_running(home)
    machine = home.world.alive()[0].instance_id

    def sleep(seconds: float) -> None:
        home.world.pass_s(seconds)
        if home.world.instances[machine].ended_at is not None:
            home.world.s3.upload(home.world.now, "r-1", machine, "records/last.json", {"run_id": "last"})

    home.provider._clock = replace(home.world.clock, sleep=sleep)
    home.provider.reap(home.world.now)
    assert home.records() == {"last"}


def test_without_credentials_or_leases_there_is_nothing_to_say(home: Home) -> None:
    quiet = replace(home.world.clock)
    assert Home(home.path / "x", FakeAws()).provider.reap(quiet.now()) == []

"""What the reaper ends on EC2, in which regions, and what it fetches."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from models.domain.cluster import Cluster
from tasks.providers.base import LeaseUnreadable, NotSwept
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.provider import Ec2Provider
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, SILENT, Fault, Killed
from tests.fake_ec2_account import ON_DEMAND_USD, SPOT_USD

UNKNOWN_KEY = {"of_a_newer_version": 1}


def left_running(
    home: Home, lease_id: str = "r-1", region: str = "us-east-1", *, deaf: bool = False
) -> None:
    """A controller is killed while its machines run; `deaf` ones do not end themselves."""
    cluster = Cluster.of((2, home.offer(zone=f"{region}a")))
    with pytest.raises(Killed), home.acquire(cluster, lease_id):
        home.world.faults = [Fault(action="", code=KILLED)]
    home.world.faults = []
    home.die()
    for machine in home.world.alive():
        machine.deaf = deaf


def killed_unheard(home: Home, market: str = "on-demand") -> None:
    """A controller is killed before it hears which machines it has bought."""
    cluster = home.two(market)
    home.world.faults = [Fault(action="ec2:CreateFleet", code=KILLED, after=True)]
    home.killed_in(cluster)


def chosen(home: Home, **changes: object) -> None:
    """Another controller, after srift.toml was changed."""
    home.choices = home.choices.model_copy(update=changes)
    home.provider = home.controller()


def rewritten(home: Home, **changes: object) -> None:
    """The lease's file with other values; ... removes a key."""
    file = home.leases.directory("r-1") / "lease.json"
    body = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in body.items() if value is not ...}))


def the_second_uploads_a_record(home: Home) -> None:
    machine = home.world.alive()[1].instance_id
    home.upload(machine, "records/a.json", {"run_id": "a"})


def not_swept(home: Home) -> NotSwept:
    with pytest.raises(NotSwept) as raised:
        home.provider.reap(home.world.now)
    return raised.value


def test_a_lease_without_its_controller_is_ended_and_its_records_fetched(home: Home) -> None:
    left_running(home)
    the_second_uploads_a_record(home)
    [sentence] = home.provider.reap(home.world.now)
    assert "r-1 (2xg4dn.12xlarge)" in sentence and "2 machines in us-east-1" in sentence
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert ended.outcome == "reaped" and home.records() == {"a"}
    assert home.provider.reap(home.world.now) == []


def test_a_lease_with_its_controller_is_left_alone(home: Home) -> None:
    with home.acquire(home.two()):
        assert home.provider.reap(home.world.now) == [] and len(home.world.alive()) == 2
        assert len(home.provider.reap(home.world.now, all_of_them=True)) == 1
        assert home.world.alive() == []


def test_every_region_is_swept_whoever_launched(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-1", deaf=True)
    left_running(other, "o-2", "eu-west-1", deaf=True)
    assert home.provider.reap(home.world.now) == []
    home.world.pass_s(2000)
    sentences = home.provider.reap(home.world.now)
    assert len(sentences) == 4 and sum("eu-west-1" in one for one in sentences) == 2
    assert home.world.alive() == []
    assert home.world.account.groups == {} and home.world.account.placements == {}


def test_machines_of_another_deployment_are_left_alone(home: Home, tmp_path: Path) -> None:
    choices = home.choices.model_copy(update={"deployment": "theirs"})
    theirs = Home(tmp_path / "theirs", home.world, choices)
    left_running(theirs, "t-1", deaf=True)
    home.world.pass_s(9000)
    assert home.provider.reap(home.world.now) == [] and len(home.world.alive()) == 2


def test_a_machine_that_shows_late_is_ended_and_paid_for(home: Home) -> None:
    home.world.lag_s = 60.0
    killed_unheard(home)
    assert len(home.provider.reap(home.world.now)) == 1 and len(home.provider.leases()) == 1
    home.world.pass_s(400)
    home.provider.reap(home.world.now)
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert ended.usd is not None and ended.usd > 2 * ON_DEMAND_USD * 390 / 3600


def test_a_directory_without_a_lease_loses_neither_machines_nor_records(home: Home) -> None:
    left_running(home)
    mailbox = home.leases.mailbox("r-1") / "node-0" / "records"
    mailbox.mkdir(parents=True)
    (mailbox / "a.json").write_text("{}")
    (home.leases.directory("r-1") / "lease.json").unlink()
    home.provider.reap(home.world.now)
    assert home.world.alive() == []
    assert (home.path / "rejected" / "r-1" / "node-0" / "records" / "a.json").exists()


def test_machines_of_an_unreadable_lease_live_on_and_nothing_is_bought_beside_it(
    home: Home,
) -> None:
    with home.acquire(home.two()):
        rewritten(home, **UNKNOWN_KEY)
        error = not_swept(home)
        assert list(error.unswept) == ["lease r-1"]
        assert len(home.world.alive()) == 2 and home.leases.ids() == ["r-1"]
        [held] = home.provider.leases()
        assert held.usd_per_hour is None and held.problem
        with pytest.raises(LeaseUnreadable):
            home.provider.closed()
        with pytest.raises(LeaseUnreadable), home.acquire(home.two(), "r-2"):
            pytest.fail("machines were bought")
        assert home.world.bought() == 2 and home.provider.ended() == []
    assert home.world.alive() == []


WRONG: dict[str, dict[str, object]] = {
    "no deadline": {"deadline_at": None},
    "a moment without a zone": {"started_at": "2026-11-20T00:00:00"},
    "a deployment that is a number": {"deployment": 5},
    "a price without end": {"usd_per_hour": float("inf")},
    "an empty region": {"region": ""},
    "no region": {"region": ...},
    "a machine without a name": {"machines": [{"rank": 0}]},
    "half a controller": {"controller": {"pid": "x"}},
    "a word for true": {"releasing": "no"},
    "another lease": {"lease_id": "r-9"},
}


def test_a_lease_with_a_wrong_value_ends_neither_its_machines_nor_the_reaping(home: Home) -> None:
    before = home.world.now
    with home.acquire(home.two()):
        file = home.leases.directory("r-1") / "lease.json"
        right = file.read_text()
        for how, changes in WRONG.items():
            file.write_text(right)
            rewritten(home, **changes)
            assert list(not_swept(home).unswept) == ["lease r-1"], how
            assert len(home.world.alive()) == 2 and home.provider.not_swept_since(before) == []
            assert home.provider.leases()[0].problem and home.provider.ended() == []
        file.write_text(right)


def test_the_deadline_ends_machines_of_an_unreadable_lease(home: Home) -> None:
    home.provider.reap(home.world.now)
    left_running(home, region="eu-west-1", deaf=True)
    rewritten(home, **UNKNOWN_KEY)
    chosen(home, regions=("us-east-1",), deployment="another")
    assert not_swept(home).done == [] and len(home.world.alive()) == 2
    home.world.pass_s(2000)
    assert len(not_swept(home).done) == 2
    assert home.world.alive() == [] and home.leases.ids() == ["r-1"]


def test_a_new_deployment_bucket_or_prefix_hides_no_machine_and_no_record(home: Home) -> None:
    left_running(home)
    the_second_uploads_a_record(home)
    chosen(home, deployment="another", bucket="another", prefix="another")
    home.provider.reap(home.world.now)
    assert home.world.alive() == [] and home.records() == {"a"}
    assert home.world.account.groups == {} and home.world.account.placements == {}


def moved_away(home: Home) -> None:
    """A lease of eu-west-1 is moved away, and srift.toml names another region and deployment."""
    home.provider.reap(home.world.now)  # nothing is bought in a region that was not swept
    left_running(home, region="eu-west-1", deaf=True)
    home.leases.directory("r-1").rename(home.path / "given-up")
    chosen(home, regions=("us-east-1",), deployment="another")


def test_a_region_that_srift_toml_no_longer_names_is_swept_for_thirty_days(home: Home) -> None:
    moved_away(home)
    assert len(home.provider.reap(home.world.now)) == 2 and home.world.alive() == []
    refused = Fault(action="", code="ExpiredToken", times=999)
    refused.when = lambda words: words["region"] == "eu-west-1"
    home.world.faults = [refused]
    assert list(not_swept(home).unswept) == ["eu-west-1"]
    home.world.pass_s(31 * 86400)
    assert home.provider.reap(home.world.now) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eu-west-1": 5}', '{"../x": "2026-11-20T12:00:00Z"}']
)
def test_unknown_regions_are_no_all_clear(home: Home, text: str) -> None:
    moved_away(home)
    home.leases.swept_file.write_text(text)
    assert list(not_swept(home).unswept) == ["other regions"]
    assert home.provider.not_swept_since(home.world.now) == ["us-east-1"]
    assert home.leases.swept_file.read_text() == text


def stay_on(home: Home) -> None:
    """The deadline passes, and no machine ends."""
    home.world.pass_s(1801)
    for machine in home.world.instances.values():
        machine.ended_at = None


def test_a_region_that_does_not_answer_fails_the_reaping_after_the_others(
    home: Home, tmp_path: Path
) -> None:
    left_running(Home(tmp_path / "other", home.world), "o-2", "eu-west-1", deaf=True)
    home.world.pass_s(1801)
    home.world.faults = [
        Fault(
            action="ec2:DescribeInstances",
            code=SILENT,
            times=99,
            when=lambda words: words["region"] == "us-east-1",
        )
    ]
    error = not_swept(home)
    assert list(error.unswept) == ["us-east-1"]
    assert len(error.done) == 2 and home.world.alive() == []
    before = home.world.now - timedelta(minutes=5)
    assert home.provider.not_swept_since(before) == ["us-east-1"]
    home.world.faults = []
    home.provider.reap(home.world.now)
    assert home.controller().not_swept_since(before) == []


@pytest.mark.parametrize("code", ["ExpiredToken", "UnauthorizedOperation"])
def test_a_session_that_expired_or_may_not_look_is_no_all_clear(home: Home, code: str) -> None:
    left_running(home)
    stay_on(home)
    home.world.faults = [Fault(action="", code=code, times=999)]
    error = not_swept(home)
    assert {*error.unswept} == {"lease r-1", "us-east-1", "eu-west-1"}
    assert code in error.unswept["eu-west-1"]
    assert home.provider.not_swept_since(home.world.now) == ["us-east-1", "eu-west-1"]


def test_a_machine_that_does_not_end_is_no_all_clear(home: Home, tmp_path: Path) -> None:
    left_running(Home(tmp_path / "other", home.world), "o-1", deaf=True)
    home.world.pass_s(2000)
    before = home.world.now
    home.world.faults = [Fault(action="ec2:TerminateInstances", code="AccessDenied", times=99)]
    assert "ec2:TerminateInstances" in not_swept(home).unswept["us-east-1"]
    home.world.faults, home.world.immortal = [], True
    error = not_swept(home)
    assert "us-east-1" in error.unswept and len(error.done) == 2
    assert home.provider.not_swept_since(before) == ["us-east-1"]


def test_without_credentials_no_region_is_called_empty(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    blind = Ec2Provider(home.choices, home=home.path, node_package=home.package)
    with pytest.raises(NotSwept) as raised:
        blind.reap(home.world.now)
    assert {*raised.value.unswept} == {"us-east-1", "eu-west-1"}
    choices = home.choices.model_copy(update={"bucket": None})
    unused = Ec2Provider(choices, home=home.path / "new", node_package=home.package)
    assert len(unused.reap(home.world.now)) == 1 and not unused.was_used()


@pytest.mark.parametrize(("forgotten", "over"), [(False, 1.05), (True, 1.25)])
def test_a_dead_controllers_machines_cost_until_their_own_end(
    home: Home, forgotten: bool, over: float
) -> None:
    left_running(home)
    home.world.pass_s(9 * 3600)
    assert home.world.alive() == []
    if forgotten:
        home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    could_live = 2 * SPOT_USD["c"] * 1860 / 3600
    assert ended.usd is not None and 0.95 * could_live < ended.usd < over * could_live


@pytest.mark.parametrize("away_s", [2400.0, 3 * 3600.0], ids=["still shown", "forgotten"])
def test_machines_that_were_never_heard_of_are_paid_for(home: Home, away_s: float) -> None:
    killed_unheard(home)
    home.world.pass_s(away_s)
    if away_s > 3600:
        home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    hours = ended.usd / (2 * ON_DEMAND_USD) if ended.usd else 0.0
    assert 1800 / 3600 < hours < 2200 / 3600


def test_what_a_machine_uploads_while_it_goes_down_is_fetched(home: Home) -> None:
    left_running(home)
    machine = home.world.alive()[0].instance_id

    def sleep(seconds: float) -> None:
        home.world.pass_s(seconds)
        if home.world.instances[machine].ended_at is not None:
            home.upload(machine, "records/last.json", {"run_id": "last"})

    home.provider._api.clock = replace(home.world.clock, sleep=sleep)
    home.provider.reap(home.world.now)
    assert home.records() == {"last"}


def test_a_sweep_in_the_future_does_not_count(home: Home) -> None:
    home.provider.reap(home.world.now)
    assert home.controller().not_swept_since(home.world.now) == []
    swept = home.leases.swept_file
    future = {"eu-west-1": "2999-01-01T00:00:00+00:00"}
    swept.write_text(json.dumps(json.loads(swept.read_text()) | future))
    assert home.controller().not_swept_since(home.world.now) == ["eu-west-1"]

"""Whom the reaper ends on EC2, in which regions, and what is brought home of the dead."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from models.domain.cluster import Cluster
from tasks.providers.base import LeaseUnreadable, NotSwept, ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.provider import Ec2Provider
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, SILENT, Fault, Killed
from tests.fake_ec2_account import SPOT_USD


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def left_running(
    home: Home, lease_id: str = "r-1", region: str = "us-east-1", *, deaf: bool = False
) -> None:
    """A controller that is killed while its machines run; `deaf` ones do not end themselves."""
    cluster = Cluster.of((2, home.offer(zone=f"{region}a")))
    with pytest.raises(Killed), home.acquire(cluster, lease_id):
        home.world.faults = [Fault(action="", code=KILLED)]
    home.world.faults = []
    home.die()
    for one in home.world.alive():
        one.deaf = deaf


def chosen(home: Home, **changes: object) -> None:
    """Another controller, after srift.toml was changed."""
    home.choices = home.choices.model_copy(update=changes)
    home.provider = home.controller()


def rewritten(home: Home, *without: str, **changes: object) -> None:
    """The lease's file, with other values and without some."""
    file = home.leases.directory("r-1") / "lease.json"
    body = json.loads(file.read_text()) | changes
    file.write_text(
        json.dumps({name: value for name, value in body.items() if name not in without})
    )


def the_second_uploads_a_record(home: Home) -> None:
    machine = home.world.alive()[1].instance_id
    home.world.s3.upload(home.world.now, "r-1", machine, "records/a.json", {"run_id": "a"})


def test_a_lease_without_its_controller_is_ended_and_its_records_fetched(home: Home) -> None:
    left_running(home)
    assert len(home.world.alive()) == 2
    the_second_uploads_a_record(home)
    [sentence] = home.provider.reap(home.world.now)
    assert (
        "r-1 (2xg4dn.12xlarge): its controller (process" in sentence
        and "2 machines in us-east-1" in sentence
    )
    assert home.world.alive() == [] and home.provider.leases() == []
    [ended] = home.provider.ended()
    assert ended.outcome == "reaped" and home.records() == {"a"}
    assert home.provider.reap(home.world.now) == []


def test_a_lease_that_is_looked_after_is_left_alone(home: Home) -> None:
    with home.acquire(home.two()):
        home.leases.used_file.unlink()  # as a lease of an older version
        assert home.provider.reap(home.world.now) == [] and len(home.world.alive()) == 2
        assert home.leases.used(home.world.now) == [("us-east-1", "srift")], "and is noted"
        assert (
            len(home.provider.reap(home.world.now, all_of_them=True)) == 1
            and home.world.alive() == []
        )


def test_two_regions_are_looked_through_whoever_launched(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-1", deaf=True)
    left_running(other, "o-2", "eu-west-1", deaf=True)
    assert home.provider.reap(home.world.now) == [], "not past their deadline, and of another home"
    home.world.pass_s(2000)
    sentences = home.provider.reap(home.world.now)
    assert len(sentences) == 4 and sum("eu-west-1" in one for one in sentences) == 2
    assert all("its deadline was" in one for one in sentences) and home.world.alive() == []
    assert home.world.account.groups == {} and home.world.account.placements == {}


def test_machines_of_others_and_without_our_tag_are_none_of_ours(
    home: Home, tmp_path: Path
) -> None:
    choices = home.choices.model_copy(update={"deployment": "theirs"})
    theirs = Home(tmp_path / "theirs", home.world, choices)
    left_running(theirs, "t-1", deaf=True)
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


def test_a_lease_that_nothing_tells_of_loses_neither_machines_nor_records(home: Home) -> None:
    left_running(home)
    mailbox = home.leases.mailbox("r-1") / "node-0" / "records"
    mailbox.mkdir(parents=True)
    (mailbox / "a.json").write_text("{}")
    (home.leases.directory("r-1") / "lease.json").unlink()
    sentences = home.provider.reap(home.world.now)
    assert any("moved to" in one for one in sentences) and home.world.alive() == []
    assert (home.path / "rejected" / "r-1" / "node-0" / "records" / "a.json").exists()


UNKNOWN_KEY = {"of_a_newer_version": 1}


def not_swept(home: Home) -> NotSwept:
    with pytest.raises(NotSwept) as raised:
        home.provider.reap(home.world.now)
    return raised.value


def test_machines_of_a_lease_that_cannot_be_read_live_on_until_it_can(home: Home) -> None:
    with home.acquire(home.two()):
        rewritten(home, **UNKNOWN_KEY)
        error = not_swept(home)
        assert (
            list(error.unswept) == ["lease r-1"]
            and "of_a_newer_version" in error.unswept["lease r-1"]
        )
        assert len(home.world.alive()) == 2 and home.leases.ids() == ["r-1"]
        [held] = home.provider.leases()
        assert held.usd_per_hour is None and "cannot be read" in held.problem
        with pytest.raises(LeaseUnreadable, match=r"lease\.json cannot be read"):
            home.provider.closed()
        with pytest.raises(LeaseUnreadable), home.acquire(home.two(), "r-2"):
            pytest.fail("machines were bought beside others that nobody knows")
        assert home.world.bought() == 2 and home.provider.ended() == []
    assert home.world.alive() == [], "its own controller knows what it has"


WRONG: dict[str, dict[str, object]] = {
    "no deadline": {"deadline_at": None},
    "moments without a zone": {
        "started_at": "2026-11-20T00:00:00",
        "deadline_at": "2026-11-20T00:00:00",
    },
    "a moment that is a number": {"started_at": 5},
    "a deployment that is a number": {"deployment": 5},
    "no cluster": {"cluster": None},
    "a price in words": {"usd_per_hour": "1"},
    "a price without end": {"usd_per_hour": float("inf")},
    "an empty region": {"region": ""},
    "no region": {"region": None},
    "machines that are no list": {"machines": {}},
    "a machine without a name": {"machines": [{"rank": 0}]},
    "asked for in no list": {"asked": {}},
    "half a controller": {"controller": {"pid": "x"}},
    "a boot that is a number": {"boot_id": 5},
    "a word for true": {"releasing": "no"},
    "another lease": {"lease_id": "r-9"},
    **{f"schema {value}": {"schema": value} for value in ("1", True, 1.9, float("inf"), None)},
}


def test_a_lease_with_a_wrong_value_or_without_one_ends_neither_its_machines_nor_the_reaping(
    home: Home,
) -> None:
    before = home.world.now
    with home.acquire(home.two()):
        file = home.leases.directory("r-1") / "lease.json"
        right = file.read_text()
        changes = {how: ((), values) for how, values in WRONG.items()}
        changes |= {f"no {one}": ((one,), {}) for one in ("region",)}
        for how, (without, values) in changes.items():
            file.write_text(right)
            rewritten(home, *without, **values)
            error = not_swept(home)
            assert (
                list(error.unswept) == ["lease r-1"]
                and "cannot be read" in error.unswept["lease r-1"]
            ), how
            assert len(home.world.alive()) == 2 and home.provider.not_swept_since(before) == []
            assert (
                "cannot be read" in home.provider.leases()[0].problem
                and home.provider.ended() == []
            )
            with pytest.raises(LeaseUnreadable):
                home.provider.closed()
        file.write_text(right)


def test_a_lease_that_cannot_be_read_tells_where_its_machines_are_and_their_deadline_ends_them(
    home: Home,
) -> None:
    left_running(home, region="eu-west-1", deaf=True)
    rewritten(home, **UNKNOWN_KEY)
    chosen(home, regions=("us-east-1",), deployment="another")
    assert not_swept(home).done == [] and len(home.world.alive()) == 2
    home.world.pass_s(2000)
    error = not_swept(home)
    assert len(error.done) == 2 and all("its deadline was" in one for one in error.done)
    assert home.world.alive() == [] and home.leases.ids() == ["r-1"], (
        "its dollars are still not known"
    )


def moved_away_elsewhere(home: Home) -> None:
    """A lease in eu-west-1 is unreadable and moved away, and srift.toml names another region and deployment."""
    left_running(home, region="eu-west-1", deaf=True)
    home.leases.directory("r-1").rename(home.path / "given-up")
    chosen(home, regions=("us-east-1",), deployment="another")


def test_machines_of_a_lease_that_is_moved_away_are_found_in_a_region_that_srift_toml_no_longer_names(
    home: Home,
) -> None:
    moved_away_elsewhere(home)
    assert len(home.provider.reap(home.world.now)) == 2 and home.world.alive() == []
    home.world.pass_s(31 * 86400)
    home.world.faults = [
        Fault(
            action="",
            code="ExpiredToken",
            times=999,
            when=lambda words: words["region"] == "eu-west-1",
        )
    ]
    assert home.provider.reap(home.world.now) == [], "nobody looks there for ever"


def test_a_lease_of_an_older_version_is_noted_by_the_reaper_that_sees_it(home: Home) -> None:
    left_running(home, region="eu-west-1", deaf=True)
    home.leases.used_file.unlink()
    rewritten(home, **UNKNOWN_KEY)
    not_swept(home)
    home.leases.directory("r-1").rename(home.path / "given-up")
    chosen(home, regions=("us-east-1",), deployment="another")
    home.provider.reap(home.world.now)
    assert home.world.alive() == []


@pytest.mark.parametrize("text", ["{", "[]", '{"eu-west-1": {"srift": 5}}', '{"../x": {}}'])
def test_where_nobody_can_tell_which_regions_were_used_the_reaper_says_so_and_nothing_is_bought(
    home: Home, text: str
) -> None:
    moved_away_elsewhere(home)
    home.leases.used_file.write_text(text)
    assert str(home.leases.used_file) in not_swept(home).unswept["other regions"]
    with pytest.raises(ProviderError, match="cannot be read"), home.acquire(home.two(), "r-2"):
        pytest.fail("machines were bought")


def test_a_region_where_a_lease_does_not_end_is_not_swept(home: Home) -> None:
    left_running(home)
    home.world.immortal, before = True, home.world.now
    assert "lease r-1" in not_swept(home).unswept
    assert home.provider.not_swept_since(before) == ["us-east-1"]


@pytest.mark.parametrize("moment", ["2999-01-01T00:00:00+00:00", "2999-01-01T00:00:00", 5, None])
def test_a_sweep_in_the_future_or_without_a_zone_is_none(home: Home, moment: object) -> None:
    home.provider.reap(home.world.now)
    swept = home.leases.root / ".swept.json"
    swept.write_text(json.dumps(json.loads(swept.read_text()) | {"eu-west-1": moment}))
    assert "eu-west-1" in home.controller().not_swept_since(home.world.now)
    home.provider.reap(home.world.now)
    assert home.controller().not_swept_since(home.world.now) == []


def test_a_new_name_of_the_deployment_hides_no_machine(home: Home) -> None:
    cluster = home.two("on-demand")
    home.world.faults = [Fault(action="ec2:RunInstances", code=KILLED, after=True)]
    home.killed_in(cluster)
    chosen(home, deployment="another", bucket="mailbox", prefix="another")
    assert len(home.world.alive()) == 2
    home.provider.reap(home.world.now)
    assert home.world.alive() == []
    home.world.pass_s(130)
    home.provider.reap(home.world.now)
    assert home.world.account.groups == {} and home.world.account.placements == {}


def test_a_new_bucket_or_prefix_loses_no_record(home: Home) -> None:
    left_running(home)
    the_second_uploads_a_record(home)
    chosen(home, bucket="another", prefix="another")
    home.provider.reap(home.world.now)
    assert home.records() == {"a"} and len(home.provider.ended()) == 1


def test_a_lease_of_an_older_version_is_looked_for_by_todays_names(home: Home) -> None:
    left_running(home)
    the_second_uploads_a_record(home)
    rewritten(home, "schema", "deployment", "bucket", "prefix")
    [sentence] = home.provider.reap(home.world.now)
    assert "2 machines in us-east-1 were ended" in sentence and home.records() == {"a"}


def stay_on(home: Home) -> None:
    """The deadline passes, and no machine ends."""
    home.world.pass_s(1801)
    for one in home.world.instances.values():
        one.ended_at = None


def test_a_region_that_does_not_answer_fails_the_reaping_once_the_other_is_swept(
    home: Home, tmp_path: Path
) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-2", "eu-west-1")
    stay_on(home)
    home.world.faults = [
        Fault(
            action="ec2:DescribeInstances",
            code=SILENT,
            times=99,
            when=lambda words: words["region"] == "us-east-1",
        )
    ]
    error = not_swept(home)
    assert list(error.unswept) == ["us-east-1"] and "check the network" in str(error)
    assert len(error.done) == 2 and home.world.alive() == []
    before = home.world.now - timedelta(minutes=1)
    assert home.provider.not_swept_since(before) == ["us-east-1"]
    home.world.faults = []
    home.provider.reap(home.world.now)
    assert home.controller().not_swept_since(before) == [], "another process reads when that was"
    assert home.provider.not_swept_since(home.world.now + timedelta(hours=1)) == [
        "us-east-1",
        "eu-west-1",
    ]


@pytest.mark.parametrize("code", ["ExpiredToken", "UnauthorizedOperation", "NoCredentialsError"])
def test_a_session_that_has_expired_or_may_not_look_is_no_all_clear(home: Home, code: str) -> None:
    left_running(home)
    stay_on(home)
    home.world.faults = [Fault(action="", code=code, times=999)]
    error = not_swept(home)
    assert {*error.unswept} == {"lease r-1", "us-east-1", "eu-west-1"} and code in error.unswept[
        "eu-west-1"
    ]
    assert home.provider.not_swept_since(home.world.now) == ["us-east-1", "eu-west-1"]


def test_a_machine_that_may_not_be_ended_or_does_not_end_is_no_all_clear(
    home: Home, tmp_path: Path
) -> None:
    other = Home(tmp_path / "other", home.world)
    left_running(other, "o-1", deaf=True)
    home.world.pass_s(2000)
    before = home.world.now
    home.world.faults = [
        Fault(action="ec2:TerminateInstances", code="UnauthorizedOperation", times=99)
    ]
    assert "ec2:TerminateInstances" in not_swept(home).unswept["us-east-1"]
    home.world.faults, home.world.immortal = [], True
    error = not_swept(home)
    assert "do not end" in error.unswept["us-east-1"] and len(error.done) == 2
    assert home.provider.not_swept_since(before) == ["us-east-1"]


def test_without_credentials_no_region_is_called_empty(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    blind = Ec2Provider(home.choices, home=home.path, node_package=home.package)
    with pytest.raises(NotSwept, match="no AWS credentials") as raised:
        blind.reap(home.world.now)
    assert {*raised.value.unswept} == {"us-east-1", "eu-west-1"}
    without_bucket = Ec2Provider(
        home.choices.model_copy(update={"bucket": None}),
        home=home.path / "new",
        node_package=home.package,
    )
    [sentence] = without_bucket.reap(home.world.now)
    assert "was not looked at" in sentence, (
        "nothing can have been launched from there, and that is no all-clear"
    )


@pytest.mark.parametrize(("forgotten", "over"), [(False, 1.05), (True, 1.25)])
def test_what_a_dead_controllers_machines_cost_ends_with_them(
    home: Home, forgotten: bool, over: float
) -> None:
    left_running(home)
    home.world.pass_s(9 * 3600)
    assert home.world.alive() == [], "they ended themselves"
    if forgotten:
        home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    could_live = 2 * SPOT_USD["c"] * 1860 / 3600
    assert ended.usd is not None and 0.95 * could_live < ended.usd < over * could_live


@pytest.mark.parametrize(
    "away_s", [2400.0, 3 * 3600.0], ids=["EC2 still shows them", "EC2 has forgotten them"]
)
def test_machines_that_were_never_heard_of_and_ended_themselves_are_paid_for(
    home: Home, away_s: float
) -> None:
    cluster = home.two("on-demand")
    home.world.faults = [Fault(action="ec2:RunInstances", code=KILLED, after=True)]
    home.killed_in(cluster)
    home.world.pass_s(away_s)
    if away_s > 3600:
        home.world.forget()
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    assert ended.usd is not None and 2 * 3.912 * 1800 / 3600 < ended.usd < 2 * 3.912 * 2200 / 3600


@pytest.mark.parametrize("action", ["ec2:CreateFleet", "ec2:DescribeInstances"])
def test_spot_machines_that_were_never_priced_count_at_what_was_bid_for_them(
    home: Home, action: str
) -> None:
    cluster = home.two()
    home.world.account.spot["us-east-1a"] = 1.49
    first = (
        action == "ec2:CreateFleet"
    )  # the quota's look at what is held comes before anything is bought
    home.world.faults = [
        Fault(
            action=action,
            code=KILLED,
            after=True,
            when=lambda words: first or home.world.bought() > 0,
        )
    ]
    home.killed_in(cluster)
    home.world.pass_s(2400.0)
    home.provider.reap(home.world.now)
    [ended] = home.provider.ended()
    beside = 0.03  # at most: volume, address and requests
    assert (
        ended.usd is not None
        and 2 * 1.49 * 1800 / 3600 < ended.usd < 2 * (1.6 + beside) * 2000 / 3600
    )


def test_a_replacement_counts_as_the_machine_that_it_replaces(home: Home) -> None:
    with home.acquire(home.two()) as running:
        home.world.interrupt(home.world.alive()[1].instance_id)
        assert running.replace(1)
        lease = home.leases.read("r-1")
        assert lease is not None
        assert len({one.usd_per_hour for one in lease.current}) == 1


def test_what_a_machine_uploads_while_it_goes_down_is_fetched(home: Home) -> None:
    left_running(home)
    machine = home.world.alive()[0].instance_id

    def sleep(seconds: float) -> None:
        home.world.pass_s(seconds)
        if home.world.instances[machine].ended_at is not None:
            home.world.s3.upload(
                home.world.now, "r-1", machine, "records/last.json", {"run_id": "last"}
            )

    home.provider._api.clock = replace(home.world.clock, sleep=sleep)
    home.provider.reap(home.world.now)
    assert home.records() == {"last"}

"""What the reaper ends on EC2, in which regions, and what it fetches."""

import json
from datetime import timedelta

import pytest

from models.domain.cluster import Cluster
from tasks.providers.base import LeaseUnreadable, NotSwept
from tasks.providers.ec2.prices import most_usd_per_hour_beside
from tasks.providers.ec2.provider import Ec2Provider
from tests.ec2_home import Home
from tests.fake_ec2 import KILLED, SILENT, Killed
from tests.fake_ec2_account import ON_DEMAND_USD, SPOT_USD

BOTH = ["us-east-1", "eu-west-1"]


def left_running(home, lease_id="r-1", region="us-east-1"):
    """A controller is killed while its machines run, which do not end themselves."""
    cluster = Cluster.of((2, home.offer(zone=f"{region}a")))
    with pytest.raises(Killed), home.acquire(cluster, lease_id):
        home.world.fails("", KILLED)
    home.world.faults = []
    home.die()
    for machine in home.world.alive():
        machine.deaf = True


@pytest.fixture
def left(home):
    left_running(home)


@pytest.fixture
def theirs(tmp_path, aws):
    """Another home of the same deployment, with machines in both regions past their deadline."""
    home = Home(tmp_path / "theirs", aws)
    for region in BOTH:
        left_running(home, region, region)
    aws.pass_s(2000)
    return home


@pytest.fixture
def moved_away(home):
    """A lease of eu-west-1 is moved away, and srift.toml names another region and deployment."""
    home.reap()  # nothing is bought in a region that was not swept
    left_running(home, region="eu-west-1")
    home.leases.directory("r-1").rename(home.path / "given-up")
    home.choose(regions=("us-east-1",), deployment="another")


def not_swept(home):
    with pytest.raises(NotSwept) as raised:
        home.reap()
    return raised.value


def test_a_lease_without_its_controller_is_ended_and_its_records_fetched(home, left, aws):
    """Whatever the deployment, bucket and prefix in srift.toml are now."""
    machine = aws.alive()[1].instance_id
    home.upload(machine, "records/a.json", {"run_id": "a"})
    home.choose(deployment="another", bucket="another", prefix="another")

    def sleep(seconds):
        aws.pass_s(seconds)
        if aws.instances[machine].ended_at is not None:
            home.upload(machine, "records/last.json", {"run_id": "last"})

    home.provider.api.sleep = sleep
    [sentence] = home.reap()
    assert "r-1 (2xg4dn.12xlarge)" in sentence and "2 machines in us-east-1" in sentence
    assert home.left() == []
    assert aws.account.groups == aws.account.placements == {}
    [ended] = home.provider.ended()
    assert ended.outcome == "reaped" and home.records() == {"a", "last"}
    assert home.reap() == []


def test_a_lease_with_its_controller_is_left_alone_until_its_deadline(home, aws):
    with home.acquire():
        assert home.reap() == [] and len(aws.alive()) == 2
        assert len(home.provider.reap(aws.now + timedelta(days=1))) == 1
        assert aws.alive() == []


def test_every_region_is_swept_whoever_launched(home, aws, theirs):
    sentences = home.reap()
    assert len(sentences) == 4 and sum("eu-west-1" in sentence for sentence in sentences) == 2
    assert aws.alive() == [] and aws.account.groups == aws.account.placements == {}


def test_machines_of_others_live_to_their_deadline_and_of_other_deployments_beyond(
    home, tmp_path, aws
):
    left_running(Home(tmp_path / "ours", aws), "o-1")
    other = Home(tmp_path / "other", aws, home.choices.model_copy(update={"deployment": "other"}))
    left_running(other, "t-1")
    assert home.reap() == [] and len(aws.alive()) == 4
    aws.pass_s(9000)
    assert len(home.reap()) == 2 and len(aws.alive()) == 2


def test_a_directory_without_a_lease_loses_neither_machines_nor_records(home, left, aws):
    records = home.leases.mailbox("r-1") / "node-0/records"
    records.mkdir(parents=True, exist_ok=True)
    (records / "a.json").write_text("{}")
    (home.leases.directory("r-1") / "lease.json").unlink()
    home.reap()
    assert aws.alive() == []
    assert (records / "a.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"of_a_newer_version": 1},
        {"started_at": "2026-11-20T00:00:00"},  # without a zone
        {"usd_per_hour": float("inf")},
        {"region": ...},
        {"machines": [{"rank": 0}]},
        {"lease_id": "r-9"},
    ],
    ids=str,
)
def test_machines_of_an_unreadable_lease_live_on_and_nothing_is_bought_beside_it(
    home, aws, changes
):
    before = aws.now
    with home.acquire():
        file = home.leases.directory("r-1") / "lease.json"
        body = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in body.items() if value is not ...}))
        assert list(not_swept(home).unswept) == ["lease r-1"]
        assert len(aws.alive()) == 2 and home.provider.not_swept_since(before) == []
        [held] = home.provider.leases()
        assert held.usd_per_hour is None and held.problem and home.provider.ended() == []
        with pytest.raises(LeaseUnreadable):
            home.provider.closed()
        with pytest.raises(LeaseUnreadable), home.acquire(home.two(), "r-2"):
            pytest.fail("machines were bought")
    assert aws.bought() == 2 and aws.alive() == []


def test_a_region_that_srift_toml_no_longer_names_is_swept_for_thirty_days(home, moved_away, aws):
    assert len(home.reap()) == 2 and aws.alive() == []
    aws.fails("", "ExpiredToken", times=999, when=lambda words: words["region"] == "eu-west-1")
    assert list(not_swept(home).unswept) == ["eu-west-1"]
    aws.pass_s(31 * 86400)
    assert home.reap() == []


@pytest.mark.parametrize("text", ["{", '{"eu-west-1": 5}', '{"../x": "2026-11-20T12:00:00Z"}'])
def test_unknown_regions_are_no_all_clear(home, moved_away, text):
    home.leases.swept_file.write_text(text)
    assert list(not_swept(home).unswept) == ["other regions"]
    assert home.provider.not_swept_since(home.world.now) == ["us-east-1"]
    assert home.leases.swept_file.read_text() == text


def test_a_region_that_does_not_answer_fails_the_reaping_after_the_others(home, aws, theirs):
    aws.fails(
        "ec2:DescribeInstances", SILENT, times=99, when=lambda words: words["region"] == BOTH[0]
    )
    error = not_swept(home)
    assert list(error.unswept) == ["us-east-1"] and len(error.done) == 2
    before = aws.now - timedelta(minutes=5)
    assert home.provider.not_swept_since(before) == ["us-east-1"]
    aws.faults = []
    home.reap()
    assert home.controller().not_swept_since(before) == aws.alive() == []


def test_an_expired_session_is_no_all_clear(home, left, aws):
    aws.fails("", "ExpiredToken", times=999)
    error = not_swept(home)
    assert {*error.unswept} == {"lease r-1", *BOTH} and "ExpiredToken" in error.unswept["eu-west-1"]
    assert home.provider.not_swept_since(aws.now) == BOTH


def test_a_machine_that_does_not_end_is_no_all_clear(home, aws, theirs):
    before = aws.now
    aws.fails("ec2:TerminateInstances", "AccessDenied", times=99)
    assert "ec2:TerminateInstances" in not_swept(home).unswept["us-east-1"]
    aws.faults, aws.immortal = [], True
    error = not_swept(home)
    assert {*error.unswept} == {*BOTH} and len(error.done) == 4
    assert home.provider.not_swept_since(before) == BOTH


def test_without_credentials_no_region_is_called_empty(home, no_credentials):
    home.provider = Ec2Provider(home.choices, home=home.path, node_package=home.package)
    assert {*not_swept(home).unswept} == {*BOTH}
    choices = home.choices.model_copy(update={"bucket": None})
    unused = Ec2Provider(choices, home=home.path / "new", node_package=home.package)
    assert len(unused.reap(home.world.now)) == 1 and not unused.was_used()


def ended_hours(home, usd):
    """Hours of two machines at `usd` that the reaper books."""
    home.reap()
    assert home.left() == []
    [ended] = home.provider.ended()
    return (ended.usd or 0.0) / (2 * usd)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_dead_controllers_machines_cost_until_their_own_end(home, left, aws, forgotten):
    for machine in aws.alive():
        machine.deaf = False
    aws.pass_s(9 * 3600)
    if forgotten:
        aws.instances.clear()
    could_live = 1860 / 3600
    assert 0.95 * could_live < ended_hours(home, SPOT_USD["c"]) < 1.25 * could_live


@pytest.mark.parametrize("away_s", [390.0, 2400.0, 3 * 3600.0], ids=["late", "over", "forgotten"])
def test_machines_that_were_never_heard_of_are_ended_and_paid_for(home, aws, away_s):
    aws.lag_s, cluster = 60.0, home.two("on-demand")
    aws.fails("ec2:CreateFleet", KILLED, after=True)
    home.killed_in(cluster)
    assert len(home.reap()) == 1 and len(home.provider.leases()) == 1  # they may come yet
    aws.pass_s(away_s)
    if away_s > 3600:
        aws.instances.clear()
    lived_s = min(away_s, 1800.0)
    usd = ON_DEMAND_USD + most_usd_per_hour_beside(home.choices, "us-east-1", "us-east-1")
    hours = ended_hours(home, ON_DEMAND_USD)
    assert lived_s / 3600 < hours < (lived_s + 310) / 3600 * usd / ON_DEMAND_USD


def test_a_request_whose_answer_nobody_stored_leaves_a_row(home, aws):
    aws.fails("ec2:CreateFleet", KILLED)
    home.killed_in(home.two("on-demand"))
    lease = home.leases.read("r-1")
    assert lease.requests and not lease.machines and not lease.refusals
    home.leases.close(lease, home.world.now, "reaped")
    over = home.leases.read("r-1")
    assert over.outcome == "refused" and over.refusals


def test_a_sweep_in_the_future_does_not_count(home):
    home.reap()
    assert home.provider.not_swept_since(home.world.now) == []
    home.leases.note_swept(["eu-west-1"], home.world.now + timedelta(days=1))
    assert home.provider.not_swept_since(home.world.now) == ["eu-west-1"]

"""The caps of a campaign and of the month, and when a campaign must end."""

import math
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from models.campaign.budget import billed_s
from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.campaign import campaign
from tasks.campaign import spending as caps
from tasks.campaign.spending import RELEASE_S, Tally
from tasks.execution.data_transfer import DataCarrier, DataPlan
from tasks.execution.record_loader import load_lease
from tasks.providers.base import Lease, LeaseUnreadable, ProviderError
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.attempts import SPOT_MARGIN
from tests.ec2_home import Home
from tests.fake_ec2 import FakeAws
from tests.fakes import offer
from tests.installed import NOON, DescribedMachines, changed, install, priced
from tests.warehouse.builders import fresh, lease, load, write
from warehouse.append import append

PRICE = 0.125  # of s.large on demand, which bounds its price on the spot market
# an hour of 100 GiB, a public address, and requests and uploads as often as they may be, in the
# dearest region
BESIDE = 100 * 0.152 / 730 + 0.005 + (3600 + 720 + 1800 + 450) * (0.007 + 0.00056) / 1000
BYTES = 2970 * 2**19 + 3600 * 20_000
BESIDE += BYTES / 1e9 * (0.147 + 0.154) + BYTES / 2**23 * 0.00056 / 1000
LAUNCHED = "refresh-1-00"


@pytest.fixture
def here(tmp_path):
    return priced(tmp_path, DescribedMachines(name="ec2"))


def launch(here, est_s=600.0):
    spot = next(
        o
        for o in here.provider.offers(NOON)
        if o.instance_type.name == "s.large" and o.market == "spot"
    )
    item = PlannedRun(
        kind="profile", workload="conv", nodes=(0,), batches=(8,), reason="unknown", est_s=est_s
    )
    return replace(pair(spot), items=(item,), est_s=est_s, est_usd=0.001)


def tally(cap_usd=1.0, spent=0.0):
    return Tally(cap_usd=cap_usd, stop_at=time.monotonic() + 1e6, refresh_id="refresh-1", usd=spent)


def monthly(here, usd):
    return changed(here, "ec2", max_usd_per_month=usd)


def spent(here, usd, ended_at, lease_id, provider="ec2"):
    of = {"lease_id": lease_id, "refresh_id": lease_id.rpartition("-")[0], "provider": provider}
    row = lease(ended_at, started_at=ended_at - timedelta(hours=1), usd=usd, **of)
    write(here.warehouse, append, "raw_leases", [row])


def held(lease_id="other-00", hours=2.0, usd_per_hour=5.0, kind=Lease, **changes):
    words = {
        "lease_id": lease_id,
        "cluster": "1xstranger",
        "market": "spot",
        "usd_per_hour": usd_per_hour,
        "started_at": NOON,
        "controller": 1,
        "deadline_at": NOON + timedelta(hours=hours),
    }
    return kind(**words | changes)


def at_worst(usd_per_hour, deadline_s, machines=1):
    return machines * (usd_per_hour + BESIDE) * billed_s(deadline_s) / 3600


def refusal(here, of=None, now=NOON):
    return caps.allowance(here, launch(here), of or tally(), now).refusal


def committed(here, lease, offers=()):
    here.provider.held = [lease]
    near = replace(tally(), bucket_region="eu-west-1")
    (_, month), _ = caps.caps_of(here, near, NOON, offers)
    return month.committed_usd


def with_requirements(here):
    """The launch's workload has requirements."""
    conv = here.settings.workloads["conv"].model_copy(update={"requirements": "requirements.txt"})
    workloads = here.settings.workloads | {"conv": conv}
    return replace(here, settings=here.settings.model_copy(update={"workloads": workloads}))


def test_the_wished_deadline_and_installations_are_paid_for(here):
    plain, needing = (
        caps.allowance(workspace, launch(here), tally(1000.0), NOON)
        for workspace in (here, with_requirements(here))
    )
    assert plain.deadline_s == needing.deadline_s - 300.0 == 2 * 600.0 + caps.EC2_START_UP_S
    assert plain.worst_usd == pytest.approx(at_worst(PRICE, plain.deadline_s, machines=2))
    assert needing.worst_usd > plain.worst_usd
    near = replace(tally(1000.0), bucket_region="here")  # uploads stay in the region
    assert caps.allowance(here, launch(here), near, NOON).worst_usd < plain.worst_usd
    least_s = 600.0 + caps.EC2_LEAST_START_UP_S
    enough = tally(at_worst(PRICE, least_s, machines=2) + 1e-6)
    assert not refusal(here, enough) and refusal(with_requirements(here), enough)
    installed = at_worst(PRICE, least_s + caps.LEAST_INSTALL_S, machines=2) + 1e-6
    assert not refusal(with_requirements(here), tally(installed))


WHOLE_S = 2 * 600.0 + caps.EC2_START_UP_S


@pytest.mark.parametrize(
    "est_s, deadline_s, left_s, installs, expected",
    [
        (600.0, WHOLE_S, 1e6, False, 150.0),  # a quarter of the launch's seconds
        (600.0, WHOLE_S - 200.0, 1e6, True, 100.0),
        (60.0, WHOLE_S, 65.0, False, 5.0),
    ],
)
def test_patience_ends_within_the_deadline_and_the_campaign(
    here, est_s, deadline_s, left_s, installs, expected
):
    workspace = with_requirements(here) if installs else here
    late = replace(tally(), stop_at=time.monotonic() + left_s)
    found = caps.patience_s(workspace, launch(here, est_s), late, deadline_s)
    assert found == pytest.approx(expected, abs=1.0)


def test_a_warning_is_due_at_four_fifths_of_the_month(here):
    here = monthly(here, 10.0)
    spent(here, 7.9, NOON, "c-00")
    assert caps.money_short(here, tally(), NOON) == ""
    spent(here, 0.2, NOON, "d-00")
    assert "8.10" in caps.money_short(here, tally(), NOON)


def test_the_months_cap_counts_this_month_and_provider(here):
    here = monthly(here, 10.0)
    spent(here, 9.95, datetime(2026, 10, 31, 23, 59, tzinfo=UTC), "a-00")
    spent(here, 9.95, NOON, "b-00", provider="local")
    assert refusal(here) == ""
    spent(here, 9.95, datetime(2026, 11, 1, tzinfo=UTC), "c-00")  # it began last month
    assert refusal(here)
    assert refusal(here, now=datetime(2026, 12, 1, tzinfo=UTC)) == ""


@pytest.fixture
def bought(here, monkeypatch):
    """A home that bought once, is paid for and forgotten; its AWS, and the dollars."""
    here, aws = changed(here, "ec2", bucket="mailbox"), FakeAws()
    monkeypatch.setattr(caps, "connect", lambda: Ec2Api(aws.clients, aws.clock))
    caps.keep_spending(here, NOON)
    home, lease_id = Home(here.home, aws), f"{NOON:%Y%m%dT%H%M%S}-ab-00"
    with home.acquire(home.two(), lease_id):
        aws.pass_s(600.0)
    [lease] = home.provider.ended()
    load_lease(here, lease, NOON)
    home.provider.forget(lease_id)
    return here, aws, lease.usd


@pytest.mark.parametrize("loss", ["nothing", "file", "shared", "record"])
def test_what_the_month_cost_is_known_without_the_warehouse(bought, tmp_path, loss):
    here, _, usd = bought
    if loss == "file":  # also if a restoration was killed between its two moves
        here.warehouse.path.unlink()
    elif loss == "shared":
        here = replace(here, warehouse=fresh(tmp_path))
    elif loss == "record":
        (here.home / "leases-ec2/.spent.json").unlink()
    caps.keep_spending(here, NOON)
    assert caps.spent_this_month(here, NOON) == (pytest.approx(usd), "")
    assert caps.spent_this_month(here, datetime(2026, 12, 1, tzinfo=UTC)) == (0.0, "")


def test_a_home_keeps_the_months_dollars_of_its_shared_warehouse(bought):
    here, _, usd = bought
    record = here.home / "leases-ec2/.spent.json"
    record.write_text("{}")  # as if another home had spent the dollars
    caps.keep_spending(here, NOON)
    here.warehouse.path.unlink()
    assert caps.spent_this_month(here, NOON) == (pytest.approx(usd), "")
    for text in (
        "",
        '{"a": 5}',
        '{"a": ["2026-11", NaN]}',
    ):
        record.write_text(text)
        dollars, problem = caps.spent_this_month(here, NOON)
        assert dollars == math.inf and "--month-spent" in problem


def test_estimated_prices_bound_nothing(here):
    known = launch(here)
    guess = tuple(replace(offer, price_source="a guess") for offer in known.cluster.members)
    known = replace(known, cluster=Cluster(members=guess))
    assert "estimate" in caps.allowance(here, known, tally(5.0), NOON).refusal


def test_a_month_that_nobody_remembers_buys_nothing_until_its_dollars_are_stated(bought):
    here, aws, _ = bought
    here.warehouse.path.unlink()  # as in an older copy of the home
    record = here.home / "leases-ec2/.spent.json"
    record.write_text('{"older-00": ["2026-11", 0.38]}')
    with pytest.raises(ProviderError, match="--month-spent"):
        caps.keep_spending(here, NOON)
    shutil.rmtree(here.home)
    with pytest.raises(ProviderError, match="--month-spent"):
        caps.keep_spending(here, NOON)
    aws.fails("s3:ListBucket", "AccessDenied")
    with pytest.raises(ProviderError):  # nor where the bucket cannot be looked into
        caps.keep_spending(here, NOON)
    for minute, (stated, known) in enumerate(((95.0, 95.0), (0.0, 95.0), (97.0, 97.0))):
        caps.keep_spending(here, NOON + timedelta(minutes=minute), stated)
        assert caps.spent_this_month(here, NOON) == (known, "")
    caps.keep_spending(here, NOON + timedelta(hours=1))  # the statement covers the lost launch
    assert refusal(monthly(here, 97.0))
    december = datetime(2026, 12, 1, tzinfo=UTC)
    record.write_text('{"stated-2026-11-20T00:00:00Z": ["2026-11", 5]}')
    caps.keep_spending(here, december)  # no launch of November ran on
    aws.s3.upload(december, f"{NOON:%Y%m%dT%H%M%S}-ab-00", "i-1", "heartbeat.json", "")
    with pytest.raises(ProviderError):
        caps.keep_spending(here, december)


def test_machines_of_other_controllers_count_to_their_deadline(here):
    here = monthly(here, 11.4)
    here.provider.held = [held()]
    assert f"{at_worst(5.0, 7200.0):.2f}" in refusal(here)
    here.provider.held = [held(hours=0.5)]
    assert refusal(here) == ""
    here.provider.held = [held(LAUNCHED, hours=0.1)]  # of this campaign
    assert refusal(here, tally(0.75))
    here.provider.held = [held("other-00", hours=0.1)]
    assert refusal(here, tally(0.75)) == ""
    here = monthly(here, 0.30)  # at the highest price of its types
    here.provider.held = [held(cluster="1xs.large", usd_per_hour=0.01, hours=1.0)]
    assert f"{at_worst(PRICE, 3600.0):.2f}" in refusal(here)


def test_ended_leases_count_before_they_are_in_the_ledger(here, tmp_path):
    here = monthly(here, 10.0)
    over = held("o-00", usd=9.95, ended_at=NOON, outcome="reaped", mailbox=tmp_path)
    here.provider.over = [over]
    assert "9.95" in refusal(here)
    here.provider.over = [replace(over, usd=None)]
    assert "o-00" in refusal(here)


def test_unknown_spending_stops_the_month(here):
    here.provider.held = [held(usd_per_hour=None)]
    assert refusal(here) != ""
    here.provider.held = []
    spent(here, None, NOON, "a-00")
    assert "refresh a" in refusal(here)


def test_without_on_demand_the_bid_bounds_spot(here):
    here = changed(here, "ec2", markets=("spot",))
    offers = [offer for offer in here.provider.offers(NOON) if offer.market == "spot"]
    dearest = max(o.usd_per_hour or 0.0 for o in offers if o.instance_type.name == "s.large")
    bid = SPOT_MARGIN * dearest
    allowed = caps.allowance(here, launch(here), tally(), NOON, offers)
    assert allowed.worst_usd == pytest.approx(at_worst(bid, allowed.deadline_s, machines=2))
    assert allowed.max_usd_per_hour == pytest.approx(2 * bid)
    cheap = held(cluster="1xs.large", usd_per_hour=dearest)
    assert committed(here, cheap, offers) == pytest.approx(at_worst(bid, 7200.0))


def test_no_month_caps_local_hosts(tmp_path):
    made = monthly(install(tmp_path), 0.0)
    assert refusal(made, tally(0.01)) == "" and refusal(made, tally(0.0))
    assert caps.money_short(made, tally(), NOON) == ""


def of_data(download_usd=8.0, upload_usd=3.0):
    plan = DataPlan(
        name="conv",
        place="s3://mine/",
        limits=(50, 6),
        download_usd=download_usd,
        upload_usd=upload_usd,
    )
    return {"conv": plan}


def test_data_count_for_each_machine_and_its_replacements_and_an_upload_once(here, monkeypatch):
    allowed = caps.allowance(here, launch(here), replace(tally(100.0), data=of_data()), NOON)
    machines_usd = at_worst(PRICE, allowed.deadline_s, machines=2)
    assert allowed.worst_usd == pytest.approx(machines_usd + (2 + 3) * 8.0 + 3.0)
    assert refusal(here, replace(tally(43.0), data=of_data()))
    assert not refusal(here, replace(tally(43.0), data=of_data(upload_usd=0.0)))
    here = monthly(here, 100.0)
    monkeypatch.setattr(Lease, "usd_until", lambda *_: 8.0)  # its machines have downloaded
    machines_usd = at_worst(1.0, 7200.0)
    assert committed(here, held(usd_per_hour=1.0)) == pytest.approx(machines_usd + 8.0)


def test_prices_of_half_a_year_ago_bound_nothing(here):
    assert not refusal(here, now=NOON + caps.PRICES_LAST)
    assert "2026-11-20" in refusal(here, now=NOON + caps.PRICES_LAST + timedelta(seconds=1))


def test_a_refused_launch_requests_no_machine_and_leaves_a_row(here):
    served = campaign.serve_launch(
        here, launch(here), LAUNCHED, tally(0.05)
    )  # acquiring would raise AssertionError
    assert served.outcome.startswith("refused") and not served.unavailable
    [row] = served.rows
    assert row["status"] == "refused"
    assert load(here.warehouse, row | {"ended_unix": NOON.timestamp()}) == 1


def test_machines_get_the_allowed_deadline_and_the_dollars_of_their_data(here, monkeypatch):
    class Carrier(DataCarrier):
        bucket_region = "far"

        def plans(self, names, region):
            return [*of_data(0.002, 0.003).values()]

        def carry(self, plan, refresh_id=""):
            return replace(plan, upload_usd=0.0)

    monkeypatch.setattr(campaign, "DataCarrier", Carrier)
    seen, mine = [], tally(0.85, 0.10)  # what it has spent counts
    monkeypatch.setattr(campaign, "serve", lambda provider, job, **_: seen.append(job))
    campaign.serve_launch(here, launch(here), LAUNCHED, mine)
    [job] = seen
    assert mine.usd == pytest.approx(0.103) and mine.data == of_data(0.002, 0.0)
    assert mine.bucket_region == "far"
    assert job.download_usd == 0.002 and job.data == {"conv": ("s3://mine/", 50, 6)}
    most = caps.allowance(here, launch(here), tally(1.0), NOON).max_usd_per_hour
    assert job.max_usd_per_hour == most
    assert 600.0 + caps.EC2_LEAST_START_UP_S <= job.deadline_s < WHOLE_S
    assert at_worst(PRICE, job.deadline_s, machines=2) <= 0.737


def test_a_smaller_launch_is_made_if_a_larger_one_is_refused(here, monkeypatch, capsys):
    small = launch(here, 30.0)
    lists = [[launch(here, 6000.0), small], []]
    monkeypatch.setattr(campaign, "shop", lambda *_: lists.pop(0))
    assert list(campaign.within(here, None, tally(0.5))) == [small]
    assert "not launched" in capsys.readouterr().err


def test_nothing_is_launched_beside_an_unreadable_lease(here):
    here.provider.held = [held(usd_per_hour=None, cluster="", problem="unreadable")]
    assert refusal(here) == "unreadable"

    class Unreadable(DescribedMachines):
        def closed(self):
            raise LeaseUnreadable("unreadable lease")

    assert "unreadable lease" in refusal(replace(here, provider=Unreadable(name="ec2")))


def pair(machine):
    cluster = Cluster.of((2, machine))
    return PlannedLaunch(cluster=cluster, items=(), est_s=5.0, est_usd=0.5, reason="")


@pytest.mark.parametrize(
    "spent, at_s, affords",
    [(0.5, 99.0, True), (0.51, 99.0, False), (0.0, 100.0, False), (0.0, 101.0, False)],
)
def test_a_launch_starts_within_the_campaigns_dollars_and_time(monkeypatch, spent, at_s, affords):
    monkeypatch.setattr(caps.time, "monotonic", lambda: at_s)
    assert Tally(cap_usd=1.0, stop_at=100.0, usd=spent).affords(pair(offer(180.0))) is affords


@pytest.mark.parametrize("spent, ends_at", [(0.0, 10.0 - RELEASE_S), (1.0 - 1e-9, 0.0)])
def test_a_launch_ends_before_its_dollars_do(monkeypatch, spent, ends_at):
    """Volumes and addresses are spent too."""
    monkeypatch.setattr(caps.time, "monotonic", lambda: 0.0)
    billed = replace(offer(90.0), storage_usd_per_hour=60.0, other_usd_per_hour=30.0)
    stop_s = Tally(cap_usd=1.0, stop_at=math.inf, usd=spent).stop_of(pair(billed))
    assert stop_s == pytest.approx(ends_at)

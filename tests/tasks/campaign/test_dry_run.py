"""A dry run on EC2 shows every request and the worst case, and asks for no machine."""

import json
import math
from dataclasses import replace
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from flows.cli import app
from models.campaign.budget import billed_s, dearest_usd_per_hour
from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.campaign import dry_run
from tasks.campaign import spending as caps
from tasks.campaign.spending import Tally
from tasks.execution import data_transfer
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.attempts import attempts
from tasks.providers.ec2.prices import apply_terms, most_usd_per_hour_beside
from tasks.providers.ec2.settings import Ec2
from tasks.reporting.tables import print_launches
from tasks.workspace.workspace import open_workspace
from tests.ec2_home import worst_usd
from tests.fake_ec2 import NOON, FakeAws
from tests.fakes import offer

REGION = "us-east-1"
MAKES = {"ec2:CreateSecurityGroup", "ec2:CreateLaunchTemplate", "ec2:CreateFleet"}


@pytest.fixture
def here(ec2_project, monkeypatch):
    file = ec2_project / "srift.toml"
    file.write_text(file.read_text().replace('["g4dn.*"]', '["g4dn.xlarge", "p4d.24xlarge"]'))
    monkeypatch.setattr(caps, "PRICES_LAST", timedelta.max)
    return open_workspace("ec2")


def offers():
    """On demand as packaged, and spot in two zones."""
    provider = open_workspace("ec2").provider
    listed = list(
        {offer.instance_type.name: offer for offer in provider.packaged_offers()}.values()
    )
    spot = [
        replace(
            offer,
            market="spot",
            zone=f"{REGION}{zone}",
            usd_per_hour=offer.usd_per_hour * price_ratio,
        )
        for offer in listed
        for zone, price_ratio in (("a", 0.3), ("b", 0.4))
    ]
    return [*listed, *spot]


def tally(cap_usd):
    return Tally(cap_usd=cap_usd, stop_at=math.inf)


def launch(name, machines, market="spot"):
    found = next(
        offer for offer in offers() if offer.instance_type.name == name and offer.market == market
    )
    return PlannedLaunch(
        cluster=Cluster.of((machines, found)), items=(), est_s=300.0, est_usd=0.05, reason="r"
    )


def test_without_an_account_the_launches_are_a_table_and_json_has_the_requests(here):
    words = ["refresh", "--provider", "ec2", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--max-usd", "2", "--json"])
    assert result.exit_code == 0, result.output
    made = [row for row in json.loads(result.stdout) if row["worst_usd"] is not None]
    assert made
    for row in made:
        assert {request["action"] for request in row["requests"]} >= MAKES
        assert 0 < row["worst_usd"] <= 2.0 and row["deadline_s"] >= row["est_s"]
        assert any("not checked" in note for note in row["notes"])
    assert not (here.home / "leases-ec2").exists() and not (here.home / "warehouse.duckdb").exists()
    plain = CliRunner().invoke(app, words)  # the campaign's cap
    assert plain.exit_code == 0 and "no --max-usd" in plain.stderr
    assert "CreateFleet" not in plain.stdout and plain.stdout.count("not checked") == 1


def test_a_launch_beyond_the_cap_has_no_requests_and_does_not_count_on_the_screen(here, capsys):
    launches = [launch("p4d.24xlarge", 2)] + [launch("g4dn.xlarge", 1)] * 40
    dear, cheap, *_ = rows = dry_run.dry_run_rows(here, launches, offers(), tally(9.0), NOON)
    assert dear["worst_usd"] is None and dear["requests"] == [] and dear["notes"]
    assert cheap["worst_usd"] is not None and cheap["requests"]
    print_launches(rows)
    out = capsys.readouterr().out
    assert "40 launches, about 12000 s and $2.0000" in out and len(out.splitlines()) < 30


@pytest.mark.parametrize("market", ["spot", "on-demand"])
@pytest.mark.parametrize("discount", [0.0, 0.6])
def test_the_caps_reckon_with_no_less_than_all_attempts_cost(here, market, discount):
    terms = Ec2.model_validate({"discounts": {"*": {"on_demand": discount, "spot": discount}}})
    cluster = Cluster(
        members=tuple(apply_terms(launch("p4d.24xlarge", 4, market).cluster.members, terms))
    )
    known = apply_terms(offers(), terms)
    zones = [f"{REGION}{zone}" for zone in "abcdef"]
    found = attempts(cluster, known, zones, ("on-demand", "spot"))
    price = dearest_usd_per_hour(cluster, known)
    for deadline_s in (600.0, 1234.5):
        reckoned = (price + 4 * most_usd_per_hour_beside(terms)) * billed_s(deadline_s) / 3600
        assert worst_usd(found, terms, deadline_s) <= reckoned


def test_an_unknown_spot_price_is_bounded_by_the_on_demand_price():
    known = [replace(offer(1.0), market=market) for market in ("on-demand", "spot")]
    assert dry_run.with_spot(known, "spot") == known
    assert {offer.market for offer in dry_run.with_spot(known[:1], "spot")} == {"on-demand", "spot"}
    assert dry_run.with_spot(known[:1], "on-demand") == known[:1]


def test_what_would_be_fetched_is_named_and_counted_in_the_deadline(here, monkeypatch):
    item = PlannedRun(kind="train", workload="conv", nodes=(0,), batches=(8,), est_s=1.0)
    single = replace(launch("g4dn.xlarge", 1), items=(item,))
    before_s = dry_run.dry_run_rows(here, [single], offers(), tally(5.0), NOON)[0]["deadline_s"]
    monkeypatch.setattr(data_transfer, "FETCHED_BYTES_PER_S", 2**20 / 1000)
    monkeypatch.setattr(data_transfer, "download_usd", lambda *_, **__: 1.5)
    file = here.settings.root / "srift.toml"
    file.write_text(file.read_text().replace("samples", 'data = "s3://photos/cats"\nsamples'))
    aws = FakeAws()
    monkeypatch.setattr(data_transfer, "connect", lambda _: Ec2Api(aws.clients, aws.clock))
    aws.s3.buckets.add("photos")
    aws.s3.objects["cats/1.jpg"] = (b"x" * 2**20, NOON)
    [row] = dry_run.dry_run_rows(open_workspace("ec2"), [single], offers(), tally(50.0), NOON)
    assert not {"s3:PutObject", "s3:GetObject"} & {action for action, _ in aws.calls}
    assert any("s3://photos/cats" in each and "$1.50" in each for each in row["notes"])
    assert any("123 days old" in each for each in row["notes"])
    assert row["deadline_s"] - before_s == pytest.approx(1000.0, abs=60.0)

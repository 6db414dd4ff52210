"""EC2's market: all types of some regions are read, stored and published from emulated AWS."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.data_files import imports
from tasks.market import offers as prices
from tasks.providers.ec2 import settings as ec2_settings
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.snapshot import packaged
from tasks.recommendation import publication as publish
from tasks.recommendation import recommend
from tasks.training.registry import Champion
from tasks.workspace.settings import load_settings
from tasks.workspace.workspace import Workspace
from tests.fake_ec2 import FakeAws
from tests.fake_ec2_account import Account
from tests.warehouse.builders import fresh
from warehouse.reads import mart, training_frames

pytestmark = pytest.mark.slow
REGIONS = ("us-east-1", "ap-south-1")
MEASURED = {
    "g4dn.12xlarge": 0.004,
    "g4dn.xlarge": 0.016,
    "g5.12xlarge": 0.001,
}  # seconds a sample of a machine
UNPRICED = ("p6-b200.48xlarge", "p6-b300.48xlarge")  # of the fastest devices
FACTS = {"parameters": 25_000_000, "gradient_bytes": 100_000_000, "flops_per_sample": 8e9}
TOML = """
[workloads.imported-net]
samples = 9_000_000
global_batch = 256
goals = [{ goal = "cheapest_within_deadline", hours = 40 }]
"""


def write_measurements(file: Path) -> None:
    """Write runs of a synthetic network."""
    devices = {one.name: one.devices for one in packaged().instance_types}
    rows = [
        (f"{count}x{name}", batch, 0.02 + batch * devices[name] * sample_s + 0.05 * (1 - 1 / count))
        for name, sample_s in MEASURED.items()
        for count in (1, 2, 4)
        for batch in (8, 16, 32, 64)
    ]
    frame = pd.DataFrame(rows, columns=["cluster", "batch_per_device", "step_s"])
    frame.assign(workload="imported-net", **FACTS).to_csv(file, index=False)


class Market:
    """An installation that considers all of EC2, and the emulated AWS that it asks."""

    def __init__(self, folder: Path) -> None:
        (folder / "srift.toml").write_text(TOML)
        settings = load_settings(folder / "srift.toml").model_copy(
            update={"home": folder / "state"}
        )
        self.home = settings.home
        self.home.mkdir()
        self.choices = ec2_settings.Ec2(regions=REGIONS, instance_types=("*",))
        usd = {one: dict(packaged().usd[one]) | dict.fromkeys(UNPRICED) for one in REGIONS}
        spot = {
            region: {
                (name, region + zone): 0.4 * listed
                for name, listed in usd[region].items()
                if listed
                for zone in "abc"
            }
            for region in REGIONS
        }
        self.world = FakeAws(account=Account(usd=usd, spot_usd=spot))
        self.here = Workspace(
            settings=settings,
            warehouse=fresh(settings.home),
            provider=self.provider(),
        )
        self.take_prices("first")
        write_measurements(folder / "rows.csv")
        files = imports.ImportFiles(measurements=folder / "rows.csv")
        imports.import_measurements(self.here.warehouse, files, datetime(2026, 11, 20, tzinfo=UTC))
        data = TrainingData(**training_frames(self.here.warehouse, "ec2"))
        self.champion = Champion(version=1, model=fit(data, seed=1))
        self.table = self.publish("first")

    def provider(self) -> Ec2Provider:
        """Return a provider that has asked nothing yet."""
        home = self.home
        return Ec2Provider(self.choices, self.world.clients, home=home, node_package=home)

    def take_prices(self, snapshot: str) -> None:
        """As the flow `market` does."""
        self.here = replace(self.here, provider=self.provider())
        now = datetime.now(UTC)
        prices.note_definitions(self.here, now)
        prices.snapshot_offers(self.here, snapshot, now)

    def publish(self, publication: str) -> pd.DataFrame:
        """As the flow `publish` does; returns what a reader of the exported file sees."""
        runs = mart(self.here.warehouse, "runs", provider="ec2")
        offers = prices.current_offers(self.here)
        rows = recommend.recommend_all(self.here, self.champion, offers, runs)
        publish.store_publication(self.here, rows, self.champion, publication, datetime.now(UTC))
        publish.export_copies(self.here)
        file = str(self.here.published / "recommendations.duckdb")
        with duckdb.connect(file, read_only=True) as published:
            return published.execute("select * from recommendations order by goal, rank").df()


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Market:
    """After the first prices, the imports, a model, and the first publication."""
    return Market(tmp_path_factory.mktemp("market"))


def test_a_price_that_nobody_tells_is_null_to_the_end_of_the_chain(market: Market) -> None:
    for name in UNPRICED:
        offers = mart(market.here.warehouse, "offers", provider="ec2", instance_type=name)
        assert len(offers) > 1 and offers["usd_per_hour"].isna().all()
    table = market.table
    named = table[table["cluster"].fillna("").str.contains("|".join(UNPRICED))]
    assert len(named) and set(named["goal"]) == {"fastest"}
    assert named[["usd", "usd_p90", "usd_per_million_samples"]].isna().all(axis=None)
    members = [one for offer in named["cluster_offers"] for one in offer]
    assert {one["usd_per_hour"] for one in members if one["instance_type"] in UNPRICED} == {None}
    assert table[table["goal"] == "cheapest"]["usd"].gt(0).all()


def test_spot_of_a_zone_stands_in_the_table_with_that_zone_and_its_price(market: Market) -> None:
    offers = mart(market.here.warehouse, "offers", provider="ec2")
    keys = ["instance_type", "market", "zone", "region"]
    known = offers.set_index(keys)["usd_per_hour"].to_dict()
    table = market.table.dropna(subset=["cluster"])
    seen = [
        (one, row["region"]) for row in table.to_dict("records") for one in row["cluster_offers"]
    ]
    spot = [(one, region) for one, region in seen if one["market"] == "spot"]
    assert spot and all(
        one["zone"].startswith(region) and one["zone"] != region for one, region in spot
    )
    for one, region in seen:
        price = known[one["instance_type"], one["market"], one["zone"], region]
        assert one["usd_per_hour"] == price or (one["usd_per_hour"] is None and pd.isna(price))


def test_a_changed_price_is_published(market: Market) -> None:
    """Last: it changes the market."""
    before = market.table[market.table["goal"] == "cheapest"].iloc[0]
    for region in REGIONS:
        market.world.account.usd[region]["g4dn.xlarge"] = 0.0001  # type: ignore[index]
        spot = market.world.account.spot_usd[region]  # type: ignore[index]
        spot.update({("g4dn.xlarge", region + "a"): 9.0})  # type: ignore[union-attr]
    market.take_prices("second")
    after = market.publish("second")
    first = after[after["goal"] == "cheapest"].iloc[0]
    assert "g4dn.xlarge" in first["cluster"] and first["usd_machines"] < before["usd_machines"] / 10
    assert first["usd"] < before["usd"]
    assert first["usd"] == first["usd_machines"] + first["usd_storage"] + first["usd_other"]
    history = market.here.warehouse.select("select distinct snapshot_id from raw_offers")
    assert sorted(history["snapshot_id"]) == ["first", "second"]

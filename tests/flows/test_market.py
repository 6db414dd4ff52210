"""EC2's market: all types of some regions are read, stored and published from emulated AWS."""

from dataclasses import replace
from datetime import UTC, datetime

import duckdb
import pandas as pd
import pytest

from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.data_files import imports
from tasks.market import offers as prices
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.snapshot import packaged
from tasks.recommendation import publication, recommend
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


def write_measurements(file):
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


@pytest.fixture
def account():
    usd = {region: dict(packaged().usd[region]) | dict.fromkeys(UNPRICED) for region in REGIONS}
    spot = {
        region: {(name, f"{region}{zone}"): 0.4 * price for zone in "abc" for name, price in known}
        for region in REGIONS
        for known in [[(name, price) for name, price in usd[region].items() if price]]
    }
    return Account(usd=usd, spot_usd=spot)


def take_prices(workspace, account, name):
    """As the flow `market`, with a provider that has asked nothing yet."""
    home, choices = workspace.home, Ec2(regions=REGIONS, instance_types=("*",))
    provider = Ec2Provider(choices, FakeAws(account=account).clients, home=home, node_package=home)
    here = replace(workspace, provider=provider)
    prices.note_definitions(here, datetime.now(UTC))
    prices.snapshot_offers(here, name, datetime.now(UTC))
    return here


def publish(here, champion, name):
    """As the flow `publish`; return what a reader of the file sees."""
    runs = mart(here.warehouse, "runs", provider="ec2")
    rows = recommend.recommend_all(here, champion, prices.current_offers(here), runs)
    publication.store_publication(here, rows, champion, name, datetime.now(UTC))
    publication.export_copies(here)
    with duckdb.connect(str(here.published / "recommendations.duckdb"), read_only=True) as file:
        return file.execute("select * from recommendations order by goal, rank").df()


def test_prices_of_the_market_are_those_of_the_published_table(tmp_path, account):
    (tmp_path / "srift.toml").write_text(TOML)
    home = tmp_path / "state"
    home.mkdir()
    settings = load_settings(tmp_path / "srift.toml").model_copy(update={"home": home})
    unused = None
    workspace = Workspace(settings=settings, warehouse=fresh(home), provider=unused)
    here = take_prices(workspace, account, "first")
    write_measurements(tmp_path / "rows.csv")
    files = imports.ImportFiles(measurements=tmp_path / "rows.csv")
    imports.import_measurements(workspace.warehouse, files, datetime(2026, 11, 20, tzinfo=UTC))
    data = TrainingData(**training_frames(workspace.warehouse, "ec2"))
    champion = Champion(version=1, model=fit(data, seed=1))
    table = publish(here, champion, "first")

    # A price that nobody names is null to the end of the chain.
    named = table[table["cluster"].fillna("").str.contains("|".join(UNPRICED))]
    assert len(named) and set(named["goal"]) == {"fastest"}
    assert named[["usd", "usd_p90", "usd_per_million_samples"]].isna().all(axis=None)
    assert table[table["goal"] == "cheapest"]["usd"].gt(0).all()

    # Each member has the price of its type, market and zone.
    offers = mart(workspace.warehouse, "offers", provider="ec2")
    keys = ["region", "instance_type", "market", "zone"]
    known = offers.set_index(keys)["usd_per_hour"].to_dict()
    for row in table.dropna(subset=["cluster"]).to_dict("records"):
        for one in row["cluster_offers"]:
            price = known[row["region"], one["instance_type"], one["market"], one["zone"]]
            assert one["usd_per_hour"] == (None if pd.isna(price) else price)
            assert one["market"] != "spot" or one["zone"][:-1] == row["region"]
    assert "spot" in set(table["market"])

    # A changed price is published.
    assert account.usd is not None
    for region in REGIONS:
        account.usd[region]["g4dn.xlarge"] = 0.0001  # type: ignore[index]
    before = table[table["goal"] == "cheapest"].iloc[0]
    after = publish(take_prices(here, account, "second"), champion, "second")
    first = after[after["goal"] == "cheapest"].iloc[0]
    assert "g4dn.xlarge" in first["cluster"] and first["usd_machines"] < before["usd_machines"] / 10
    assert first["usd"] == first["usd_machines"] + first["usd_storage"] + first["usd_other"]
    assert set(workspace.warehouse.select("raw_offers")["snapshot_id"]) == {"first", "second"}

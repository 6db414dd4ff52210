"""EC2 from launch to table in the emulated world, in a small form; `make refresh-emulated` is the
whole of it.
"""

import os
import time
from datetime import UTC, datetime

import pytest

from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.campaign.budget import Tally
from tasks.campaign.campaign import serve_launch
from tasks.execution.collect import collect
from tasks.workspace.workspace import open_workspace
from tests.world import World
from tests.world.proof import UNEQUAL, Campaign, Operator, prove

needs_machines = pytest.mark.skipif(bool(World.why_not()), reason=World.why_not())
pytestmark = [pytest.mark.local, pytest.mark.slow, needs_machines]


def test_machines_of_both_markets_equal_and_unequal_are_bought_trained_on_and_given_back(tmp_path):
    campaigns = [
        Campaign(market="spot", machines=2, code="repository"),
        Campaign(market="on-demand", machines=2, types=UNEQUAL),
    ]
    with World(seed=5) as world:
        proof = prove(world, tmp_path, campaigns, minutes=2.0)
        assert proof.wrong + world.faults() == []
        consoles = [world.console(one) for launch in world.account.launches for one in launch.ids]
    assert {name.split()[1] for name in proof.clusters} == {"spot", "on-demand"}
    assert {"ec2:CreateFleet", "s3:PutObject"} <= set(world.front.actions)
    assert not [console for console in consoles if "srift:" in console]


READS = """
import os
from pathlib import Path
import torch

def build(data):
    width = len(Path(data, "deep", "width.txt").read_text())
    assert not any(os.access(one, os.W_OK) for one in (data, *Path(data).rglob("*")))
    assert os.getuid() != 0 and not [name for name in os.environ if name.startswith("AWS")]
    model = torch.nn.Linear(width, 1)

    def make_batch(batch):
        return torch.randn(batch, width), torch.randn(batch, 1)

    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.01)
"""


def test_machines_fetch_data_and_data_that_they_may_not_read_cost_their_own_runs_alone(
    tmp_path, monkeypatch
):
    near = tmp_path / "project" / "near"
    with World(seed=5) as world:
        operator = Operator(folder=tmp_path / "project", world=world)
        operator.settle_in(Campaign(market="spot", machines=2), 2.0)
        (tmp_path / "project" / "reads.py").write_text(READS)
        (near / "deep").mkdir(parents=True)
        (near / "deep" / "width.txt").write_text("xxx")
        (near / "large.bin").write_bytes(os.urandom(20_000_000))
        file = tmp_path / "project" / "srift.toml"
        addresses = {"near": "near", "far": f"s3://{world.bucket}/elsewhere"}
        stated = [
            f'[workloads.{name}]\ndata = "{data}"\n{OF_DATA}' for name, data in addresses.items()
        ]
        file.write_text(file.read_text() + "".join(stated))
        world.client("s3").put_object(
            Bucket=world.bucket, Key="elsewhere/deep/width.txt", Body=b"xxxx"
        )
        for name, value in operator.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path / "project")
        workspace = open_workspace("ec2")
        workspace.warehouse.create()
        offers = workspace.provider.offers(datetime.now(UTC))
        monkeypatch.setattr("tasks.campaign.budget.current_offers", lambda _: offers)
        offer = next(one for one in offers if one.market == "spot")
        runs = (("near", (0, 1)), ("far", (0, 1)), ("sine", (0,)), ("near", (1,)))
        launch = PlannedLaunch(
            cluster=Cluster.of((2, offer)),
            items=tuple(
                PlannedRun(
                    kind="train",
                    workload=name,
                    nodes=nodes,
                    batches=(8,) * len(nodes),
                    reason="r",
                    est_s=9.0,
                )
                for name, nodes in runs
            ),
            est_s=60.0,
            est_usd=0.01,
            reason="r",
        )
        tally = Tally(cap_usd=5.0, stop_at=time.monotonic() + 200.0, refresh_id="r")
        served = serve_launch(workspace, launch, "r-00", tally)
        tally.add(served, collect(workspace, datetime.now(UTC)), load_s=0.0)
        stored = world.client("s3").list_objects_v2(Bucket=world.bucket, Prefix="srift/data/")[
            "Contents"
        ]
        assert world.faults() == [] and world.alive() == []
    records = workspace.warehouse.select("raw_runs").set_index("run_id")
    assert records["status"].to_dict() == {
        "r-00-000": "measured", "r-00-001": "failed", "r-00-002": "measured", "r-00-003": "measured"
    }, (served.outcome, records["reason"].to_dict())  # fmt: skip
    assert set(records.loc[["r-00-000", "r-00-003"], "parameters"]) == {3 + 1}
    failed = records.loc["r-00-001"]
    assert "(AccessDenied)" in failed["reason"] and failed["cause"] == "data"
    assert list(tally.lacking) == ["far"] and workspace.provider.ended() == []
    assert sorted(one["Size"] for one in stored) == [3, 20_000_000]


OF_DATA = 'entrypoint = "reads.py:build"\nsamples = 1000\nglobal_batch = 16\n'

"""EC2 from launch to table in the emulated world, in a small form; `make refresh-emulated` is the
whole of it.
"""

import os

import pytest

from tests.world import World
from tests.world.proof import REFRESH, UNEQUAL, Campaign, Operator, prove

needs_machines = pytest.mark.skipif(bool(World.why_not()), reason=World.why_not())
pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.emulated, needs_machines]


def test_machines_of_both_markets_equal_and_unequal_are_bought_trained_on_and_given_back(tmp_path):
    campaigns = [
        Campaign(market="spot", machines=2, code="repository"),
        Campaign(market="on-demand", machines=2, types=UNEQUAL),
    ]
    with World(seed=5) as world:
        proof = prove(world, tmp_path, campaigns, minutes=2.0)
        assert proof.wrong + world.faults() == []
        consoles = [
            world.console(instance_id)
            for launch in world.account.launches
            for instance_id in launch.ids
        ]
    assert {name.split()[1] for name in proof.clusters} == {"spot", "on-demand"}
    assert {"ec2:CreateFleet", "s3:PutObject"} <= set(world.front.actions)
    faults = [line for text in consoles for line in text.splitlines() if "srift:" in line]
    # a busy computer may answer a check for an interruption notice too late
    assert all("spot/instance-action: <urlopen error timed out>" in line for line in faults)


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


OF_DATA = """
[workloads.{}]
data = "{}"
entrypoint = "reads.py:build"
samples = 1000
global_batch = 16
"""


def test_machines_fetch_data_and_data_that_they_may_not_read_cost_their_own_runs_alone(tmp_path):
    near = tmp_path / "near"
    (near / "deep").mkdir(parents=True)
    (near / "deep/width.txt").write_text("xxx")
    (near / "large.bin").write_bytes(os.urandom(20_000_000))
    with World(seed=5) as world:
        operator = Operator(folder=tmp_path, world=world)
        operator.settle_in(Campaign(market="spot", machines=2), 2.0)
        (tmp_path / "reads.py").write_text(READS)
        with (tmp_path / "srift.toml").open("a") as file:
            file.write(OF_DATA.format("near", "near"))
            file.write(OF_DATA.format("far", f"s3://{world.bucket}/elsewhere"))
        store = world.client("s3")
        store.put_object(Bucket=world.bucket, Key="elsewhere/deep/width.txt", Body=b"xxxx")
        done = operator.srift(*REFRESH)
        stored = store.list_objects_v2(Bucket=world.bucket, Prefix="srift/data/")["Contents"]
        assert done.returncode == 0, done.stderr
        assert world.faults() == world.alive() == []
    runs = operator.rows("select workload, status, cause, parameters, reason from raw_runs")
    found = {(workload, status, cause or "") for workload, status, cause, *_ in runs if workload}
    assert found == {("near", "measured", ""), ("sine", "measured", ""), ("far", "failed", "data")}
    assert {parameters for workload, *_, parameters, _ in runs if workload == "near"} == {3 + 1}
    assert all("(AccessDenied)" in reason for workload, *_, reason in runs if workload == "far")
    assert sorted(item["Size"] for item in stored) == [3, 20_000_000]

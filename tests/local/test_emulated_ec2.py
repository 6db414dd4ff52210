"""EC2 from launch to table in the emulated world, in a small form; `make refresh-emulated` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.emulated import needs_machines
from tests.world import World
from tests.world.proof import UNEQUAL, Campaign, prove

pytestmark = [pytest.mark.local, pytest.mark.emulated, needs_machines]


def test_machines_of_both_markets_equal_and_unequal_are_bought_trained_on_and_given_back(tmp_path: Path) -> None:
    campaigns = [
        Campaign(market="spot", machines=2, repository=True),
        Campaign(market="on-demand", machines=2, types=UNEQUAL),
    ]
    with World(seed=5) as world:
        proof = prove(world, tmp_path, campaigns, minutes=1.3)
        assert proof.wrong + world.faults() == []
        actions = {action for action, _ in world.asked}
        spoken = [world.console(one) for launch in world.launches for one in launch.ids]
    assert {market for market, _ in proof.clusters} == {"spot", "on-demand"}
    assert {"ec2:RunInstances", "ec2:CreateFleet", "s3:PutObject"} <= actions
    assert not [one for one in spoken if "srift:" in one], "a machine had something to complain of"

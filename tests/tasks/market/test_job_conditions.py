"""Launches change what the table predicts; without launches the stated prior holds."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from models.domain.cluster import Pool
from models.domain.workload import Goal
from models.job.duration import STARTUP_S
from tasks.market.job_conditions import EC2_STARTUP_S, LOCAL_SLOPE, experience_of
from tasks.market.offers import snapshot_offers
from tasks.recommendation.case import Case
from tests.installed import NOON, DescribedMachines, champion, install, measured
from tests.warehouse.builders import write
from warehouse.append import append


@pytest.fixture
def ec2(tmp_path):
    return install(tmp_path, provider=DescribedMachines(name="ec2"))


def held(here, count, **changes):
    """Add machines of a launch each to the warehouse."""
    row = {"node": 0, "number": 0, "provider": here.provider.name, "instance_type": "s.small"}
    row |= {"market": "on-demand", "zone": "a", "startup_s": 200.0, "hours": 1.0}
    row |= {"interrupted": False, "refresh_id": "r"}
    rows = [
        row | {"lease_id": f"{changes} {at}", "asked_at": NOON - timedelta(days=1 + at)} | changes
        for at in range(count)
    ]
    write(here.warehouse, append, "raw_machines", rows)


def learned(here):
    return experience_of(here).conditions


def cheapest_hours(here):
    """Hours of on-demand clusters of s.small for the goal cheapest."""
    conv = replace(here.workloads[0], goals=(Goal(goal="cheapest"),))
    sold = here.provider.offers(NOON)
    offers = [o for o in sold if (o.instance_type.name, o.market) == ("s.small", "on-demand")]
    rows = Case.of(here, champion(), conv, offers, measured().runs).plan().rows
    return {row["cluster"]: row["hours"] for row in rows}


def test_launches_move_the_hours_of_the_table(tmp_path):
    here = install(tmp_path)
    assert experience_of(here).costs.launch_s == 12.0
    before = cheapest_hours(here)
    held(here, 20)
    more = {name: (hours - before[name]) * 3600 for name, hours in cheapest_hours(here).items()}
    assert more["1xs.small"] == pytest.approx(200.0 - STARTUP_S, abs=25)
    assert more["2xs.small"] == pytest.approx(200.0 * 2 ** LOCAL_SLOPE[0] - STARTUP_S, abs=25)
    here.warehouse.path.unlink()
    assert cheapest_hours(here) == before


def test_local_hosts_start_alike_in_both_markets(tmp_path):
    """Otherwise the market that never ran looks the fastest."""
    here = install(tmp_path)
    held(here, 20)
    assert learned(here).hazard is None
    both = learned(here).startup.log_medians([("on-demand", "s.large"), ("spot", "s.large")])
    assert both[0, 0] == both[1, 0] and 120 < np.exp(both[0, 0]) < 220
    assert 120 < experience_of(here).costs.launch_s < 220


def test_without_launches_ec2_has_the_prior_and_the_advised_rates(ec2):
    conditions = learned(ec2)
    assert conditions.availability is not None
    log_median, doubt = conditions.startup.log_medians([("spot", "s.small")])[0]
    assert np.exp(log_median) == pytest.approx(EC2_STARTUP_S["spot"]) and doubt > 0.5
    assert conditions.hazard.rates([Pool("s.small", "spot", "a", 0.2)])[0, 0] == pytest.approx(0.2)


def test_interruptions_raise_the_hazard_of_a_zone_and_quiet_hours_lower_it(ec2):
    snapshot_offers(ec2, "refresh-1", NOON)
    offers = {(o.instance_type.name, o.market): o for o in ec2.provider.offers(NOON)}
    advised = offers["s.small", "spot"].interruptions_per_hour
    held(ec2, 30, market="spot", zone="bad", hours=4.0, interrupted=True)
    held(ec2, 60, market="spot", zone="calm", hours=24.0)
    hazard = learned(ec2).hazard
    pools = [Pool("s.small", "spot", zone, advised) for zone in ("bad", "calm")]
    bad, calm = hazard.rates(pools)[:, 0]
    assert calm < advised / 4 and bad > 10 * calm

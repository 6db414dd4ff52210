"""Our own launches move what the table says; until there are any the stated prior stands."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.domain.workload import Goal
from models.job import duration as spot
from models.job.job_conditions import Learned, Stated
from tasks.market.job_conditions import (
    EC2_STARTUP_S,
    LOCAL_SLOPE,
    LOCAL_STARTUP_S,
    costs_of,
    job_conditions,
    seconds_to_work,
    spot_experience,
)
from tasks.market.offers import snapshot_offers
from tasks.recommendation.recommend import Case, plan_one
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, champion, install, measured
from tests.warehouse.builders import setup
from warehouse import append


def ec2(folder: Path) -> Workspace:
    return install(folder, provider=DescribedMachines(name="ec2"))


def held(here: Workspace, count: int, **changes: Any) -> None:
    """So many machines in the warehouse, of a launch each."""
    row = {
        "node": 0,
        "number": 0,
        "provider": here.provider.name,
        "instance_type": "s.small",
        "market": "on-demand",
    }
    row |= {"zone": "a", "startup_s": 200.0, "hours": 1.0, "interrupted": False, "refresh_id": "r"}
    rows = [
        row | {"lease_id": f"{changes} {at}", "asked_at": NOON - timedelta(days=1 + at)} | changes
        for at in range(count)
    ]
    with here.warehouse.transact() as connection:
        append.append(connection, "raw_machines", rows)


def cheapest_hours(here: Workspace, market: str = "on-demand") -> dict[str, float]:
    """Hours of clusters of s.small for the goal cheapest."""
    conv = replace(here.workloads[0], goals=(Goal(goal="cheapest"),))
    offers = [
        one
        for one in here.provider.offers(NOON)
        if one.market == market and one.instance_type.name == "s.small"
    ]
    rows = plan_one(Case.of(here, champion(), conv, offers), measured().runs).rows
    return {row["cluster"]: row["hours"] for row in rows}


def test_twenty_launches_of_200_s_move_the_hours_of_the_table_and_without_any_the_prior_stands(
    tmp_path: Path,
) -> None:
    here = install(tmp_path)
    assert job_conditions(here) == Stated()
    before = cheapest_hours(here)
    held(here, 20)
    after = cheapest_hours(here)
    assert set(after) == set(before) == {"1xs.small", "2xs.small"}
    more = {cluster: (hours - before[cluster]) * 3600 for cluster, hours in after.items()}
    assert more["1xs.small"] == pytest.approx(200.0 - spot.STARTUP_S, abs=25)
    two = 200.0 * 2 ** LOCAL_SLOPE[0] - spot.STARTUP_S
    assert more["2xs.small"] == pytest.approx(two, abs=25)
    here.warehouse.path.unlink()
    assert job_conditions(here) == Stated()


def test_launches_of_one_type_tell_of_the_others_and_little_of_another_market(
    tmp_path: Path,
) -> None:
    here = ec2(tmp_path)
    held(here, 20)
    conditions = job_conditions(here)
    (other, _), (spots, _) = conditions.startup.log_medians(
        [("on-demand", "s.large"), ("spot", "s.small")]
    )
    assert 120 < np.exp(other) < 220 and np.exp(spots) == pytest.approx(EC2_STARTUP_S["spot"])


def test_local_hosts_start_alike_in_both_markets_whichever_was_launched(tmp_path: Path) -> None:
    """Else the market that never ran looks the fastest."""
    here = install(tmp_path)
    held(here, 20)
    conditions = job_conditions(here)
    assert isinstance(conditions, Learned) and conditions.hazard is None
    by_market = {
        market: float(np.exp(conditions.startup.log_medians([(market, "s.large")])[0, 0]))
        for market in LOCAL_STARTUP_S
    }
    assert 120 < by_market["on-demand"] < 220 and by_market["spot"] == by_market["on-demand"]
    assert seconds_to_work(here, "spot") == seconds_to_work(here, "on-demand") > 120


def test_a_campaign_reckons_with_what_launches_took(tmp_path: Path) -> None:
    here = install(tmp_path)
    market = here.settings.campaign.market
    stated = costs_of(here)
    assert seconds_to_work(here, market) is None and stated.launch_s == 12.0
    held(here, 20, market=market)
    assert 120.0 < costs_of(here).launch_s < 220.0 and costs_of(here).build_s == stated.build_s


def test_before_the_first_launch_ec2_goes_by_the_prior_and_the_advised_rates(
    tmp_path: Path,
) -> None:
    here = ec2(tmp_path)
    conditions = job_conditions(here)
    assert (
        isinstance(conditions, Learned)
        and conditions.hazard is not None
        and conditions.availability is not None
    )
    log_median, doubt = conditions.startup.log_medians([("spot", "s.small")])[0]
    assert np.exp(log_median) == pytest.approx(EC2_STARTUP_S["spot"]) and doubt > 0.5
    assert conditions.hazard.rates([("s.small", "a", 0.2)])[0, 0] == pytest.approx(0.2)


def test_what_ec2_took_away_raises_the_hazard_there_and_hours_in_peace_lower_it(
    tmp_path: Path,
) -> None:
    here = ec2(tmp_path)
    snapshot_offers(here, "refresh-1", NOON)
    offers = {(o.instance_type.name, o.market): o for o in here.provider.offers(NOON)}
    advised = offers["s.small", "spot"].interruptions_per_hour
    held(here, 30, market="spot", zone="bad", hours=4.0, interrupted=True)
    held(here, 60, market="spot", zone="calm", hours=24.0)
    conditions = job_conditions(here)
    assert isinstance(conditions, Learned) and conditions.hazard is not None
    bad, calm = conditions.hazard.rates([("s.small", zone, advised) for zone in ("bad", "calm")])[
        :, 0
    ]
    assert calm < advised / 4 and bad > 10 * calm


def test_refusals_and_grants_say_how_long_one_waits(tmp_path: Path) -> None:
    here = ec2(tmp_path)
    held(here, 20, market="spot", zone="open")
    refused = [
        {
            "run_id": f"r{n}",
            "lease_id": f"r{n}",
            "kind": "launch",
            "status": "refused",
            "reason": "none left",
        }
        | {
            "setup": setup(provider="ec2", cluster="2xs.small", market="spot", zone="full"),
            "ended_unix": 1e9,
        }
        for n in range(20)
    ]
    with here.warehouse.transact() as connection:
        append.append_records(connection, refused, refresh_id="r", loaded_at=NOON)
    conditions = job_conditions(here)
    assert isinstance(conditions, Learned) and conditions.availability is not None
    granted = conditions.availability.granted
    assert granted["s.small", "spot", "full"] < 0.3 < 0.9 < granted["s.small", "spot", "open"]


def test_own_launches_on_spot_are_described_in_words_and_local_hosts_have_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "local").mkdir()
    here, local = ec2(tmp_path), install(tmp_path / "local")
    assert spot_experience(here) == {}
    for one in (here, local):
        held(one, 3, market="spot", instance_type="s.large", hours=12.5)
        held(one, 1, market="spot", instance_type="s.large", interrupted=True)
        held(one, 5)
    assert spot_experience(here) == {
        "s.large": "own launches: 1 interruption in 38.5 machine-hours, the last on 2026-11-19"
    }
    assert spot_experience(local) == {}

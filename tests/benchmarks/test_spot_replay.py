"""Jobs replayed on recorded prices: the bid rule by hand, and the percentile on what was not learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.spot_replay import (
    Prices,
    exceeded,
    jobs,
    read_checkpoints,
    read_launches,
    read_prices,
    read_spot_prices,
    replay_scores,
)

DATA = Path(__file__).parents[3] / "shared" / "data"


def test_a_machine_is_lost_when_the_price_exceeds_its_bid_and_bids_anew() -> None:
    pool = Prices(
        hours=np.array([0.0, 5.0, 10.0, 12.0, 20.0]), usd=np.array([1.0, 1.1, 1.2, 0.9, 1.3])
    )
    assert pool.losses(0.0, 100.0, 0.15) == (
        10.0,
    )  # 1.1 is within the first bid, 1.3 within the second
    assert pool.losses(6.0, 100.0, 0.0) == (10.0, 20.0)
    assert pool.losses(6.0, 100.0, 0.2) == ()  # launched at 1.1, bids 1.32
    assert pool.losses(0.0, 10.0, 0.0) == (5.0, 10.0)
    level = Prices(hours=np.array([0.0, 5.0]), usd=np.array([1.0, 1.0]))
    assert level.losses(0.0, 9.0, 0.0) == ()  # a price that is repeated has not risen


def test_jobs_start_and_end_within_the_record_and_the_seed_decides() -> None:
    rows = [("a", f"r-{zone}", float(hour), 1.0) for zone in "xyz" for hour in range(0, 400, 10)]
    prices = read_prices(
        pd.DataFrame(rows, columns=["instance_type", "zone", "hours", "usd_per_hour"])
    )
    written = pd.DataFrame({"group": ["n", "n"], "mb": 10.0, "seconds": [4.0, 4.2]})

    def drawn(seed: int) -> list:
        startups = {"a": np.array([60.0, 70.0])}
        return list(
            jobs(prices, 100.0, 390.0, many=30, seed=seed, startups=startups, checkpoints=written)
        )

    first = drawn(1)
    assert len(first) == 30 and first == drawn(1) != drawn(2)
    assert all(job.start >= 100 and job.start + 1.5 * job.work_hours <= 390 for job in first)
    assert {len(set(job.machines)) for job in first} == {1, 2, 3}


@pytest.mark.skipif(not DATA.exists(), reason="no shared data")
def test_the_stated_90th_percentile_is_exceeded_by_about_a_tenth_of_jobs_never_seen() -> None:
    record = read_spot_prices(DATA / "spot_prices.csv")
    launches = read_launches(DATA / "vm_startup.csv", sorted(record["instance_type"].unique()))
    written = read_checkpoints(DATA / "checkpoint_times.csv")
    scored = replay_scores(read_prices(record), written, launches, margin=0.01, many=400, seed=2026)
    found = exceeded(scored).set_index("split")
    assert (found["jobs"] >= 100).all() and (found["interruptions_a_job"] > 0).all()
    assert found["over_p90_%"].between(5, 15).all(), found["over_p90_%"]
    assert found["actual_over_expected"].between(0.98, 1.02).all()

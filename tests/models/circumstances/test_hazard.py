"""Interruptions: the Advisor's bucket until zones are known, and bunching wide enough to be honest."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.circumstances.hazard import bucket_hazard, fit_hazard

NONE = pd.DataFrame({"instance_type": [], "zone": [], "hours": [], "interruptions": []})


def windows(rates: dict[str, float], days: int = 60, *, bunched: float = 0.0, seed: int = 1) -> pd.DataFrame:
    """A day a window; `rates` an hour by zone; the rate of a day is Gamma of mean 1 and variance `bunched`."""
    rng = np.random.default_rng(seed)
    rows = []
    for zone, rate in rates.items():
        shock = rng.gamma(1 / bunched, bunched, days) if bunched else np.ones(days)
        rows += [("a", zone, 24.0, int(rng.poisson(24 * rate * one))) for one in shock]
    return pd.DataFrame(rows, columns=list(NONE.columns))


def test_a_worse_bucket_is_a_higher_hazard_and_without_data_it_is_the_hazard() -> None:
    hazards = [bucket_hazard(bucket) for bucket in range(5)]
    assert hazards == sorted(hazards) and hazards[0] > 0
    model = fit_hazard(NONE, buckets={"good": 0, "bad": 4})
    good, bad = (model.machine(name, "z", hours=10.0) for name in ("good", "bad"))
    assert (good.per_hour, bad.per_hour) == pytest.approx((hazards[0], hazards[4]))
    assert good.doubt > 1  # a bucket says little of one zone


def test_own_hours_move_a_zone_from_its_bucket_to_its_own_rate() -> None:
    model = fit_hazard(windows({"quiet": 0.0, "busy": 0.05, "also": 0.04}), buckets={"a": 0})
    quiet, busy, new = (model.machine("a", zone, hours=10.0) for zone in ("quiet", "busy", "new"))
    assert busy.per_hour == pytest.approx(0.05, rel=0.35)
    assert quiet.per_hour < 0.2 * busy.per_hour
    assert quiet.per_hour < new.per_hour < 2 * busy.per_hour
    assert new.doubt > busy.doubt


def test_types_never_launched_learn_from_the_others_how_the_buckets_count() -> None:
    seen = pd.concat([windows({"x": 0.03, "y": 0.02}).assign(instance_type=name) for name in "abcde"])
    told = fit_hazard(seen, buckets=dict.fromkeys("abcdez", 1)).machine("z", "x", hours=5.0)
    untold = fit_hazard(NONE, buckets={"z": 1}).machine("z", "x", hours=5.0)
    assert told.per_hour > 3 * untold.per_hour


def test_bunched_interruptions_are_found_to_be_bunched() -> None:
    rates = dict.fromkeys("uvwxyz", 0.05)
    even, bunched = (fit_hazard(windows(rates, bunched=one)) for one in (0.0, 3.0))
    assert bunched.machine("a", "u", hours=24.0).bunching > 2 * even.machine("a", "u", hours=24.0).bunching
    assert bunched.machine("a", "u", hours=1.0).bunching > bunched.machine("a", "u", hours=200.0).bunching


def test_a_job_at_a_bad_hour_meets_more() -> None:
    by_hour = pd.DataFrame(
        {"hour": range(24), "hours": 100.0, "interruptions": [40 if h == 22 else 2 for h in range(24)]}
    )
    model = fit_hazard(windows({"x": 0.02}), by_hour=by_hour)
    bad, good = (model.machine("a", "x", hours=1.0, start_hour=hour).per_hour for hour in (22.0, 10.0))
    assert bad > 3 * good
    whole_day = model.machine("a", "x", hours=24.0, start_hour=22.0).per_hour
    assert whole_day == pytest.approx(model.machine("a", "x", hours=24.0).per_hour)
    across = model.machine("a", "x", hours=2.0, start_hour=22.0).per_hour
    assert good < across < bad


@given(one=st.integers(1, 8), more=st.integers(1, 8))
def test_more_machines_are_lost_no_less_often_and_never_more_than_their_sum(one: int, more: int) -> None:
    model = fit_hazard(windows({"x": 0.02, "y": 0.01}))
    single = model.machine("a", "x", hours=10.0).per_hour
    few, many = (model.gang([("a", "x")] * count, hours=10.0).per_hour for count in (one, one + more))
    assert single * (1 - 1e-9) <= few <= many <= (one + more) * single * (1 + 1e-9)


def test_zones_of_a_gang_add_up_and_even_each_other_out() -> None:
    model = fit_hazard(windows({"x": 0.02, "y": 0.02}, bunched=3.0))
    single = model.machine("a", "x", hours=10.0)
    gang = model.gang([("a", "x"), ("a", "y")], hours=10.0)
    assert gang.per_hour == pytest.approx(single.per_hour + model.machine("a", "y", hours=10.0).per_hour)
    assert gang.bunching < single.bunching
    assert model.gang([], hours=10.0).per_hour == 0


def test_machines_seen_lost_together_share_their_fate() -> None:
    rows = windows({"x": 0.02})
    all_at_once = pd.DataFrame({"machines": [4] * 20, "lost": [4] * 20})
    one_by_one = pd.DataFrame({"machines": [4] * 20, "lost": [1] * 20})
    together, apart = (fit_hazard(rows, together=one) for one in (all_at_once, one_by_one))
    gang = [("a", "x")] * 4
    assert apart.gang(gang, hours=10.0).per_hour > 2.5 * together.gang(gang, hours=10.0).per_hour


def test_no_exposure_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_hazard(pd.DataFrame([("a", "x", 0.0, 1)], columns=list(NONE.columns)))

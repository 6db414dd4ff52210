"""Interruptions: the Advisor's bucket until zones are known, and bunching wide enough to be honest."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import bucket_hazard
from models.job.interruption_rates import GangHazards, HazardModel, fit_hazard, passing

NONE = pd.DataFrame({"instance_type": [], "zone": [], "hours": [], "interruptions": []})


def windows(
    rates: dict[str, float], days: int = 60, *, bunched: float = 0.0, seed: int = 1
) -> pd.DataFrame:
    """A day a window; `rates` an hour by zone; the rate of a day is Gamma of mean 1 and variance `bunched`."""
    rng = np.random.default_rng(seed)
    rows = []
    for zone, rate in rates.items():
        shock = rng.gamma(1 / bunched, bunched, days) if bunched else np.ones(days)
        rows += [("a", zone, 24.0, int(rng.poisson(24 * rate * one))) for one in shock]
    return pd.DataFrame(rows, columns=list(NONE.columns))


def per_hour(model: HazardModel, zones: list[str], kind: str = "a") -> float:
    """Interruptions an hour of a gang of machines of one type, one in each of `zones`."""
    return float(hazards(model, zones, kind).per_hour[0])


def hazards(model: HazardModel, zones: list[str], kind: str = "a") -> GangHazards:
    pools = sorted(set(zones))
    return model.gangs(
        [(kind, zone, None) for zone in pools],
        np.array([[float(zones.count(one)) for one in pools]]),
    )


def test_a_worse_bucket_is_a_higher_hazard_and_without_data_it_is_the_hazard() -> None:
    by_bucket = [bucket_hazard(bucket) for bucket in range(5)]
    assert by_bucket == sorted(by_bucket) and by_bucket[0] > 0
    model = fit_hazard(NONE, advised={"good": by_bucket[0], "bad": by_bucket[4]})
    good, bad = (hazards(model, ["z"], name) for name in ("good", "bad"))
    assert (good.per_hour[0], bad.per_hour[0]) == pytest.approx((by_bucket[0], by_bucket[4]))
    assert good.doubt[0] > 1  # a bucket says little of one zone


def test_own_hours_move_a_zone_from_its_bucket_to_its_own_rate() -> None:
    model = fit_hazard(
        windows({"quiet": 0.0, "busy": 0.05, "also": 0.04}), advised={"a": bucket_hazard(0)}
    )
    quiet, busy, new = (per_hour(model, [zone]) for zone in ("quiet", "busy", "new"))
    assert busy == pytest.approx(0.05, rel=0.35)
    assert quiet < 0.2 * busy
    assert quiet < new < 2 * busy
    assert hazards(model, ["new"]).doubt[0] > hazards(model, ["busy"]).doubt[0]


def test_types_never_launched_learn_from_the_others_how_the_buckets_count() -> None:
    seen = pd.concat(
        [windows({"x": 0.03, "y": 0.02}).assign(instance_type=name) for name in "abcde"]
    )
    advised = dict.fromkeys("abcdez", bucket_hazard(1))
    learned, prior = (
        per_hour(fit_hazard(rows, advised=advised), ["x"], "z") for rows in (seen, NONE)
    )
    assert learned > 3 * prior


def test_bunched_interruptions_are_found_to_be_bunched() -> None:
    rates = dict.fromkeys("uvwxyz", 0.05)
    even, bunched = (fit_hazard(windows(rates, bunched=one)) for one in (0.0, 3.0))
    short, day, long = (
        bunched.drift + bunched.shock * float(passing(hours)) for hours in (1.0, 24.0, 200.0)
    )
    assert day > 2 * (even.drift + even.shock * float(passing(24.0)))
    assert short > long


@given(one=st.integers(1, 8), more=st.integers(1, 8))
def test_more_machines_are_lost_no_less_often_and_never_more_than_their_sum(
    one: int, more: int
) -> None:
    model = fit_hazard(windows({"x": 0.02, "y": 0.01}))
    single, few, many = (per_hour(model, ["x"] * count) for count in (1, one, one + more))
    assert single * (1 - 1e-9) <= few <= many <= (one + more) * single * (1 + 1e-9)


def test_zones_of_a_gang_add_up_and_even_each_other_out() -> None:
    model = fit_hazard(windows({"x": 0.02, "y": 0.02}, bunched=3.0))
    single, gang = hazards(model, ["x"]), hazards(model, ["x", "y"])
    assert gang.per_hour[0] == pytest.approx(single.per_hour[0] + per_hour(model, ["y"]))
    assert gang.concentration[0] < single.concentration[0]
    assert per_hour(model, []) == 0


def test_machines_seen_lost_together_share_their_fate() -> None:
    rows = windows({"x": 0.02})
    all_at_once = pd.DataFrame({"machines": [4] * 20, "lost": [4] * 20})
    one_by_one = pd.DataFrame({"machines": [4] * 20, "lost": [1] * 20})
    together, apart = (
        per_hour(fit_hazard(rows, together=one), ["x"] * 4) for one in (all_at_once, one_by_one)
    )
    assert apart > 2.5 * together


def test_no_exposure_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_hazard(pd.DataFrame([("a", "x", 0.0, 1)], columns=list(NONE.columns)))

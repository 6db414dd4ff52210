"""Start-up seconds of gangs, and the chance to get them."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri

from models.domain.cluster import Pool
from models.job.capacity import PRIOR_S, fit_availability, fit_startup, gang_chances, gang_startup

NONE = pd.DataFrame({"instance_type": [], "market": [], "machines": [], "seconds": []})


def launches(kind, market, median_s, count, machines=1):
    seconds = median_s * np.exp(np.random.default_rng(5).normal(0, 0.1, count))
    return pd.DataFrame(
        {"instance_type": kind, "market": market, "machines": machines, "seconds": seconds}
    )


def quantile(model, *machines, at=0.5):
    """Seconds within which machines that are requested together are at work with probability
    `at`.
    """
    pools = sorted(set(machines))
    counts = np.array([[machines.count(pool) for pool in pools]])
    mean_s, log_sd = gang_startup(model, [Pool(*pool, "x", 0.0) for pool in pools], counts)
    return float((mean_s * np.exp(-(log_sd**2) / 2 + log_sd * ndtri(at)))[0])


def test_without_launches_the_prior_is_wide():
    model = fit_startup(NONE)
    assert quantile(model, ("any", "spot")) == pytest.approx(PRIOR_S["spot"], rel=0.01)
    assert quantile(model, ("any", "spot"), at=0.9) > 1.7 * PRIOR_S["spot"]


def test_launches_outweigh_the_prior_and_inform_other_types_of_the_market():
    model = fit_startup(pd.concat([launches(kind, "spot", 200.0, 20) for kind in "abcd"]))
    assert quantile(model, ("a", "spot")) == pytest.approx(200.0, rel=0.1)
    assert 150 < quantile(model, ("z", "spot")) < 210
    demand = quantile(model, ("a", "on-demand"))
    assert demand == pytest.approx(PRIOR_S["on-demand"], rel=0.01)


def test_growth_with_machines_is_learned_for_all_types():
    rows = [launches("a", "spot", 5.0 * n, 8, n) for n in (1, 2, 4)]
    model = fit_startup(pd.concat([*rows, launches("b", "spot", 10.0, 8, 2)]), slope=(0.5, 0.5))
    for kind in "ab":
        assert quantile(model, *[(kind, "spot")] * 4) == pytest.approx(20.0, rel=0.08)


def test_large_launches_as_expected_leave_another_market_as_it_was():
    rows = launches("a", "on-demand", PRIOR_S["on-demand"] * 16**0.5, 20, 16)
    model = fit_startup(rows, slope=(0.5, 0.1))
    assert quantile(model, ("z", "spot")) == pytest.approx(PRIOR_S["spot"], rel=0.01)


def test_refusals_lower_the_chance_and_a_larger_gang_has_less():
    pools = [("a", "spot", "x"), ("a", "spot", "y")]
    rows = [(*pools[0], True)] * 30 + [(*pools[1], False)] * 30
    model = fit_availability(
        pd.DataFrame(rows, columns=["instance_type", "market", "zone", "granted"])
    )
    granted, refused, both, larger = gang_chances(
        model, [Pool(*pool, 0.0) for pool in pools], np.array([[1, 0], [0, 1], [1, 1], [5, 0]])
    )
    assert refused < 0.2 < 0.85 < granted
    assert both == pytest.approx(granted * refused) and 0 < larger < granted

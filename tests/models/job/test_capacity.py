"""Start-up seconds: shrunk from launches to market to prior; a gang waits for its last machine, if it can be had."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from models.job.capacity import PRIOR_S, StartupModel, TypeInMarket, fit_availability, fit_startup

NONE = pd.DataFrame({"instance_type": [], "market": [], "machines": [], "seconds": []})


def launches(kind: str, market: str, median_s: float, many: int, machines: int = 1) -> pd.DataFrame:
    seconds = median_s * np.exp(np.random.default_rng(5).normal(0, 0.1, many))
    return pd.DataFrame(
        {"instance_type": kind, "market": market, "machines": machines, "seconds": seconds}
    )


def gang(model: StartupModel, *machines: TypeInMarket) -> tuple[float, float]:
    """(mean seconds, standard deviation of the log) of machines asked for together."""
    pools = sorted(set(machines))
    mean_s, log_sd = model.gangs(pools, np.array([[machines.count(one) for one in pools]]))
    return float(mean_s[0]), float(log_sd[0])


def quantile(ready: tuple[float, float], at: float) -> float:
    """Seconds within which a gang is ready with probability `at`: start-up is lognormal."""
    mean_s, log_sd = ready
    return float(mean_s * np.exp(-(log_sd**2) / 2 + log_sd * ndtri(at)))


def test_without_launches_the_prior_is_said_with_its_doubt() -> None:
    ready = gang(fit_startup(NONE), ("any", "spot"))
    assert quantile(ready, 0.5) == pytest.approx(PRIOR_S["spot"], rel=0.01)
    assert quantile(ready, 0.9) > 1.7 * PRIOR_S["spot"]


def test_own_launches_outweigh_the_prior_and_tell_of_other_types() -> None:
    seen = pd.concat([launches(kind, "spot", 200.0, 20) for kind in "abcd"])
    model = fit_startup(seen)
    known, new = gang(model, ("a", "spot")), gang(model, ("z", "spot"))
    assert quantile(known, 0.5) == pytest.approx(200.0, rel=0.1)
    assert 150 < quantile(new, 0.5) < 210
    assert new[1] > known[1]
    assert quantile(gang(model, ("a", "on-demand")), 0.5) == pytest.approx(
        PRIOR_S["on-demand"], rel=0.01
    )


@given(many=st.integers(1, 30), few=st.integers(1, 30))
def test_a_larger_gang_is_never_ready_sooner(many: int, few: int) -> None:
    model = fit_startup(launches("a", "spot", 90.0, 10))
    small, large = (gang(model, *[("a", "spot")] * count)[0] for count in sorted((many, few)))
    assert small <= large * (1 + 1e-9)


def test_a_mixed_gang_waits_for_its_slowest_kind() -> None:
    model = fit_startup(
        pd.concat([launches("a", "spot", 300.0, 20), launches("a", "on-demand", 60.0, 20)])
    )
    mixed, alike = (
        gang(model, ("a", "on-demand"), ("a", "spot")),
        gang(model, ("a", "spot"), ("a", "spot")),
    )
    assert mixed[0] == pytest.approx(alike[0], rel=0.01)


def test_ninety_of_a_hundred_launches_are_ready_by_the_90th_percentile() -> None:
    seen = launches("a", "spot", 90.0, 400)
    ready = gang(fit_startup(seen.iloc[:200]), ("a", "spot"))
    assert 0.84 <= float((seen["seconds"].iloc[200:] <= quantile(ready, 0.9)).mean()) <= 0.96


def test_what_more_machines_take_is_learned_and_told_of_types_that_were_never_launched_so() -> None:
    """Hosts on one machine start one after another: twice as many take twice as long."""
    seen = [launches("a", "spot", 5.0 * many, 8, many) for many in (1, 2, 4)]
    model = fit_startup(pd.concat([*seen, launches("b", "spot", 10.0, 8, 2)]), slope=(0.5, 0.5))
    for kind in "ab":
        assert quantile(gang(model, *[(kind, "spot")] * 4), 0.5) == pytest.approx(20.0, rel=0.08)
    independent = fit_startup(
        pd.concat([launches("a", "spot", 90.0, 20, many) for many in (1, 16)])
    )
    assert gang(independent, *[("a", "spot")] * 16)[0] == pytest.approx(
        gang(independent, ("a", "spot"))[0], rel=0.1
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (launches("a", "reserved", 9.0, 1), "market"),
        (launches("a", "spot", 0.0, 1), "above 0"),
        (launches("a", "spot", 9.0, 1, machines=0), "at least one machine"),
    ],
)
def test_what_cannot_be_a_launch_is_refused(rows: pd.DataFrame, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_startup(rows)


def requests(*rows: tuple[str, str, str, bool]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["instance_type", "market", "zone", "granted"])


@given(few=st.integers(1, 6), more=st.integers(1, 6))
def test_a_larger_gang_is_never_easier_to_get(few: int, more: int) -> None:
    pools, counts = [("a", "spot", "z")], np.array([[few + more], [few]], dtype=float)
    large, small = fit_availability(requests()).gangs(pools, counts)
    assert 0 < large < small < 1


def test_refusals_lower_the_chance_and_grants_raise_it() -> None:
    model = fit_availability(
        requests(*[("a", "spot", "x", True)] * 30, *[("a", "spot", "y", False)] * 30)
    )
    assert model.one(("a", "spot", "y")) < 0.2 < 0.85 < model.one(("a", "spot", "x"))
    with pytest.raises(ValueError, match="market"):
        model.one(("a", "reserved", "x"))

"""Start-up seconds: shrunk from launches to market to prior; a gang waits for its last machine."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.circumstances.startup import PRIOR_S, fit_startup

NONE = pd.DataFrame({"instance_type": [], "market": [], "seconds": []})


def launches(kind: str, market: str, median_s: float, many: int) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    return pd.DataFrame(
        {"instance_type": kind, "market": market, "seconds": median_s * np.exp(rng.normal(0, 0.1, many))}
    )


def test_without_launches_the_prior_is_said_with_its_doubt() -> None:
    ready = fit_startup(NONE).gang([("any", "spot")])
    assert ready.quantile(0.5) == pytest.approx(PRIOR_S["spot"], rel=0.01)
    assert ready.quantile(0.9) > 1.7 * PRIOR_S["spot"]


def test_own_launches_outweigh_the_prior_and_tell_of_other_types() -> None:
    seen = pd.concat([launches(kind, "spot", 200.0, 20) for kind in "abcd"])
    model = fit_startup(seen)
    assert model.gang([("a", "spot")]).quantile(0.5) == pytest.approx(200.0, rel=0.1)
    new = model.gang([("z", "spot")])
    assert 150 < new.quantile(0.5) < 210
    assert new.log_sd > model.gang([("a", "spot")]).log_sd
    assert model.gang([("a", "on-demand")]).quantile(0.5) == pytest.approx(PRIOR_S["on-demand"], rel=0.01)


@given(many=st.integers(1, 30), few=st.integers(1, 30))
def test_a_larger_gang_is_never_ready_sooner(many: int, few: int) -> None:
    model = fit_startup(launches("a", "spot", 90.0, 10))
    small, large = sorted((many, few))
    pair = [model.gang([("a", "spot")] * count).mean_s for count in (small, large)]
    assert pair[0] <= pair[1] * (1 + 1e-9)


def test_a_mixed_gang_waits_for_its_slowest_kind() -> None:
    model = fit_startup(pd.concat([launches("a", "spot", 300.0, 20), launches("a", "on-demand", 60.0, 20)]))
    mixed = model.gang([("a", "on-demand"), ("a", "spot")])
    assert mixed.mean_s == pytest.approx(model.gang([("a", "spot")]).mean_s, rel=0.01)


def test_ninety_of_a_hundred_launches_are_ready_by_the_90th_percentile() -> None:
    seen = launches("a", "spot", 90.0, 400)
    ready = fit_startup(seen.iloc[:200]).gang([("a", "spot")])
    assert 0.84 <= float((seen["seconds"].iloc[200:] <= ready.quantile(0.9)).mean()) <= 0.96


@pytest.mark.parametrize(
    ("rows", "says"), [(launches("a", "reserved", 9.0, 1), "market"), (launches("a", "spot", 0.0, 1), "above 0")]
)
def test_what_cannot_be_a_launch_is_refused(rows: pd.DataFrame, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_startup(rows)
    with pytest.raises(ValueError, match="at least one"):
        fit_startup(NONE).gang([])

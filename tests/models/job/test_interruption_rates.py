"""Interruption rates: advised until zones are known, with honest doubt and bunching."""

import numpy as np
import pandas as pd
import pytest

from models.domain.cluster import Pool, bucket_hazard
from models.job.interruption_rates import fit_hazard

NONE = pd.DataFrame({"instance_type": [], "zone": [], "hours": [], "interruptions": []})
ADVISED = bucket_hazard(1)


def windows(rates, *, bunched=0.0):
    """60 days a zone; a day's rate is Gamma of variance `bunched` around `rates` an hour."""
    rng = np.random.default_rng(1)
    rows = []
    for zone, rate in rates.items():
        shock = rng.gamma(1 / bunched, bunched, 60) if bunched else np.ones(60)
        rows += [("a", zone, 24.0, int(rng.poisson(24 * rate * factor))) for factor in shock]
    return pd.DataFrame(rows, columns=list(NONE.columns))


def hazards(model, *zones, kind="a", advised=ADVISED):
    """Hazard, doubt and bunching of a gang of one machine of `kind` in each of `zones`."""
    pools = sorted(set(zones))
    counts = np.array([[float(zones.count(zone)) for zone in pools]])
    hazard, doubt, bunching = model.gangs(
        [Pool(kind, "spot", zone, advised) for zone in pools], counts
    )
    return float(hazard[0]), float(doubt[0]), float(bunching[0])


def test_without_exposure_the_advised_rate_holds_with_much_doubt():
    hazard, doubt, _ = hazards(fit_hazard(NONE), "z", advised=bucket_hazard(4))
    assert hazard == pytest.approx(bucket_hazard(4)) and doubt > 1


def test_exposure_moves_a_zone_to_its_own_rate():
    model = fit_hazard(windows({"quiet": 0.0, "busy": 0.05, "also": 0.04}), advised={"a": ADVISED})
    quiet, busy, unseen = (hazards(model, zone) for zone in ("quiet", "busy", "unseen"))
    assert busy[0] == pytest.approx(0.05, rel=0.35)
    assert quiet[0] < 0.2 * busy[0] and quiet[0] < unseen[0] < 2 * busy[0]
    assert unseen[1] > busy[1]


def test_bunching_is_learned():
    rates = dict.fromkeys("uvwxyz", 0.05)
    even, bunched = (fit_hazard(windows(rates, bunched=variance)) for variance in (0.0, 3.0))
    assert bunched.bunching > 2 * even.bunching


def test_zones_of_a_gang_add_up_and_even_out_their_bunching():
    model = fit_hazard(windows({"x": 0.02, "y": 0.02}, bunched=3.0))
    single, gang = hazards(model, "x"), hazards(model, "x", "y")
    assert gang[0] == pytest.approx(single[0] + hazards(model, "y")[0])
    assert gang[2] < single[2]


def test_machines_lost_together_count_as_one_interruption():
    rows = windows({"x": 0.02})
    together, apart = (
        fit_hazard(rows, together=pd.DataFrame({"machines": [4] * 20, "lost": [lost] * 20}))
        for lost in (4, 1)
    )
    assert hazards(apart, *"xxxx")[0] > 2.5 * hazards(together, *"xxxx")[0]

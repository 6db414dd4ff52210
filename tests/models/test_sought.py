"""The parameters sought from step times: found again where they were hidden, and moved little by outliers or crowds."""

from __future__ import annotations

import numpy as np
import pytest

from models.sought import fit_physics
from tests.models.test_physics import closed, elsewhere, log_step, random_runs, setups


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parameters_that_nobody_was_told_are_found_well_enough_for_a_larger_cluster(seed: int) -> None:
    hidden, random = elsewhere(seed), np.random.default_rng(seed)
    seen, larger = setups(random_runs(200, seed)), setups(random_runs(90, seed + 10, 8, 16))
    measured = np.exp(log_step(hidden, seen) + random.normal(0, 0.02, 200))
    found = fit_physics(closed(), seen, measured)
    error = np.abs(log_step(found, larger) - log_step(hidden, larger))
    assert np.median(error) < 0.035 and np.quantile(error, 0.9) < 0.07
    before = np.median(np.abs(log_step(closed(), larger) - log_step(hidden, larger)))
    assert before > 0.1 and before > 4 * np.median(error)
    measured[random.choice(200, 6, replace=False)] *= 10
    moved = np.abs(log_step(fit_physics(closed(), seen, measured), larger) - log_step(found, larger))
    assert np.median(moved) < 0.02 and np.quantile(moved, 0.9) < 0.05


def test_a_workload_with_many_rows_counts_for_no_more_than_150_of_them() -> None:
    seen = random_runs(450, 4)  # 150 of each workload
    measured = np.exp(log_step(elsewhere(4), setups(seen)))
    again = np.flatnonzero((seen["workload"] == seen["workload"].iloc[0]).to_numpy())
    often = np.concatenate([np.arange(450), again, again])
    once, thrice = (fit_physics(closed(), setups(seen.iloc[at]), measured[at]) for at in (np.arange(450), often))
    assert np.abs(log_step(thrice, setups(seen)) - log_step(once, setups(seen))).max() < 1e-4

"""Which run tells most, and how what nobody measured moves together."""

from __future__ import annotations

import numpy as np

from models.arrays import FloatArray
from models.effects import noise_variance
from models.features import Features
from models.regression import Posterior
from models.variances import starting_variances
from tests.models.test_regression import drawn_target, features, names, shared, strangers


def left_after(seen: Features, measured: Features, asked: Features) -> FloatArray:
    """Mean variance of `asked` once `measured` are known too, by the dense Gaussian process."""
    variances = starting_variances()
    whole = seen.joined(measured)
    noise = np.diag(noise_variance(whole, variances))
    across = shared(asked, whole, variances)
    known = shared(whole, whole, variances) + noise
    return np.mean(np.diag(shared(asked, asked, variances) - across @ np.linalg.solve(known, across.T)))


def posterior(seen: Features) -> Posterior:
    variances = starting_variances()
    return Posterior(seen, drawn_target(seen, variances, 3), np.ones(len(seen.exposed)), variances)


def test_the_runs_chosen_leave_nearly_as_little_in_doubt_as_any_would() -> None:
    seen, fresh = features(40, 1), strangers(features(30, 2, workloads=1))
    chosen = posterior(seen).choose(fresh, fresh, count=3)
    assert len(set(chosen)) == 3
    each = np.array([left_after(seen, fresh.take(np.array([at])), fresh) for at in range(30)])
    assert each[chosen[0]] <= np.quantile(each, 0.15)
    three = left_after(seen, fresh.take(np.array(chosen)), fresh)
    random = np.random.default_rng(0)
    drawn = [left_after(seen, fresh.take(random.choice(30, 3, replace=False)), fresh) for _ in range(200)]
    assert three <= np.quantile(drawn, 0.1)


def test_a_second_run_is_not_the_first_again() -> None:
    seen = features(40, 1)
    fresh = strangers(features(6, 5, workloads=1))
    twice = fresh.take(np.array([0, 0, 0, 1, 2, 3, 4, 5]))
    first, second = posterior(seen).choose(twice, fresh, count=2)
    assert not (first < 3 and second < 3)


def test_setups_of_a_workload_that_nobody_measured_err_together_in_draws() -> None:
    seen, fresh = features(40, 1), strangers(features(2, 6, workloads=1, arrangements=1))
    same = fresh.take(np.array([1, 1]))
    drawn = posterior(seen).draws(same, identity=["one", "another"], measured=names(40), count=4000, seed=0)[2]
    variances = starting_variances()
    prior = shared(same, same, variances)[0, 0]
    local = sum(variances[name] for name in ("own_arrangement", "own_exchange", "placement", "placement_batch"))
    noise = float(noise_variance(same, variances)[0])
    smooth = sum(variances[name] for name in ("shape", "own_shape", "own_dense", "own_batch", "own_shape_batch"))
    least = (prior - local - smooth) / (prior + noise)
    assert least > 0.3 and np.corrcoef(drawn)[0, 1] > 0.9 * least

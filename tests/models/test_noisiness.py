"""How noisy the runs of each workload are held to be: of setups left out one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models import intervals
from models.effects import noise_variance
from models.intervals import Z_90, calibrated
from models.keys import Keys
from models.regression import Posterior
from models.variances import starting_variances
from tests.models.test_regression import drawn_target, features, known, names


def test_a_setup_left_out_is_what_a_fit_without_it_says() -> None:
    seen, target, share, variances, posterior = known()
    residual, variance = posterior.left_out()
    for at in range(0, 42, 5):
        rest, own = np.delete(np.arange(42), at), np.array([at])
        asked = seen.take(own)
        again = Posterior(seen.take(rest), target[rest], share[rest], variances, ahead=asked)
        mean, spread = again.moments(asked)
        apart = spread**2 - noise_variance(asked, variances)
        assert residual[at] == pytest.approx(target[at] - asked.offset[0] - mean[0], abs=2e-3)
        assert variance[at] == pytest.approx(apart[0], rel=2e-2, abs=1e-5)


def test_what_no_column_stands_for_is_no_noise_of_a_run() -> None:
    # more arrangements than have columns: what theirs share is left to each setup alone
    seen, variances = features(620, 1, arrangements=1200, slopes=0.2), starting_variances()
    target = drawn_target(seen, variances, 2)
    posterior = Posterior(seen, target, np.ones(620), variances)
    at = int(np.argmax(posterior._alone))
    own = seen.take(np.array([at]))
    rest = np.delete(np.arange(620), at)
    spread = Posterior(seen.take(rest), target[rest], np.ones(619), variances).moments(own)[1][0]
    found = posterior.left_out()[1][at]
    assert posterior._alone[at] > 1e-3 and found == pytest.approx(
        spread**2 - noise_variance(own, variances)[0], rel=0.1
    )


def of_unlike_noise() -> tuple[Posterior, Posterior]:
    """A regression on 240 setups of three workloads, of which one runs six times as unsteadily across machines."""
    seen = features(240, 5, arrangements=60, slopes=0.2)
    variances = starting_variances()
    target = drawn_target(seen, variances, 6, 0.01)
    size = np.where(np.array([one == "w1" for one in seen.workload]) & (seen.instances > 1), 0.12, 0.02)
    target = target + size * np.random.default_rng(7).normal(size=240)
    found = calibrated(seen, target, np.ones(240), np.zeros(240))
    return found, found.scaled(found.scale, {})


def test_an_unsteady_workload_has_wider_intervals_and_a_steady_one_narrower_ones() -> None:
    found, plain = of_unlike_noise()
    assert found.noisiness["w1"] > 1.5 > 1 > max(found.noisiness["w0"], found.noisiness["w2"])
    asked = replace(features(60, 9, arrangements=60, slopes=0.2), instances=np.full(60, 2.0))
    wider = found.moments(asked)[1] / plain.moments(asked)[1]
    unsteady = np.array([one == "w1" for one in asked.workload])
    assert (wider[unsteady] > 1).all() and (wider[~unsteady] < 1).all()
    assert found.moments(asked)[0] == pytest.approx(plain.moments(asked)[0], abs=1e-12), "it moves no prediction"
    alone = replace(asked, instances=np.ones(60))
    assert found.moments(alone)[1] == pytest.approx(plain.moments(alone)[1]), "noise across machines, not on one"


def test_about_nine_tenths_of_each_workloads_setups_left_out_fall_inside() -> None:
    found, plain = of_unlike_noise()
    seen = found._given[0]
    across, (residual, variance) = seen.instances > 1, found.left_out()
    inside = [np.abs(residual) < Z_90 * one.scale * np.sqrt(variance + one._noise(seen)) for one in (found, plain)]
    for name, rows in seen.workload.groups().items():
        now, before = (float(np.mean(one[rows[across[rows]]])) for one in inside)
        # w1 has 54 setups, and the 30 that stand for no difference hold it back
        assert abs(now - 0.9) < min(0.11, abs(before - 0.9)), name


def test_draws_and_joint_moments_are_as_wide_as_predictions() -> None:
    found, _ = of_unlike_noise()
    asked = features(12, 9, arrangements=60, slopes=0.2)
    spread = found.moments(asked)[1]
    _, covariance, noise = found.joint(asked)
    assert np.sqrt(np.diag(covariance) + noise) == pytest.approx(spread, rel=1e-6)
    drawn = found.draws(asked, identity=names(12), measured=names(240), count=20_000, seed=4)[2]
    assert drawn.std(axis=1) == pytest.approx(spread, rel=0.03)


def test_few_setups_say_little_and_none_more_than_the_bounds() -> None:
    seen = features(12, 3, workloads=1, slopes=0.2)
    seen = replace(seen, instances=np.full(12, 2.0), workload=Keys.of(["w0"] * 12))
    wild = 3.0 * np.random.default_rng(0).normal(size=12)
    noisy = calibrated(seen, wild, np.ones(12), np.zeros(12)).noisiness["w0"]
    most = intervals._NOISINESS[1] ** (12 / (12 + intervals._PRIOR_NOISY))
    assert 1 <= noisy <= most < 2
    few = np.arange(4)
    assert calibrated(seen.take(few), wild[:4], np.ones(4), np.zeros(4)).noisiness == {}

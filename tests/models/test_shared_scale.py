"""How unsure of what setups share: less than thought where groups left out say so, and where such groups can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models import intervals
from models.arrays import FloatArray
from models.effects import GIVEN
from models.features import Features
from models.intervals import calibrated
from models.regression import Posterior
from models.variances import starting_variances
from tests.models.test_regression import drawn_target, features, known, names, strangers


def spread(shared_scale: float, asked: Features, seen: Features | None = None) -> FloatArray:
    """Standard deviations of new measurements."""
    before, target, share, variances, _ = known()
    return Posterior(seen or before, target, share, variances, shared_scale=shared_scale).moments(asked)[1]


@pytest.mark.parametrize("scale", [0.4, 0.7, 1.0])
def test_it_is_as_wide_in_draws_and_joint_moments_as_in_predictions_and_never_wider(scale: float) -> None:
    seen, target, share, variances, plain = known()
    found = Posterior(seen, target, share, variances, shared_scale=scale)
    asked = features(12, 9)
    mean, sd = found.moments(asked)
    assert sd == pytest.approx(plain.scaled(1.0, shared_scale=scale).moments(asked)[1], rel=1e-12)
    _, covariance, noise = found.joint(asked)
    assert np.sqrt(np.diag(covariance) + noise) == pytest.approx(sd, rel=1e-6)
    drawn = found.draws(asked, identity=names(12), measured=names(42), count=40_000, seed=4)[2]
    assert drawn.std(axis=1) == pytest.approx(sd, rel=0.03)
    together = covariance / np.outer(sd, sd)
    assert np.corrcoef(drawn)[0, 1:] == pytest.approx(together[0, 1:], abs=0.03)
    before, plain_sd = plain.moments(asked)
    assert mean == pytest.approx(before, abs=1e-12), "it moves no prediction"
    assert (sd <= plain_sd * (1 + 1e-9)).all() and (sd >= scale * plain_sd * 0.999).all()
    assert (sd < plain_sd * 0.98).any() == (scale < 1)


def test_an_instance_type_that_no_row_told_of_is_as_unsure_as_before() -> None:
    seen = replace(known()[0], by_type=np.zeros_like(known()[0].by_type))
    asked = replace(features(6, 9), by_type=np.zeros((6, seen.by_type.shape[1])))
    slopes = np.zeros_like(asked.by_type)
    slopes[:, int(np.flatnonzero(features(6, 9).by_type.any(axis=0))[0])] = 0.3
    more = spread(0.5, replace(asked, by_type=slopes), seen) ** 2 - spread(0.5, asked, seen) ** 2
    assert more == pytest.approx(np.full(6, 0.3**2), rel=1e-6)


def test_what_nobody_met_is_as_unsure_as_before() -> None:
    asked = replace(strangers(features(6, 9)), shared=np.zeros_like(features(6, 9).shared))
    assert spread(0.4, asked) == pytest.approx(spread(1.0, asked), rel=0.02)
    assert (spread(0.4, features(6, 9)) < 0.98 * spread(1.0, features(6, 9))).any()


@pytest.mark.parametrize("name", ["octaves", "larger"])
def test_what_nothing_measured_tells_of_is_never_narrowed(name: str) -> None:
    seen = replace(known()[0], **{name: np.zeros(42)})
    asked = replace(features(6, 9), exposed=np.ones(6), **{name: np.zeros(6)})
    beyond = replace(asked, **{name: np.full(6, 2.0)})
    more = spread(0.4, beyond, seen) ** 2 - spread(0.4, asked, seen) ** 2
    assert more == pytest.approx(np.full(6, (2 * GIVEN[name]) ** 2), rel=1e-6)


def test_groups_that_err_by_less_than_is_thought_narrow_what_is_shared_and_none_widens_it() -> None:
    random = np.random.default_rng(0)
    shared, besides = np.full(4000, 0.04), np.full(4000, 0.01)

    def of_errors(part: float, groups: int = 400) -> float:
        residual = np.sqrt(part**2 * shared + besides) * random.normal(size=4000)
        return intervals._shared_scale(np.stack([residual, shared, besides]), groups)

    assert of_errors(0.6) == pytest.approx(0.6, abs=0.05) and of_errors(1.0) == pytest.approx(1.0, abs=0.05)
    assert of_errors(2.0) == 1.0 and of_errors(0.0) == pytest.approx(intervals._LEAST_SHARED, abs=0.1)
    assert of_errors(0.0, groups=2) > 0.85, "two groups tell little"
    assert intervals._shared_scale(np.zeros((3, 0)), 0) == 1.0


def test_rows_that_are_mostly_noise_say_nothing_of_what_is_shared() -> None:
    random = np.random.default_rng(1)
    shared = np.repeat([0.04, 0.0001], [1000, 9000])
    besides = np.full(10_000, 0.01)
    residual = np.sqrt(shared + besides * np.repeat([1.0, 0.2], [1000, 9000])) * random.normal(size=10_000)
    assert intervals._shared_scale(np.stack([residual, shared, besides]), 1000) > 0.9
    only = np.stack([residual, shared, besides])[:, 1000:]
    assert intervals._shared_scale(only, 1000) == 1.0


def fitted(seed: int, part: float, rows: int = 150) -> Posterior:
    """Of rows whose shared parameters are so much of what the priors say."""
    variances = starting_variances()
    seen = features(150, seed, workloads=2, arrangements=30, slopes=8.0)
    drawn = replace(seen, shared=part * seen.shared, own=part * seen.own, by_type=part * seen.by_type)
    target, first = drawn_target(drawn, variances, seed), np.arange(rows)
    return calibrated(seen.take(first), target[first], np.ones(rows), np.zeros(rows))


def test_a_fit_narrows_what_its_groups_show_to_be_surer() -> None:
    found = [fitted(seed, 0.0) for seed in (5, 6, 7)]
    assert all(one.scale == 1.0 and one.shared_scale < 0.95 for one in found)


def test_where_groups_fall_outside_what_they_share_is_not_narrowed() -> None:
    found = [fitted(seed, 8.0) for seed in (5, 6)]
    assert all(one.scale > 1.0 and one.shared_scale > 0.99 for one in found)


def test_devices_alone_tell_nothing_of_what_exchanges_share() -> None:
    seen = features(200, 5, workloads=5, arrangements=12, slopes=1.0)
    alone = replace(seen, several=np.zeros(200), exposed=np.zeros(200), instances=np.ones(200))
    target = 0.1 * drawn_target(alone, starting_variances(), 5)
    assert calibrated(alone, target, np.ones(200), np.zeros(200)).shared_scale == 1.0
    assert calibrated(seen, target, np.ones(200), np.zeros(200)).shared_scale < 0.95


def test_few_rows_narrow_nothing() -> None:
    assert fitted(5, 0.0, rows=9).shared_scale == 1.0

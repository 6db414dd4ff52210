"""How unsure of what setups share: less than thought where groups left out say so, each doubt by what can check it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models import intervals
from models.arrays import FloatArray
from models.basis import Widths
from models.effects import GIVEN, OF_TYPES, TYPE_DEVIATIONS
from models.features import Features
from models.intervals import calibrated
from models.regression import Posterior
from models.variances import starting_variances
from tests.models.test_regression import drawn_target, features, known, names


def spread(widths: Widths, asked: Features, seen: Features | None = None) -> FloatArray:
    """Standard deviations of new measurements."""
    before, target, share, variances, _ = known()
    return Posterior(seen or before, target, share, variances, widths=widths).moments(asked)[1]


@pytest.mark.parametrize("widths", [Widths(0.5, 0.5), Widths(0.5, 1.0), Widths(0.4, 0.7), Widths(1.0, 0.5), Widths()])
def test_it_is_as_wide_in_draws_and_joint_moments_as_in_predictions_and_never_wider(widths: Widths) -> None:
    seen, target, share, variances, plain = known()
    found = Posterior(seen, target, share, variances, widths=widths)
    again = plain.scaled(1.0, widths=widths)
    asked = features(12, 9)
    mean, sd = found.moments(asked)
    assert sd == pytest.approx(again.moments(asked)[1], rel=1e-12)
    _, covariance, noise = found.joint(asked)
    assert np.sqrt(np.diag(covariance) + noise) == pytest.approx(sd, rel=1e-6)
    drawn = found.draws(asked, identity=names(12), measured=names(42), count=40_000, seed=4)[2]
    assert drawn.std(axis=1) == pytest.approx(sd, rel=0.03)
    together = covariance / np.outer(sd, sd)
    assert np.corrcoef(drawn)[0, 1:] == pytest.approx(together[0, 1:], abs=0.03)
    before, plain_sd = plain.moments(asked)
    assert mean == pytest.approx(before, abs=1e-12), "it moves no prediction"
    assert (sd <= plain_sd * (1 + 1e-9)).all() and (sd >= min(widths.shared, widths.types) * plain_sd * 0.999).all()
    assert (sd < plain_sd * 0.98).any() == (widths != Widths())


def test_what_no_row_told_of_a_type_is_narrowed_as_types_are() -> None:
    seen = replace(known()[0], by_type=np.zeros_like(known()[0].by_type))
    asked = replace(features(6, 9), by_type=np.zeros((6, seen.by_type.shape[1])))
    slopes = np.zeros_like(asked.by_type)
    slopes[:, int(np.flatnonzero(features(6, 9).by_type.any(axis=0))[0])] = 0.3
    for widths in (Widths(0.5, 1.0), Widths(0.5, 0.7)):
        more = spread(widths, replace(asked, by_type=slopes), seen) ** 2 - spread(widths, asked, seen) ** 2
        assert more == pytest.approx(np.full(6, (widths.types * 0.3) ** 2), rel=1e-6)


@pytest.mark.parametrize("name", ["octaves", "larger"])
def test_what_nothing_measured_tells_of_is_never_narrowed(name: str) -> None:
    seen = replace(known()[0], **{name: np.zeros(42)})
    asked = replace(features(6, 9), exposed=np.ones(6), **{name: np.zeros(6)})
    beyond = replace(asked, **{name: np.full(6, 2.0)})
    more = spread(Widths(0.4, 0.4), beyond, seen) ** 2 - spread(Widths(0.4, 0.4), asked, seen) ** 2
    assert more == pytest.approx(np.full(6, (2 * GIVEN[name]) ** 2), rel=1e-6)


def test_groups_that_err_by_less_than_is_thought_narrow_what_is_shared_and_none_widens_it() -> None:
    random = np.random.default_rng(0)
    shared, besides = np.full(400, 0.04), np.full(400, 0.01)

    def of_errors(part: float, groups: int = 400) -> float:
        residual = np.sqrt(part**2 * shared + besides) * random.normal(size=400)
        return intervals._width(np.stack([residual, shared, besides]), groups)

    assert of_errors(0.6) == pytest.approx(0.6, abs=0.08) and of_errors(1.0) == pytest.approx(1.0, abs=0.08)
    assert of_errors(2.0) == 1.0 and of_errors(0.0) == pytest.approx(intervals._LEAST_WIDTH, abs=0.1)
    assert of_errors(0.0, groups=2) > 0.8, "two types tell little"
    assert intervals._width(np.zeros((3, 0)), 0) == 1.0


def fitted(seed: int, shared: float, of_types: float) -> Posterior:
    """Of rows whose shared effects are so much of what the priors say; an instance type's so much."""
    variances = starting_variances()
    seen = features(200, seed, workloads=5, arrangements=12, slopes=1.0)
    drawn = replace(seen, shared=shared * seen.shared, own=shared * seen.own, by_type=of_types * seen.by_type)
    variances = {name: one * (of_types**2 if name in OF_TYPES else 1.0) for name, one in variances.items()}
    variances |= dict.fromkeys(TYPE_DEVIATIONS, 1.0)  # these are in the slopes
    return calibrated(seen, drawn_target(drawn, variances, seed), np.ones(200), np.zeros(200))


def test_a_fit_narrows_what_its_groups_show_to_be_surer() -> None:
    found = [fitted(seed, 0.1, 0.3) for seed in (5, 6, 7)]
    assert all(one.scale == 1.0 and one.widths.shared < 0.95 for one in found)
    assert all(one.widths.types <= 1.0 for one in found)


def test_where_groups_fall_outside_what_they_share_is_not_narrowed() -> None:
    found = [fitted(seed, 6.0, 1.0) for seed in (5, 6)]
    assert all(one.scale > 1.0 and one.widths.shared > 0.99 for one in found)

"""The regression against the dense Gaussian process that it stands for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from models.domain.categorical import Keys
from models.domain.numeric import Z_90, FloatArray
from models.step_time.physics.ddp_timeline import PARAMETER_NAMES
from models.step_time.physics.step_formula import NAMES, OWN_SD, TYPE_SD
from models.step_time.residual import calibration
from models.step_time.residual.calibration import calibrated, starting_variances
from models.step_time.residual.gp import Local, Posterior
from models.step_time.residual.kernel import (
    FAMILIES,
    GIVEN,
    LINEAR,
    LOCAL,
    NOISE,
    SMOOTH,
    Features,
    blocks,
    covariance,
    each_with_all,
    noise_variance,
    terms,
)

EVERY = (*LINEAR, *GIVEN, *SMOOTH, *LOCAL)


def features(rows: int, seed: int, workloads: int = 3, arrangements: int = 4, slopes: float = 1.0) -> Features:
    """Setups at random: what a family looks at is drawn, not worked out from machines. `slopes` scales those."""
    random = np.random.default_rng(seed)
    arrangement = tuple(f"a{one}" for one in random.integers(0, arrangements, rows))
    places = {name: random.normal(size=8) for name in sorted(set(arrangement))}
    exposed = random.uniform(0, 0.8, rows)
    exposed[0] = 0.0
    shared = slopes * 0.05 * random.normal(size=(rows, len(PARAMETER_NAMES) + len(NAMES)))
    return Features(
        workload=Keys.of(f"w{one}" for one in random.integers(0, workloads, rows)),
        slowest_type=Keys.of(f"t{one}" for one in random.integers(0, 2, rows)),
        link_type=Keys.of(f"t{one}" for one in random.integers(0, 2, rows)),
        arrangement=Keys.of(arrangement),
        exact=Keys.of(f"{one}{random.integers(0, 2)}" for one in arrangement),
        exposed=exposed,
        doubt=random.choice([0.0, 0.1], rows),
        rate=random.choice([0.0, 0.0, 0.4], rows),
        octaves=random.choice([0.0, 0.0, 1.5], rows),
        larger=random.choice([0.0, 0.0, 1.0], rows),
        near=np.array([places[one] for one in arrangement]),
        batch=np.log(random.choice([8.0, 16.0, 32.0], rows)) / 0.5,
        instances=random.integers(1, 5, rows).astype(float),
        several=random.choice([0.0, 1.0], rows),
        shared=shared,
        own=slopes * 0.03 * random.normal(size=(rows, len(NAMES))) * (OWN_SD > 0),
        by_type=slopes * 0.03 * random.normal(size=(rows, len(NAMES))) * (TYPE_SD > 0),
        offset=slopes * 0.05 * random.normal(size=rows),
    )


def shared(left: Features, right: Features, variances: dict[str, float]) -> FloatArray:
    """What log steps share but for noise: parameters, and every family with its variance."""
    return np.asarray(left.shared @ right.shared.T + covariance(EVERY, variances, left, right), dtype=float)


def names(rows: int | FloatArray) -> list[str]:
    """Of setups at these positions, or of so many."""
    return [f"setup {at}" for at in (range(rows) if isinstance(rows, int) else rows.tolist())]


def dense(
    seen: Features, target: FloatArray, share: FloatArray, variances: dict[str, float], asked: Features
) -> tuple[FloatArray, FloatArray]:
    """Mean and covariance at `asked` of target - offset without its noise, solved in one piece."""
    whole = shared(seen, seen, variances) + np.diag(share * noise_variance(seen, variances))
    across = shared(asked, seen, variances)
    mean = across @ np.linalg.solve(whole, target) - asked.offset
    return mean, shared(asked, asked, variances) - across @ np.linalg.solve(whole, across.T)


def drawn_target(seen: Features, variances: dict[str, float], seed: int, share: float | FloatArray = 1.0) -> FloatArray:
    """A target as the families say: correlated as the covariance, with noise."""
    random = np.random.default_rng(seed)
    whole = shared(seen, seen, variances) + np.diag(share * noise_variance(seen, variances))
    return np.asarray(np.linalg.cholesky(whole + 1e-12 * np.eye(len(whole))) @ random.normal(size=len(whole)))


@cache
def known() -> tuple[Features, FloatArray, FloatArray, dict[str, float], Posterior]:
    seen, variances = features(42, 0), starting_variances()
    share = np.random.default_rng(1).choice([0.5, 1.0, 40.0], 42)
    target = drawn_target(seen, variances, 2, share)
    return seen, target, share, variances, Posterior(seen, target, share, variances)


def strangers(seen: Features) -> Features:
    """The same numbers of workloads, types, arrangements and shapes that nobody has seen."""
    others = {
        name: Keys.of(f"new-{one}" for one in getattr(seen, name))
        for name in ("workload", "slowest_type", "link_type", "arrangement", "exact")
    }
    return replace(seen, near=seen.near + 30, batch=seen.batch + 30, **others)


def test_it_equals_the_dense_gaussian_process_where_it_was_measured_and_elsewhere() -> None:
    seen, target, share, variances, posterior = known()
    for asked in (seen, features(25, 7, workloads=5, arrangements=6), strangers(seen)):
        mean, spread = posterior.moments(asked)
        middle, variance = dense(seen, target, share, variances, asked)
        assert mean == pytest.approx(middle, abs=1e-3)
        # every row is a pivot, but for those that the smooth families leave less than 4e-6 of
        assert spread**2 == pytest.approx(np.diag(variance) + noise_variance(asked, variances), abs=1e-5)
    assert np.abs(dense(seen, target, share, variances, seen)[0] + seen.offset).max() > 0.03


def test_a_scale_widens_and_moves_nothing() -> None:
    seen, target, share, variances, posterior = known()
    wide = Posterior(seen, target, share, variances).scaled(1.7)
    asked = features(9, 3)
    assert wide.moments(asked)[0] == pytest.approx(posterior.moments(asked)[0])
    assert wide.moments(asked)[1] == pytest.approx(1.7 * posterior.moments(asked)[1])


def test_the_spread_is_never_below_the_noise_and_larger_far_away() -> None:
    seen, _, _, variances, posterior = known()
    noise = noise_variance(seen, variances)
    near, strange = (posterior.moments(asked)[1] ** 2 for asked in (seen, strangers(seen)))
    assert (near >= noise).all() and (strange > near).all()
    # all that a workload, a type or a shape may be off by is left of the families of those
    told = terms(seen)
    unknown = sum(variances[name] * told[name].weight ** 2 for name in EVERY if name != "all")
    assert (strange >= (unknown + noise) * (1 - 1e-6)).all()


@pytest.mark.parametrize("noise", [5.0, 50.0])
def test_draws_have_the_moments_and_move_together_as_the_dense_process_does(noise: float) -> None:
    # the noisier, the less is learned and the more do setups share of what they may be off by
    seen, variances, share = features(42, 0, slopes=0.2), starting_variances(), np.full(42, noise)
    target = drawn_target(seen, variances, 2, share)
    posterior = Posterior(seen, target, share, variances).scaled(1.3)
    # one setup of a block: what only neighbours share is drawn for each alone
    first = {key: at for at, key in reversed(list(enumerate(blocks(seen))))}
    picked = np.array(sorted(first.values()))
    asked = seen.take(picked)
    middle, told, drawn = posterior.draws(asked, identity=names(picked), measured=names(42), count=80_000, seed=3)
    mean, spread = posterior.moments(asked)
    assert middle == pytest.approx(mean, abs=1e-12) and told == pytest.approx(spread, rel=1e-12)
    assert drawn.mean(axis=1) == pytest.approx(0, abs=1e-12)
    assert drawn.std(axis=1) == pytest.approx(spread, rel=0.015)
    joint = dense(seen, target, share, variances, asked)[1] + np.diag(noise_variance(asked, variances))
    expected = joint / np.sqrt(np.outer(np.diag(joint), np.diag(joint)))
    assert np.corrcoef(drawn) == pytest.approx(expected, abs=0.02)
    assert np.abs(expected[~np.eye(len(expected), dtype=bool)]).max() > 0.02


def test_neighbours_draws_share_what_the_dense_process_says_measured_or_not() -> None:
    # without smooth families, of which each setup draws for itself what the pivots leave
    seen, share = features(42, 0, slopes=0.2), np.full(42, 5.0)
    variances = starting_variances() | dict.fromkeys(SMOOTH, 1e-9)
    posterior = Posterior(seen, drawn_target(seen, variances, 2, share), share, variances)
    whole = features(20, 5, workloads=2, arrangements=2, slopes=0.2)
    fresh = {name: Keys.of(f"new-{one}" for one in getattr(whole, name)) for name in ("arrangement", "exact")}
    for asked in (whole, replace(whole, **fresh)):
        drawn = posterior.draws(asked, identity=names(20), measured=names(42), count=40_000, seed=3)[2]
        joint = dense(seen, np.zeros(42), share, variances, asked)[1] + np.diag(noise_variance(asked, variances))
        expected = joint / np.sqrt(np.outer(np.diag(joint), np.diag(joint)))
        keys = np.array(blocks(asked))
        near = (keys[:, None] == keys[None, :]) & ~np.eye(20, dtype=bool)
        assert np.corrcoef(drawn) == pytest.approx(expected, abs=0.03)
        assert expected[near].max() > 0.3


def test_a_setups_draws_are_the_same_in_any_company_and_come_in_pairs() -> None:
    posterior = known()[4]
    for asked in (features(30, 5, workloads=5, arrangements=6), strangers(features(30, 5))):
        draws = partial(posterior.draws, measured=names(42), count=8)
        whole = draws(asked, identity=names(30), seed=3)[2]
        some = np.array([17, 3, 9])
        assert draws(asked.take(some), identity=names(some), seed=3)[2] == pytest.approx(whole[some], abs=1e-12)
        assert whole[:, :4] == pytest.approx(-whole[:, 4:], abs=1e-12)
        assert np.abs(draws(asked, identity=names(30), seed=4)[2] - whole).min() > 0


@pytest.mark.parametrize("by", ["workload", "arrangement", "block"])
def test_a_group_held_out_is_what_a_fit_without_it_says(by: str) -> None:
    seen, target, share, variances, posterior = known()
    groups = blocks(seen) if by == "block" else getattr(seen, by)
    left_alone = groups[0]
    kept = Keys.of("" if one == left_alone else one for one in groups)
    which, (residuals, shared_, besides) = posterior.held_out(kept, seen)
    found = residuals / np.sqrt(shared_ + besides)
    expected, rows = [], []
    for group in (one for one in kept.distinct if one):
        inside = np.array([one == group for one in groups])
        rest, own = np.flatnonzero(~inside), np.flatnonzero(inside)
        asked = seen.take(own)
        again = Posterior(seen.take(rest), target[rest], share[rest], variances)
        mean, spread = again.moments(asked)
        noise = noise_variance(asked, variances)
        residual = (target[own] - asked.offset - mean) / np.sqrt(spread**2 + (share[own] - 1) * noise)
        order = np.array(
            [at for key in sorted(set(blocks(asked))) for at, one in enumerate(blocks(asked)) if one == key]
        )
        expected.append(residual[order])
        rows.extend(own[order])
    # not exactly: the fit without it has other pivots, and both leave out up to 4e-6 of variance and add 1e-9
    assert found == pytest.approx(np.concatenate(expected), abs=2e-2)
    assert np.abs(found).max() > 1 and which.tolist() == rows


@pytest.mark.parametrize("many", [40, 260])
def test_rows_are_left_out_alike_whether_they_are_fewer_than_the_columns_or_not(many: int) -> None:
    seen, variances = features(260, 3, workloads=2, arrangements=3), starting_variances()
    posterior = Posterior(seen, drawn_target(seen, variances, 4), np.ones(260), variances)
    assert 40 < posterior.columns < 260
    own = list(posterior._blocks.values())
    phi, target = np.concatenate([one.phi for one in own])[:many], np.concatenate([one.target for one in own])[:many]
    inverse = np.linalg.inv(posterior._precision - phi.T @ phi)
    residual, half, noise = posterior._without(phi, target)
    assert residual == pytest.approx(target - phi @ inverse @ (posterior._right - phi.T @ target), abs=1e-5)
    assert half.T @ half + noise * np.eye(many) == pytest.approx(np.eye(many) + phi @ inverse @ phi.T, rel=1e-5)


def test_what_was_measured_is_fitted_as_it_is_predicted() -> None:
    seen, *_, posterior = known()
    assert posterior.fitted == pytest.approx(posterior.moments(seen)[0], abs=1e-9)
    mean, spread = posterior.scaled(2.0).moments(seen)
    assert mean == pytest.approx(posterior.moments(seen)[0]) and spread == pytest.approx(2 * posterior.moments(seen)[1])


def test_the_covariance_of_one_setup_with_all_is_that_of_all() -> None:
    seen, variances = features(30, 5), starting_variances()
    across, whole = each_with_all(SMOOTH, variances, seen), covariance(SMOOTH, variances, seen, seen)
    assert np.array([across(at) for at in range(30)]) == pytest.approx(whole, abs=1e-15)


def test_intervals_of_data_as_the_model_has_it_hold_as_much_as_they_say() -> None:
    inside = []
    for seed in (4, 5, 6):
        seen = features(120, seed, workloads=6, arrangements=8, slopes=0.2)
        target = drawn_target(seen, starting_variances(), seed + 10)
        picked, fresh = np.arange(80), np.arange(80, 120)
        posterior = calibrated(seen.take(picked), target[picked], np.ones(80), np.zeros(80))
        assert calibration._LEAST_SCALE <= posterior.scale < 1.4
        asked = seen.take(fresh)
        mean, spread = posterior.moments(asked)
        inside.append(np.abs(target[fresh] - asked.offset - mean) < Z_90 * spread)
    assert 0.82 < np.mean(inside) < 0.98


def test_the_scale_stays_within_its_bounds_and_few_rows_are_believed_less() -> None:
    seen, random = features(40, 8, slopes=0.2), np.random.default_rng(0)
    share = np.ones(40)
    quiet, loud = (
        calibrated(seen, size * random.standard_t(1, 40), share, np.zeros(40)).scale for size in (1e-6, 50.0)
    )
    assert quiet == calibration._LEAST_SCALE < loud <= calibration._MOST_SCALE
    few = calibrated(seen.take(np.arange(4)), np.zeros(4), share[:4], np.zeros(4))
    assert few.variances == starting_variances() and few.scale > 1


def test_outliers_are_weighed_down_and_move_the_others_little() -> None:
    seen, odd = features(80, 9, slopes=0.2), [5, 40, 71]
    target = drawn_target(seen, starting_variances(), 10)
    wrong = target.copy()
    wrong[odd] += np.log(10)
    moved = []
    for one in (target, wrong):
        posterior = calibrated(seen, one, np.ones(80), np.zeros(80))
        share = posterior.share
        moved.append(posterior.moments(seen)[0])
    assert (share[odd] > 10).all() and np.median(share) == 1
    assert np.quantile(np.abs(moved[1] - moved[0]), 0.9) < 0.05


def test_joint_moments_are_those_of_predictions_and_of_draws() -> None:
    seen, asked = features(40, 1), features(15, 2)
    random = np.random.default_rng(3)
    variances = starting_variances()
    target = random.normal(scale=0.1, size=40)
    posterior = Posterior(seen, target, np.full(40, 1.0), variances).scaled(1.3)
    mean, covariance_, noise = posterior.joint(asked)
    middle, spread = posterior.moments(asked)
    assert mean == pytest.approx(middle) and np.sqrt(np.diag(covariance_) + noise) == pytest.approx(spread, rel=1e-6)
    drawn = posterior.draws(asked, identity=names(15), measured=names(40), count=40_000, seed=4)[2]
    whole = covariance_ + np.diag(noise)
    scale = np.sqrt(np.outer(np.diag(whole), np.diag(whole)))
    assert np.abs(np.cov(drawn) / scale - whole / scale).max() < 0.03


def test_no_two_families_share_a_name() -> None:
    assert len(set(FAMILIES)) == len(FAMILIES) == len(LINEAR) + len(SMOOTH) + len(LOCAL) + len(NOISE)


def test_setups_of_a_workload_that_nobody_measured_err_together_in_draws() -> None:
    seen, fresh = features(40, 1), strangers(features(2, 6, workloads=1, arrangements=1))
    same = fresh.take(np.array([1, 1]))
    variances = starting_variances()
    known = Posterior(seen, drawn_target(seen, variances, 3), np.ones(len(seen.exposed)), variances)
    drawn = known.draws(same, identity=["one", "another"], measured=names(40), count=4000, seed=0)[2]
    prior = shared(same, same, variances)[0, 0]
    local = sum(variances[name] for name in ("own_arrangement", "own_exchange", "placement", "placement_batch"))
    noise = float(noise_variance(same, variances)[0])
    smooth = sum(variances[name] for name in ("shape", "own_shape", "own_dense", "own_batch", "own_shape_batch"))
    least = (prior - local - smooth) / (prior + noise)
    assert least > 0.3 and np.corrcoef(drawn)[0, 1] > 0.9 * least


def test_the_local_covariance_is_that_of_its_families_in_any_table() -> None:
    seen, variances = features(42, 0), starting_variances()
    measured, tables = Local.of(seen, variances), Local.tables(seen)
    for asked in (seen, features(25, 7, workloads=5, arrangements=6), strangers(seen)):
        found = measured.covariance(Local.of(asked, variances, tables))
        assert found == pytest.approx(covariance(list(LOCAL), variances, seen, asked), abs=1e-15)
        own = Local.of(asked, variances)
        assert own.variance == pytest.approx(np.diag(covariance(list(LOCAL), variances, asked, asked)))
        some = np.array([3, 1])
        assert own.take(some).covariance(own) == pytest.approx(own.covariance(own)[some])
    assert measured.covariance(measured).max() > 0
    assert (measured.covariance(Local.of(strangers(seen), variances, tables)) == 0).all()

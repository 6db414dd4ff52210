"""Variances, interval scales and noisiness learned from rows and from groups that are left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.domain.categorical import Keys
from models.domain.numeric import Z_90, FloatArray
from models.step_time.residual import calibration
from models.step_time.residual.calibration import calibrated, learn_variances, starting_variances
from models.step_time.residual.gp import Posterior
from models.step_time.residual.kernel import GIVEN, LINEAR, Features, noise_variance
from tests.models.step_time.residual.test_gp import (
    EVERY,
    dense,
    drawn_target,
    features,
    known,
    names,
    shared,
    strangers,
)


def test_variances_are_larger_where_a_workload_had_a_large_effect() -> None:
    seen, share, nothing = features(90, 4, workloads=12, slopes=0.0), np.ones(90), dict.fromkeys(EVERY, 1e-8)
    quiet = nothing | {"noise": 4e-4, "noise_exposed": 1e-6}
    without, within, noisy = (
        learn_variances(seen, drawn_target(seen, quiet | more, 5), share)
        for more in ({}, {"workload": 0.09}, {"noise": 0.04})
    )
    assert within["workload"] > 5 * without["workload"] and within["noise"] < 4 * without["noise"]
    assert 0.02 < noisy["noise"] < 0.08 and noisy["workload"] < 0.2 * within["workload"]
    assert all(within[name] == sd**2 for name, sd in GIVEN.items())
    assert learn_variances(seen.take(np.arange(5)), np.zeros(5), share[:5]) == starting_variances()


def test_learned_variances_are_more_probable_than_the_prior_ones() -> None:
    seen, share, prior = features(90, 6, workloads=8), np.ones(90), starting_variances()
    target = drawn_target(seen, {name: (5.0 if name in LINEAR else 0.2) * one for name, one in prior.items()}, 7)
    learned = learn_variances(seen, target, share)

    def log_likelihood(variances: dict[str, float]) -> float:
        whole = shared(seen, seen, variances) + np.diag(noise_variance(seen, variances))
        return float(-0.5 * target @ np.linalg.solve(whole, target) - 0.5 * np.linalg.slogdet(whole)[1])

    assert log_likelihood(learned) > log_likelihood(prior) + 3


def test_several_samples_say_it_together_and_no_more_than_three() -> None:
    seen, share, quiet = features(1100, 8, workloads=12, slopes=0.0), np.ones(1100), dict.fromkeys(EVERY, 1e-8)
    target = drawn_target(seen, quiet | {"noise": 4e-4, "noise_exposed": 1e-6}, 9)
    shuffled = np.random.default_rng(0).permutation(1100)
    means = []
    for first in (0, 320, 640, 960):
        louder = target.copy()
        louder[shuffled[first : first + 320]] *= 3.0
        means.append(learn_variances(seen, louder, share)["noise"])
    assert means[3] == learn_variances(seen, target, share)["noise"], "more would cost time"
    assert max(means[:3]) < 1.2 * min(means[:3]), "each of them counts as much"
    assert min(means[:3]) > 2 * means[3]


def test_three_samples_count_as_much_against_the_prior_as_one() -> None:
    seen, share, quiet = features(960, 8, workloads=2, slopes=0.0), np.ones(960), dict.fromkeys(EVERY, 1e-8)
    target = drawn_target(seen, quiet | {"noise": 4e-4, "noise_exposed": 1e-6, "workload": 0.5}, 10)
    shuffled = np.random.default_rng(0).permutation(960).reshape(3, 320)
    each = [learn_variances(seen.take(part), target[part], share[part])["workload"] for part in map(np.sort, shuffled)]
    together = learn_variances(seen, target, share)["workload"]
    assert abs(np.log(together / np.median(each))) < 0.05, "they hold the same two workloads, and not six"


def test_one_setup_more_than_a_sample_holds_changes_little() -> None:
    seen, share, quiet = features(321, 8, workloads=12, slopes=0.0), np.ones(321), dict.fromkeys(EVERY, 1e-8)
    target = drawn_target(seen, quiet | {"noise": 4e-4, "noise_exposed": 1e-6, "workload": 0.09}, 9)
    less = np.random.default_rng(0).permutation(321)[:320]
    every, without = learn_variances(seen, target, share), learn_variances(seen.take(less), target[less], share[less])
    for name in ("noise", "workload"):
        assert abs(np.log(every[name] / without[name])) < 0.1, "they count as much against the prior"


def spread(shared_scale: float, asked: Features, seen: Features | None = None) -> FloatArray:
    """Standard deviations of new measurements."""
    before, target, share, variances, _ = known()
    posterior = Posterior(seen or before, target, share, variances)
    return posterior.scaled(1.0, shared_scale=shared_scale).moments(asked)[1]


@pytest.mark.parametrize("scale", [0.4, 0.7, 1.0])
def test_it_is_as_wide_in_draws_and_joint_moments_as_in_predictions_and_never_wider(scale: float) -> None:
    plain = known()[4]
    found = plain.scaled(1.0, shared_scale=scale)
    asked = features(12, 9)
    mean, sd = found.moments(asked)
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
        return calibration._shared_scale(np.stack([residual, shared, besides]), groups)

    assert of_errors(0.6) == pytest.approx(0.6, abs=0.05) and of_errors(1.0) == pytest.approx(1.0, abs=0.05)
    assert of_errors(2.0) == 1.0 and of_errors(0.0) == pytest.approx(calibration._LEAST_SHARED, abs=0.1)
    assert of_errors(0.0, groups=2) > 0.85, "two groups tell little"
    assert calibration._shared_scale(np.zeros((3, 0)), 0) == 1.0


def test_rows_that_are_mostly_noise_say_nothing_of_what_is_shared() -> None:
    random = np.random.default_rng(1)
    shared = np.repeat([0.04, 0.0001], [1000, 9000])
    besides = np.full(10_000, 0.01)
    residual = np.sqrt(shared + besides * np.repeat([1.0, 0.2], [1000, 9000])) * random.normal(size=10_000)
    assert calibration._shared_scale(np.stack([residual, shared, besides]), 1000) > 0.9
    only = np.stack([residual, shared, besides])[:, 1000:]
    assert calibration._shared_scale(only, 1000) == 1.0


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


def test_a_setup_left_out_is_what_a_fit_without_it_says() -> None:
    seen, target, share, variances, posterior = known()
    residual, variance = posterior.left_out()
    for at in range(0, 42, 5):
        rest, own = np.delete(np.arange(42), at), np.array([at])
        asked = seen.take(own)
        mean, apart = dense(seen.take(rest), target[rest], share[rest], variances, asked)
        assert residual[at] == pytest.approx(target[at] - asked.offset[0] - mean[0], abs=2e-3)
        assert variance[at] == pytest.approx(apart[0, 0], rel=2e-2, abs=1e-5)


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
    most = calibration._NOISINESS[1] ** (12 / (12 + calibration._PRIOR_NOISY))
    assert 1 <= noisy <= most < 2
    few = np.arange(4)
    assert calibrated(seen.take(few), wild[:4], np.ones(4), np.zeros(4)).noisiness == {}

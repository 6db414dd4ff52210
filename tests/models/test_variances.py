"""Variances learned from rows: larger where a family had large effects, and likelier than the prior ones."""

from __future__ import annotations

import numpy as np

from models.effects import GIVEN, LINEAR, noise_variance
from models.variances import learn_variances, starting_variances
from tests.models.test_regression import EVERY, drawn_target, features, shared


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

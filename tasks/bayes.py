"""Bayesian optimisation of one workload's setups (CherryPick, NSDI 2017), a rival in the replay of campaigns.

A Gaussian process (Matern 5/2, a length for each feature) on log step over numbers of the setup; every question in turn
buys the run with the greatest expected improvement times the chance to meet its constraint. Runs serve all questions.
"""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from models.arrays import FloatArray
from models.columns import read_setups
from models.identity import rows_of
from models.judging.buying import BestSeen
from models.judging.replay import Ground
from models.wants import Costs
from models.worth import Question

_FIRST = 3  # runs by chance before there is anything to model
_REFIT = 5  # runs after which lengths are sought anew


def numbers(setups: pd.DataFrame, instance_types: pd.DataFrame, devices: dict[str, int]) -> FloatArray:
    """(setups, features) of mean 0 and deviation 1; what does not vary is left out."""
    read = read_setups(setups, devices)
    kinds = {str(row["name"]): (float(row["cores"]), float(row["bandwidth_gbps"])) for row in rows_of(instance_types)}
    cores = [[kinds[name][0] for name in names] for names in read.types]
    links = [min(kinds[name][1] for name in names) for names in read.types]
    batch = np.where(read.present, read.batch, np.nan)
    layout = np.where(read.present, read.layout, np.nan)
    columns = [
        *(np.log(read.samples), np.log(read.ranks), np.log(read.instances), np.log(read.accumulation)),
        *(np.log(np.nanmax(batch, axis=1)), np.log(np.nanmin(batch, axis=1))),
        *(np.nanmax(layout, axis=1), np.nanmin(layout, axis=1)),
        *(np.log([sum(one) for one in cores]), np.log([min(one) for one in cores]), np.log(links)),
    ]
    whole = np.column_stack(columns)
    whole = whole[:, whole.std(axis=0) > 1e-9]
    return np.asarray((whole - whole.mean(axis=0)) / whole.std(axis=0))


class Bayesian(BestSeen):
    """Questions by turns; chooses the best seen, or with `trusting` by the process's mean where nothing was seen."""

    def __init__(
        self,
        ground: Ground,
        features: FloatArray,
        *,
        seed: int,
        costs: Costs,
        at_once: int = 1,
        per_dollar: bool = False,
        trusting: bool = False,
    ) -> None:
        """`at_once` runs a launch; `per_dollar` divides the improvement by what the run costs by the process's mean."""
        order = np.random.default_rng(seed).permutation(len(ground.step_s)).tolist()
        super().__init__(ground, order, at_once)
        self._features, self._seed, self._costs = features, seed, costs
        self._per_dollar, self._trusting = per_dollar, trusting
        self._turn, self._kernel, self._fitted = 0, None, 0
        self._moments: tuple[int, FloatArray, FloatArray] | None = None

    def next(self) -> list[int]:
        """The run that the next question in turn would have, and what those after it would have on the same cluster."""
        left = [place for place in self._order if place not in self.seen]
        if not left or len(self.seen) < _FIRST:
            return left[:1]
        found: list[int] = []
        for _ in self.ground.questions:
            question = self.ground.questions[self._turn % len(self.ground.questions)]
            self._turn += 1
            score = self._improvement(question)
            cluster = self.ground.clusters[found[0]] if found else ""
            free = [
                at
                for at, place in enumerate(question.places.tolist())
                if place not in self.seen and place not in found and cluster in ("", self.ground.clusters[place])
            ]
            if free:
                found.append(int(question.places[max(free, key=lambda at: score[at])]))
            if len(found) == self._at_once:
                break
        return found or left[:1]

    def choices(self) -> list[int | None]:
        """The best seen; by the process where asked to."""
        found = super().choices()
        if not self._trusting or len(self.seen) < _FIRST:
            return found
        mean, _ = self._process()
        return [self._by_mean(question, mean) for question in self.ground.questions]

    def _by_mean(self, question: Question, mean: FloatArray) -> int:
        by = self._objectives(question, mean)
        if question.limited is None:
            return int(np.argmin(by[question.aim]))
        able = by[question.limited] <= np.log(question.limit)
        if not able.any():
            return int(np.argmin(by[question.limited]))
        return int(np.argmin(np.where(able, by[question.aim], np.inf)))

    def _objectives(self, question: Question, log_step: FloatArray) -> dict[str, FloatArray]:
        work = question.hours_per_step_s * np.exp(log_step[question.places])
        hours = np.log(question.fixed_hours + work)
        return {"hours": hours, "usd": hours + np.log(question.usd_per_hour)}

    def _improvement(self, question: Question) -> FloatArray:
        mean, spread = self._process()
        by, sd = self._objectives(question, mean), np.maximum(spread[question.places], 1e-6)
        able = np.ones(len(sd))
        if question.limited is not None:
            able = norm.cdf((np.log(question.limit) - by[question.limited]) / sd)
        seen = np.array([int(place) in self.seen for place in question.places], dtype=bool)
        good = seen & (able > 0.5)
        score = able
        if good.any():
            z = (by[question.aim][good].min() - by[question.aim]) / sd
            score = sd * (z * norm.cdf(z) + norm.pdf(z)) * able
        if self._per_dollar:
            run_s = np.array([self._costs.run_s(float(one)) for one in np.exp(mean[question.places])])
            score = score / (question.usd_per_hour * (self._costs.launch_s + run_s))
        return np.asarray(score)

    def _process(self) -> tuple[FloatArray, FloatArray]:
        """Mean and deviation of log step of every setup; what was measured is known."""
        if self._moments is not None and self._moments[0] == len(self.seen):
            return self._moments[1:]
        places = sorted(self.seen)
        target = np.log([self.seen[place] for place in places])
        again = self._kernel is None or len(places) - self._fitted >= _REFIT
        kernel = self._kernel
        if kernel is None:
            lengths = np.ones(self._features.shape[1])
            kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(lengths, (1e-1, 1e2), nu=2.5) + WhiteKernel(
                1e-2, (1e-4, 1)
            )
        process = GaussianProcessRegressor(
            kernel, normalize_y=True, optimizer="fmin_l_bfgs_b" if again else None, random_state=self._seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # lengths at their bounds: a feature that tells nothing
            process.fit(self._features[places], target)
        if again:
            self._kernel, self._fitted = process.kernel_, len(places)
        mean, spread = process.predict(self._features, return_std=True)
        mean[places], spread[places] = target, 0.0
        self._moments = (len(self.seen), mean, spread)
        return mean, spread

"""Fit log durations with partial pooling: each group has a mean, and its members deviate from it.

    log seconds = mu_group + u_group,member + b (x - mean of x) + noise

A group is, for example, a market or the outcome of a restart; a member is an instance type. x is a
covariate, for example the log number of machines, and b is its effect. The priors of mu_group, b
and u are normal; u has the mean 0. The posterior follows from Bayesian linear regression. The
standard deviation of the noise is estimated from repeated durations of each member, and shrunk
towards a prior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray

Normal = tuple[float, float]  # mean and standard deviation
_SPREAD_WEIGHT = 6.0  # number of observations that the prior of the noise counts as


@dataclass(frozen=True, kw_only=True)
class LogSeconds:
    """The prior or the posterior of log durations, by group and by member of a group.

    A group is, for example, a market; a member is an instance type. x is a covariate, for example
    the log number of machines.

    - `centre`: the mean x of the observations; in a prior, a reference value of x.
    - `groups`: {group: (mean, standard deviation) of its log median seconds at x = `centre`}.
    - `members`: {(group, member): (mean, standard deviation) of its log median seconds at x =
      `centre`}; empty in a prior.
    - `slope`: (mean, standard deviation) of the effect of x on log seconds.
    - `member_sd`: how much the log medians of a group's members differ (standard deviation).
    - `noise_sd`: how much the logs of repeated durations of a member differ (standard deviation).
    """

    groups: Mapping[str, Normal]
    member_sd: float
    noise_sd: float
    members: Mapping[tuple[str, str], Normal] = field(default_factory=dict)
    slope: Normal = (0.0, 1e-9)
    centre: float = 0.0

    def log_medians(self, keys: Sequence[tuple[str, str]]) -> FloatArray:
        """Return a (keys, 2) array: the log median seconds and its standard deviation.

        The medians are for x = `centre`. Each key is a (group, member). An unknown member has the
        median of its group.
        """
        found = []
        for key in keys:
            middle, sd = self.groups[key[0]]
            unseen = middle, np.hypot(sd, self.member_sd)
            found.append(self.members.get(key, unseen))
        return np.array(found, float).reshape(-1, 2)

    def predict(
        self, keys: Sequence[tuple[str, str]], x: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Predict the log seconds of each (group, member) in `keys` at the covariate `x`.

        Returns two arrays: log medians, and standard deviations of the log of a new duration. If
        `x` has the shape (keys,), the results have the same shape. If `x` has the shape (rows, 1),
        the results have the shape (rows, keys).
        """
        middle, sd = self.log_medians(keys).T
        growth = x - self.centre
        log_sd = np.sqrt(sd**2 + (self.slope[1] * growth) ** 2 + self.noise_sd**2)
        return middle + self.slope[0] * growth, log_sd

    def expected_s(self, group: str, members: Sequence[str]) -> FloatArray:
        """Return a (members,) array: the mean seconds of each member of `group`.

        The covariate x is 0.
        """
        keys = [(group, member) for member in members]
        middle, log_sd = self.predict(keys, np.zeros(len(keys)))
        return np.exp(middle + log_sd**2 / 2)

    def fitted(self, observed: pd.DataFrame) -> LogSeconds:
        """Return the posterior, given observed durations.

        `observed` has a row per duration, with columns group, member, seconds and x.

        Raises:
            ValueError: if seconds are not above 0 or a group is unknown.
        """
        if not len(observed):
            return self
        if not (observed["seconds"] > 0).all():
            raise ValueError("observed seconds must be above 0")
        logs = np.log(observed["seconds"].to_numpy(float))
        x = observed["x"].to_numpy(float)
        groups = list(self.groups)
        cell, members = observed.set_index(["group", "member"]).index.factorize(sort=True)
        group = np.array([groups.index(name) for name, _ in members])
        parts = np.eye(len(groups))[group[cell]], np.eye(len(members))[cell], x - x.mean()
        design = np.column_stack(parts)
        unseen = [(0.0, self.member_sd)] * len(members)
        mean, sd = np.array([*self.groups.values(), *unseen, self.slope], float).T
        # `groups` has log medians at x = centre, but the design is centred at the mean of x
        mean[: len(groups)] += self.slope[0] * (x.mean() - self.centre)

        def posterior(noise_sd: float) -> tuple[FloatArray, FloatArray]:
            """Return the posterior mean and covariance of the coefficients of the regression.

            `noise_sd` is the standard deviation of the residuals.
            """
            covariance = np.linalg.inv(design.T @ design / noise_sd**2 + np.diag(sd**-2.0))
            shift = covariance @ (design.T @ (logs - design @ mean)) / noise_sd**2
            return mean + shift, covariance

        residual = logs - posterior(self.noise_sd)[0][-1] * design[:, -1]
        residual = residual - (np.bincount(cell, residual) / np.bincount(cell))[cell]
        freedom = len(logs) - len(members) + _SPREAD_WEIGHT
        square = residual @ residual + _SPREAD_WEIGHT * self.noise_sd**2
        noise_sd = np.sqrt(square / freedom)
        location, covariance = posterior(noise_sd)

        def normal(*terms: int) -> Normal:
            """Return the posterior mean and standard deviation of a sum of coefficients.

            `terms` are the positions of the coefficients to add.
            """
            at = list(terms)
            return location[at].sum(), np.sqrt(covariance[np.ix_(at, at)].sum())

        of_member = [normal(group[at], len(groups) + at) for at in range(len(members))]
        return replace(
            self,
            groups={name: normal(at) for at, name in enumerate(groups)},
            members=dict(zip(members, of_member, strict=True)),
            noise_sd=noise_sd,
            slope=normal(len(mean) - 1),
            centre=x.mean(),
        )

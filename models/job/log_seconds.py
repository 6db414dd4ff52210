"""Partial pooling of logged durations: market -> type, or outcome -> type.

    log seconds = mu_group + u_group,member + b (x - mean x) + noise

mu_group is normal about the log of a stated prior, u about 0 and b about its prior, so that the
posterior is that of a linear regression. The noise is the spread around each member's mean, pooled
and shrunk to its prior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray

Normal = tuple[float, float]  # mean and standard deviation
_SPREAD_WEIGHT = 6.0  # observations that the prior of a spread counts as


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Medians in seconds by group, and standard deviations in logs of groups, members and
    repeats.
    """

    median_s: Mapping[str, float]
    group_sd: float
    member_sd: float
    noise_sd: float
    slope: Normal = (0.0, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSeconds:
    """Normal log medians by group and by (group, member) at `centre`, the slope, and the spread of
    repeats.
    """

    groups: Mapping[str, Normal]
    member_sd: float
    noise_sd: float
    members: Mapping[tuple[str, str], Normal] = field(default_factory=dict)
    slope: Normal = (0.0, 0.0)
    centre: float = 0.0

    def log_medians(self, keys: Sequence[tuple[str, str]]) -> FloatArray:
        """Return (keys, 2) log medians and their standard deviations by (group, member).

        Raises:
            ValueError: for an unknown group.
        """
        found = []
        for group, member in keys:
            if group not in self.groups:
                raise ValueError(f"{group!r} is none of {', '.join(self.groups)}")
            middle, sd = self.groups[group]
            unseen = middle, float(np.hypot(sd, self.member_sd))
            found.append(self.members.get((group, member), unseen))
        return np.array(found, dtype=float).reshape(-1, 2)

    def expected_s(self, group: str, members: Sequence[str]) -> FloatArray:
        """Return (members,) mean seconds."""
        middle, sd = self.log_medians([(group, member) for member in members]).T
        return np.asarray(np.exp(middle + (sd**2 + self.noise_sd**2) / 2), dtype=float)


def prior_of(prior: Prior) -> LogSeconds:
    """Return the model before any observation."""
    groups = {name: (float(np.log(s)), prior.group_sd) for name, s in prior.median_s.items()}
    return LogSeconds(
        groups=groups, member_sd=prior.member_sd, noise_sd=prior.noise_sd, slope=prior.slope
    )


def fit_log_seconds(observed: pd.DataFrame, prior: Prior) -> LogSeconds:
    """Fit columns group, member, seconds and x.

    Raises:
        ValueError: for seconds that are not above 0, or an unknown group.
    """
    seconds = observed["seconds"].to_numpy(dtype=float)
    if not (seconds > 0).all():
        raise ValueError("seconds must be above 0")
    if unknown := sorted(set(observed["group"].astype(str)) - set(prior.median_s)):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(prior.median_s)}")
    if not len(observed):
        return prior_of(prior)
    groups = list(prior.median_s)
    keys = list(zip(observed["group"].astype(str), observed["member"].astype(str), strict=True))
    members = sorted(set(keys))
    cell = np.array([members.index(key) for key in keys])
    x = observed["x"].to_numpy(dtype=float)
    centre = float(x.mean())
    design = np.column_stack(
        [
            np.eye(len(groups))[[groups.index(group) for group, _ in keys]],
            np.eye(len(members))[cell],
            x - centre,
        ]
    )
    mean = np.array(
        [*np.log(list(prior.median_s.values())), *np.zeros(len(members)), prior.slope[0]]
    )
    sd = np.repeat(
        [prior.group_sd, prior.member_sd, prior.slope[1]], [len(groups), len(members), 1]
    )
    location, _ = _posterior(design, np.log(seconds), mean, sd, prior.noise_sd)
    residual = np.log(seconds) - location[-1] * design[:, -1]
    residual = residual - (np.bincount(cell, residual) / np.bincount(cell))[cell]
    freedom = len(keys) - len(members) + _SPREAD_WEIGHT
    noise = float(np.sqrt((residual @ residual + _SPREAD_WEIGHT * prior.noise_sd**2) / freedom))
    location, covariance = _posterior(design, np.log(seconds), mean, sd, noise)

    def normal(*terms: int) -> Normal:
        at = list(terms)
        return float(location[at].sum()), float(np.sqrt(covariance[np.ix_(at, at)].sum()))

    return LogSeconds(
        groups={name: normal(at) for at, name in enumerate(groups)},
        members={
            key: normal(groups.index(key[0]), len(groups) + at) for at, key in enumerate(members)
        },
        member_sd=prior.member_sd,
        noise_sd=noise,
        slope=normal(len(location) - 1),
        centre=centre,
    )


def _posterior(
    design: FloatArray, target: FloatArray, mean: FloatArray, sd: FloatArray, noise: float
) -> tuple[FloatArray, FloatArray]:
    covariance = np.linalg.inv(design.T @ design / noise**2 + np.diag(sd**-2.0))
    location = mean + covariance @ (design.T @ (target - design @ mean)) / noise**2
    return np.asarray(location, dtype=float), np.asarray(covariance, dtype=float)

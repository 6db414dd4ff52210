"""Estimate the interruption rate of spot machines by type and zone, and its variance over time.

Rates are interruptions per machine-hour. The advised rate of an instance type is the rate that
EC2's Spot Advisor publishes.

    m_type      ~ lognormal around offset x advised rate
    lambda_zone ~ Gamma(shape 1, mean m_type)
    N_window    ~ Poisson(lambda_zone x hours x G)
    G           ~ Gamma(mean 1, variance = bunching + bunching x tau / (tau + hours))

- m_type: the rate of an instance type.
- `offset`: the ratio of real rates to advised rates, common to all types.
- lambda_zone: the rate of the type in a zone. With shape 1, the rate may lie anywhere between 0
  and a few times m_type. The shape is not learned, because a type has only a few zones.
- N_window: the number of interruptions in an observed period (window) of `hours` machine-hours.
- G: the demand in a zone, relative to its mean. Demand has peaks of some hours, and drifts during
  weeks. Interruptions therefore come in bunches and are not memoryless [CM-DARE, Li et al. 2020].
- `bunching`: the variance of G due to the drift. The second term of the variance is due to peaks,
  which average out in long windows.
- tau: the typical duration of a peak, 24 hours.

The estimate for a zone lies between the rate of the instance type and the rate that was observed in
the zone.

An interruption takes either all machines of a type in a zone, or a single machine. `shared` is the
share of a machine's interruptions that take all machines. n machines of a type in a zone therefore
suffer `shared + n (1 - shared)` times the interruptions of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..domain.cluster import Pool, bucket_hazard
from ..domain.numeric import FloatArray

TypeInZone = tuple[str, str]  # instance type, zone
Pair = tuple[float, float] | FloatArray

# Standard deviations of log(offset), and of a type's log rate around offset x its advised rate.
# The offset is uncertain because Spot Advisor does not publish how its rates are defined.
_OFFSET_SD, _TYPE_SD = 1.5, 0.7
# Prior mean of bunching, and the weight of the prior in squared expected interruptions.
_BUNCHING, _BUNCHING_WEIGHT = 1.0, 4.0
_SHOCK_HOURS = 24.0  # tau
# The variance of future demand, divided by the variance within the record. Derived for demand that
# is a random walk, and for a future period as long as the record. The walk gains the variance V in
# such a period. Mean future demand minus mean demand in the record has the variance 2/3 V. The
# variance within the record is 1/6 V.
_AHEAD = 4.0
_SHARED = (1.0, 1.0)  # Beta prior of the share of interruptions that take all machines of a pool


def short_job_weight(hours: ArrayLike) -> FloatArray:
    """Return tau / (tau + hours), with tau = 24 hours: near 1 for short jobs, near 0 for long jobs.

    The demand for spot machines has peaks of about 24 hours, which average out in long jobs. The
    result is the variance of the mean demand over `hours`, divided by the variance of the demand at
    a single time.
    """
    return _SHOCK_HOURS / (_SHOCK_HOURS + np.maximum(hours, 0.0))


class HazardModel(NamedTuple):
    """The posterior of the hazard: interruptions per hour of one spot machine.

    - `types`: the mean and standard deviation of each instance type's log hazard.
    - `zones`: the shape and rate of the Gamma posterior of each (instance type, zone).
    - `offset`: the mean and standard deviation of log(hazard / rate that Spot Advisor publishes).
    - `bunching`: the relative variance of the hazard over time, caused by changes of demand.
    - `shared`: the share of a machine's interruptions that take all machines of its type in the
      zone.
    """

    types: Mapping[str, Pair]
    zones: Mapping[TypeInZone, Pair]
    offset: tuple[float, float]
    bunching: float
    shared: float

    def gangs(
        self, pools: Sequence[Pool], counts: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return three (clusters,) arrays: interruptions per hour, their uncertainty, and bunching.

        The uncertainty is the relative variance of the estimated rate. Bunching is the relative
        variance of the true rate over time. A pool is an instance type in a zone. `counts` is a
        (clusters, pools) array with the number of machines from each pool.
        """
        rate, doubt = self.rates(pools).T
        of_pool = np.where(counts > 0, self.shared + counts * (1 - self.shared), 0.0) * rate
        total = of_pool.sum(axis=1)
        weights = (of_pool / np.maximum(total, 1e-300)[:, None]) ** 2
        return total, weights @ doubt, self.bunching * weights.sum(axis=1)

    def rates(self, pools: Sequence[Pool]) -> FloatArray:
        """Return a (pools, 2) array: one machine's interruptions per hour, and their uncertainty.

        A pool is an instance type in a zone. The uncertainty is the relative variance of the
        estimate.
        """
        found = []
        for instance_type, _, zone, advised in pools:
            # An on-demand pool has no rate. It has no spot machines, so that any rate will do.
            unseen = np.log(advised or 1) + self.offset[0], np.hypot(self.offset[1], _TYPE_SD)
            middle, doubt = self.types.get(instance_type, unseen)
            # The advised rate is the mean, not the median. With a median, the prior uncertainty
            # would make spot look four times as bad before the first launch. The uncertainty of the
            # type counts less if the zone was observed.
            shape, rate = self.zones.get((instance_type, zone), (1.0, np.exp(-middle)))
            of_type = np.expm1((doubt / shape) ** 2)
            found.append((shape / rate, (1 + 1 / shape) * (1 + of_type) - 1))
        return np.array(found).reshape(-1, 2)


def fit_hazard(
    windows: pd.DataFrame,
    *,
    advised: Mapping[str, float] | None = None,
    together: pd.DataFrame | None = None,
) -> HazardModel:
    """Fit interruptions per hour to observed machine-hours.

    Args:
        windows: a row per observed period, with columns instance_type, zone, hours (machine-hours,
            above 0) and interruptions. A period must not end early because of an interruption.
            Otherwise, the rates are overestimated.
        advised: {instance type: interruptions per hour that Spot Advisor publishes}. A missing type
            gets Spot Advisor's highest rate.
        together: a row for each launch and pool (instance type in a zone) that lost machines. The
            columns are machines (number that ran) and lost (number that were interrupted). None
            if there is no such launch.
    """
    pools = windows.groupby(["instance_type", "zone"])[["hours", "interruptions"]].sum()
    hours, count = pools.to_numpy(float).T
    at, names = pools.index.get_level_values("instance_type").factorize(sort=True)
    listed = pd.Series(advised, dtype=float).reindex(names)
    prior = np.log(listed.where(listed > 0, bucket_hazard(None)).to_numpy())

    def minus_log_posterior(theta: FloatArray) -> float:
        """Return the negative log posterior at `theta`.

        `theta` has a deviation for each instance type, followed by log(offset). The log hazard of a
        type is the log of its advised rate, plus its deviation, plus log(offset).
        """
        logs = (prior + theta[-1] + theta[:-1])[at] + np.log(hours)
        likelihood = count * logs - (count + 1) * np.logaddexp(0.0, logs)
        deviations = theta / np.array([_TYPE_SD] * len(names) + [_OFFSET_SD])
        return float(0.5 * deviations @ deviations - likelihood.sum())

    best = np.zeros(len(names) + 1)
    if len(names):
        from scipy.optimize import minimize  # slow to import

        best = minimize(minus_log_posterior, best, method="L-BFGS-B").x
    logs = prior + best[-1] + best[:-1]
    interrupted = np.sum(np.bincount(at, count) > 0)
    offset_sd = (1 / _OFFSET_SD**2 + interrupted / _TYPE_SD**2) ** -0.5
    rate = np.exp(logs)[at]
    expected = rate * hours
    information = np.bincount(at, expected / (1 + expected))
    doubt = (1 / (_TYPE_SD**2 + offset_sd**2) + information) ** -0.5
    zone_rate = pd.Series((1 + count) / (1 + expected) * rate, pools.index)
    bunching = _rate_variance(windows, zone_rate)
    # The rate of a zone drifts, so its observations count for at most 1 / bunching interruptions.
    weight = 1 / (1 + bunching * expected)
    posterior = np.column_stack([1 + weight * count, 1 / rate + weight * hours])
    return HazardModel(
        types=dict(zip(names, np.column_stack([logs, doubt]), strict=True)),
        zones=dict(zip(pools.index, posterior, strict=True)),
        offset=(best[-1], offset_sd),
        bunching=bunching,
        shared=_whole_pool_share(together),
    )


def _rate_variance(windows: pd.DataFrame, zone_rate: pd.Series[float]) -> float:
    """Estimate the relative variance of the interruption rate over time.

    The estimate is large if the numbers of interruptions vary more than Poisson numbers would.
    `windows` has a row per observed period. `zone_rate` has the interruptions per hour of each
    (instance type, zone).
    """
    pools = pd.MultiIndex.from_frame(windows[["instance_type", "zone"]])
    hours, count = windows[["hours", "interruptions"]].to_numpy(float).T
    expected = zone_rate.loc[pools].to_numpy() * hours
    felt = 1 / _AHEAD + float(short_job_weight(hours @ expected / max(expected.sum(), 1e-300)))
    excess = float(np.sum((count - expected) ** 2 - expected))
    weight = float(np.sum(expected**2)) + _BUNCHING_WEIGHT
    return max(excess / felt + _BUNCHING_WEIGHT * _BUNCHING, 0.0) / weight


def _whole_pool_share(together: pd.DataFrame | None) -> float:
    """Return the share of interrupted machines that were lost together with their whole pool.

    A pool is all machines of one instance type and zone in a launch. `fit_hazard` describes
    `together`.
    """
    whole, single = _SHARED
    if together is not None:
        gangs = together[together["machines"] > 1]
        all_lost = gangs["lost"] == gangs["machines"]
        whole += gangs["lost"][all_lost].sum()
        single += gangs["lost"][~all_lost].sum()
    return whole / (whole + single)

"""Estimate interruptions per hour of spot machines by type and zone, and how much they bunch.

    m_type      ~ lognormal around offset x its advised rate
    lambda_zone ~ Gamma(shape 1, mean m_type)
    N_window    ~ Poisson(lambda_zone hours G)
    G           ~ Gamma(mean 1, variance bunching (1 + tau / (tau + hours)))

With shape 1, a zone's rate may lie anywhere between 0 and a few times the mean; the few zones of a
type do not identify another shape. The Gamma-Poisson pair is conjugate: observed hours and
interruptions move a zone's rate from its type's mean towards the observed rate. G is demand that
hits a zone for hours and drifts over weeks, since interruptions are not memoryless (CM-DARE [P]).
An interruption takes either all machines of a type in a zone or a single machine. n such machines
suffer `shared + n (1 - shared)` times the interruptions of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..domain.cluster import bucket_hazard
from ..domain.numeric import FloatArray

TypeInZone = tuple[str, str]  # instance type, zone
Pair = tuple[float, float] | FloatArray
SpotPool = tuple[str, str, float]  # instance type, zone, advised interruptions per hour

# Standard deviations of logs: the factor between Spot Advisor's rates, whose definition is not
# published, and ours; and a type around that factor.
_OFFSET_SD, _TYPE_SD = 1.5, 0.7
# Prior of bunching, its weight in squared expected interruptions, and tau.
_BUNCHING, _BUNCHING_WEIGHT, _SHOCK_HOURS = 1.0, 4.0, 24.0
# If demand is a random walk, its mean over a future period as long as the record differs from the
# record's mean. The variance of that difference is this many times the variance within the record
# (2/3 against 1/6 of the walk's variance over the period) [D].
_AHEAD = 4.0
_SHARED = (1.0, 1.0)  # Beta prior of the share of interruptions that take the whole zone


def passing(hours: ArrayLike) -> FloatArray:
    """Return the share of a shock's variance that affects jobs of `hours`.

    Shocks last about a day, so that they average out over long jobs.
    """
    length = np.maximum(np.asarray(hours, dtype=float), 0.0)
    return np.asarray(_SHOCK_HOURS / (_SHOCK_HOURS + length), dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class HazardModel:
    """Posterior of the interruptions per hour of one spot machine.

    `types` has the mean and standard deviation of the log rate by instance type. `zones` has the
    shape and rate of the Gamma posterior by type and zone. `offset` is the mean and standard
    deviation of the log factor over advised rates. `bunching` is the variance of G. `shared` is
    the share of a machine's interruptions that take all machines of its type in the zone.
    """

    types: Mapping[str, Pair]
    zones: Mapping[TypeInZone, Pair]
    offset: tuple[float, float]
    bunching: float
    shared: float

    def gangs(
        self, pools: Sequence[SpotPool], counts: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return hazards per hour, relative variances of their estimates, and bunching.

        All three are (gangs,); `counts` is (gangs, pools) machines. The bunching of a gang in
        several zones averages out.
        """
        rate, doubt = self.rates(pools).T
        of_pool = np.where(counts > 0, self.shared + counts * (1 - self.shared), 0.0) * rate
        total = of_pool.sum(axis=1)
        weights = (of_pool / np.maximum(total, 1e-300)[:, None]) ** 2
        return total, weights @ doubt, self.bunching * weights.sum(axis=1)

    def rates(self, pools: Sequence[SpotPool]) -> FloatArray:
        """Return interruptions per hour of one machine and the estimates' relative variances.

        The shape is (pools, 2).
        """
        return np.array([self._rate(*pool) for pool in pools], dtype=float).reshape(-1, 2)

    def _rate(self, instance_type: str, zone: str, advised: float) -> tuple[float, float]:
        """Return a pool's interruptions per hour of one machine, and their relative variance."""
        if instance_type not in self.types and advised <= 0:
            return 0.0, 0.0
        unseen = np.log(advised or 1) + self.offset[0], np.hypot(self.offset[1], _TYPE_SD)
        middle, doubt = self.types.get(instance_type, unseen)
        # The advised rate counts as the mean, not the median: a prior uncertainty of a factor of
        # four must not make spot look four times as bad before the first launch. The uncertainty
        # of the type counts less if its zone was observed.
        shape, rate = self.zones.get((instance_type, zone), (1.0, np.exp(-middle)))
        of_type = np.expm1((doubt / shape) ** 2)
        return shape / rate, (1 + 1 / shape) * (1 + of_type) - 1


def fit_hazard(
    windows: pd.DataFrame,
    *,
    advised: Mapping[str, float] | None = None,
    together: pd.DataFrame | None = None,
) -> HazardModel:
    """Fit the model to observed machine-hours and interruptions; without any, return the prior.

    Args:
        windows: instance_type, zone, machine-hours `hours` (above 0) and `interruptions`, with a
            row per period. Periods must not end because of an interruption.
        advised: advised interruptions per hour by instance type.
        together: the number of `machines` that ran and of machines `lost`, with a row per launch
            and pool with losses.
    """
    shared = _shared(together)
    if not len(windows):
        return HazardModel(
            types={}, zones={}, offset=(0.0, _OFFSET_SD), bunching=_BUNCHING, shared=shared
        )
    pools = windows.groupby(["instance_type", "zone"])[["hours", "interruptions"]].sum()
    hours, count = pools.to_numpy(dtype=float).T
    at, names = pools.index.get_level_values("instance_type").factorize(sort=True)
    listed = pd.Series(advised or {}, dtype=float).reindex(names)
    prior = np.log(listed.where(listed > 0, bucket_hazard(None)).to_numpy())

    def minus_log_posterior(theta: FloatArray) -> float:
        """Return the negative log posterior at `theta`: the types' deviations, then the offset."""
        logs = (prior + theta[-1] + theta[:-1])[at] + np.log(hours)
        likelihood = count * logs - (count + 1) * np.logaddexp(0.0, logs)
        deviations = theta / np.array([_TYPE_SD] * len(names) + [_OFFSET_SD])
        return float(0.5 * deviations @ deviations - likelihood.sum())

    from scipy.optimize import minimize  # slow to import; not needed without data

    best = minimize(minus_log_posterior, np.zeros(len(names) + 1), method="L-BFGS-B").x
    logs = prior + best[-1] + best[:-1]
    interrupted = float(np.sum(np.bincount(at, count) > 0))
    offset_sd = float((1 / _OFFSET_SD**2 + interrupted / _TYPE_SD**2) ** -0.5)
    rate = np.exp(logs)[at]
    expected = rate * hours
    information = np.bincount(at, expected / (1 + expected))
    doubt = (1 / (_TYPE_SD**2 + offset_sd**2) + information) ** -0.5
    zone_rate = pd.Series((1 + count) / (1 + expected) * rate, pools.index)
    bunching = _bunching(windows, zone_rate)
    # Zones drift, so that the past counts less: as at most 1 / bunching interruptions.
    weight = 1 / (1 + bunching * expected)
    posterior = np.column_stack([1 + weight * count, 1 / rate + weight * hours])
    return HazardModel(
        types=dict(zip(names, np.column_stack([logs, doubt]), strict=True)),
        zones=dict(zip(pools.index, posterior, strict=True)),
        offset=(float(best[-1]), offset_sd),
        bunching=bunching,
        shared=shared,
    )


def _bunching(windows: pd.DataFrame, zone_rate: pd.Series[float]) -> float:
    """Estimate bunching from the excess variance of windows at each zone's rate, with the prior."""
    pools = pd.MultiIndex.from_frame(windows[["instance_type", "zone"]])
    hours, count = windows[["hours", "interruptions"]].to_numpy(dtype=float).T
    expected = zone_rate.loc[pools].to_numpy() * hours
    felt = 1 / _AHEAD + float(passing(np.average(hours, weights=expected)))
    excess = float(np.sum((count - expected) ** 2 - expected))
    weight = float(np.sum(expected**2)) + _BUNCHING_WEIGHT
    return max(excess / felt + _BUNCHING_WEIGHT * _BUNCHING, 0.0) / weight


def _shared(together: pd.DataFrame | None) -> float:
    """Return the posterior mean of `HazardModel.shared`.

    `together` is an argument of `fit_hazard`.
    """
    whole, single = _SHARED
    if together is not None:
        gangs = together[together["machines"] > 1]
        all_lost = gangs["lost"] == gangs["machines"]
        whole += float(gangs["lost"][all_lost].sum())
        single += float(gangs["lost"][~all_lost].sum())
    return whole / (whole + single)

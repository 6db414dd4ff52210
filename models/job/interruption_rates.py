"""Interruptions an hour of spot machines, by type and zone, and how far they bunch.

    m_type   ~ lognormal around offset x its advised rate    lambda_zone ~ Gamma(shape s_type, mean m_type)
    N_window ~ Poisson(lambda_zone hours G)                  G ~ Gamma(mean 1, variance drift + shock tau/(tau + hours))

The Gamma-Poisson is conjugate, so that own hours and interruptions move a zone from its type's rate to its own. G is
what hits a zone for hours on end, and how its demand drifts over weeks: interruptions are not memoryless (CM-DARE [P]),
and next month is not this one. An interruption takes all machines of a type in a zone, or one: n of them suffer
`shared + n (1 - shared)` times the interruptions of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy  # its parts are loaded where they are named: only a fit needs `optimize`, which takes long to import
from numpy.typing import ArrayLike
from scipy.special import gammaln

from ..domain.cluster import bucket_hazard
from ..domain.numeric import FloatArray, IntArray

TypeInZone = tuple[str, str]  # instance type, zone

# How Spot Advisor counts (`bucket_hazard`) is not published: a factor common to all types is learned beside
# one of each type. Standard deviations of their logs.
_OFFSET_SD, _TYPE_SD = 1.5, 0.7
# Zones of a type: shape of the Gamma, one: a zone is as likely near nothing as twice the mean. Standard deviations of
# its log, for all types and for one around them.
_ZONE_SHAPE, _SHAPE_SD, _TYPE_SHAPE_SD = 1.0, 1.0, 1.0
# Bunching before it was observed: variances of G that pass within about a day (capacity follows the working day) and
# that stay for weeks, each counted as so many squared expected interruptions; a block of days tells the two apart.
_SHOCK, _DRIFT, _BUNCHING_WEIGHT, _SHOCK_HOURS, _BLOCK = 1.0, 1.0, 4.0, 24.0, 7
# If demand walks at random, its mean over a time as long as the record lies this many times the variance within the
# record from the record's mean (2/3 against 1/6 of what it walks in that time) [D].
_AHEAD = 4.0
_SHARED = (1.0, 1.0)  # Beta prior of the part of interruptions that takes the whole zone


@dataclass(frozen=True, slots=True, kw_only=True)
class GangHazards:
    """Of many gangs at once, (gangs,) each: their rate, the doubt of it, and the part of one machine's bunching that is
    left where several zones even each other out. `machine` is the rate of one machine, (pools,).
    """

    per_hour: FloatArray
    doubt: FloatArray
    concentration: FloatArray
    machine: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class HazardModel:
    """Rates by type (log mean, its doubt, shape of its zones) and by zone (shape and rate of the Gamma posterior).

    `offset` is the log of what all types have over their buckets, with its doubt; `shape` that of a new type's zones.
    """

    types: Mapping[str, tuple[float, float, float]]
    zones: Mapping[TypeInZone, tuple[float, float]]
    offset: tuple[float, float]
    shape: float
    shock: float  # variance of G over a job that is short beside a day
    drift: float
    shared: float
    advised: Mapping[str, float]  # interruptions an hour by type, before anything was seen

    def gangs(
        self, pools: Sequence[tuple[str, str, float | None]], counts: FloatArray
    ) -> GangHazards:
        """Hazards of `counts` (gangs, pools) spot machines; a pool is a type, a zone, what is advised."""
        known = np.array([self._rate(*pool) for pool in pools]).reshape(-1, 2)
        rates = np.where(counts > 0, known[:, 0] * (self.shared + counts * (1 - self.shared)), 0.0)
        total = rates.sum(axis=1)
        weights = (rates / np.maximum(total, 1e-300)[:, None]) ** 2
        return GangHazards(
            per_hour=total,
            doubt=weights @ known[:, 1],
            concentration=weights.sum(axis=1),
            machine=known[:, 0],
        )

    def _rate(self, instance_type: str, zone: str, advised: float | None) -> tuple[float, float]:
        """(interruptions an hour of one machine, the variance of the doubt of it over its square)."""
        usual = self.advised.get(instance_type, bucket_hazard(None)) if advised is None else advised
        seen = self.types.get(instance_type)
        if seen is None and usual <= 0:
            return 0.0, 0.0
        middle, doubt, zone_shape = seen or (
            float(np.log(usual)) + self.offset[0],
            float(np.hypot(self.offset[1], _TYPE_SD)),
            self.shape,
        )
        # What is advised is taken for the mean, not the median: doubt of a factor of four must not make spot look four
        # times as bad before anybody tried. What is not known of the type counts less where its zone was seen.
        known = self.zones.get((instance_type, zone))
        shape, rate = known or (zone_shape, zone_shape / float(np.exp(middle)))
        weight = zone_shape / shape
        of_type = float(np.expm1((weight * doubt) ** 2))
        return shape / rate, (1 + 1 / shape) * (1 + of_type) - 1


def fit_hazard(
    windows: pd.DataFrame,
    *,
    advised: Mapping[str, float] | None = None,
    together: pd.DataFrame | None = None,
) -> HazardModel:
    """The model learned from own exposure; without any, the prior.

    `windows`: instance_type, zone, hours one machine ran, interruptions in them; windows of a pool should not be cut
    at interruptions. `advised`: interruptions an hour by type, before any exposure. `together`: of each interruption
    the machines of the pool that ran (`machines`) and were `lost`. Raises ValueError for hours that are not positive.
    """
    if not (windows["hours"].to_numpy(dtype=float) > 0).all():
        raise ValueError("windows of exposure must have hours above 0")
    prior_rates = {name: rate for name, rate in (advised or {}).items() if rate > 0}
    pools = (
        windows.groupby(["instance_type", "zone"])[["hours", "interruptions"]].sum().reset_index()
    )
    names = sorted(pools["instance_type"].unique())
    prior = np.array([np.log(prior_rates.get(name, bucket_hazard(None))) for name in names])
    at = np.array([names.index(name) for name in pools["instance_type"]], dtype=np.intp)
    hours, count = (
        pools["hours"].to_numpy(dtype=float),
        pools["interruptions"].to_numpy(dtype=float),
    )
    logs, shapes, offset, shared_shape = _rates(at, hours, count, prior)
    shape = shapes[at]
    expected = np.exp(logs)[at] * hours
    information = np.bincount(at, shape * expected / (shape + expected), minlength=len(names))
    doubt = (1 / (_TYPE_SD**2 + offset[1] ** 2) + information) ** -0.5
    names_of = [
        (str(kind), str(zone))
        for kind, zone in zip(pools["instance_type"], pools["zone"], strict=True)
    ]
    mean = dict(zip(names_of, (shape + count) / (shape + expected) * np.exp(logs)[at], strict=True))
    shock, drift = _bunching(windows, mean)
    # what a drifting zone did counts less than what it was counted on: at most 1 / drift interruptions
    weight = 1 / (1 + drift * expected)
    posterior = np.column_stack([shape + weight * count, shape / np.exp(logs)[at] + weight * hours])
    zones = {
        pool: (float(one[0]), float(one[1])) for pool, one in zip(names_of, posterior, strict=True)
    }
    return HazardModel(
        types={
            name: (float(logs[i]), float(doubt[i]), float(shapes[i]))
            for i, name in enumerate(names)
        },
        zones=zones,
        offset=offset,
        shape=shared_shape,
        shock=shock,
        drift=drift,
        shared=_shared(together),
        advised=prior_rates,
    )


def _rates(
    at: IntArray, hours: FloatArray, count: FloatArray, prior: FloatArray
) -> tuple[FloatArray, FloatArray, tuple[float, float], float]:
    """Log mean rate and zone shape of each type, (offset, doubt), and the shape of all: the posterior's top."""
    types = len(prior)

    def minus_log_posterior(theta: FloatArray) -> float:
        logs, log_shapes = prior + theta[-2] + theta[:types], theta[-1] + theta[types:-2]
        expected, shape = np.exp(logs[at]) * hours, np.exp(log_shapes[at])
        fit = (
            gammaln(count + shape) - gammaln(shape) + count * np.log(expected / (expected + shape))
        )
        fit += shape * np.log(shape / (expected + shape))
        off = theta / np.array(
            [_TYPE_SD] * types + [_TYPE_SHAPE_SD] * types + [_OFFSET_SD, _SHAPE_SD]
        )
        return float(0.5 * off @ off - fit.sum())

    if not types:
        return prior, prior, (0.0, _OFFSET_SD), _ZONE_SHAPE
    bounds = [(-8.0, 8.0)] * (2 * types + 2)
    found = scipy.optimize.minimize(
        minus_log_posterior, np.zeros(2 * types + 2), method="L-BFGS-B", bounds=bounds
    ).x
    interrupted_types = float(np.sum(np.bincount(at, count, minlength=types) > 0))
    doubt = (1 / _OFFSET_SD**2 + interrupted_types / _TYPE_SD**2) ** -0.5
    logs = np.asarray(prior + found[-2] + found[:types], dtype=float)
    shapes = _ZONE_SHAPE * np.exp(found[-1] + found[types:-2])
    return logs, shapes, (float(found[-2]), float(doubt)), float(_ZONE_SHAPE * np.exp(found[-1]))


def passing(hours: ArrayLike) -> FloatArray:
    """Part of a shock's variance that jobs of `hours` feel: all of it if short, ever less as shocks even out."""
    return np.asarray(
        _SHOCK_HOURS / (_SHOCK_HOURS + np.maximum(np.asarray(hours, dtype=float), 0.0)), dtype=float
    )


def _bunching(windows: pd.DataFrame, mean: Mapping[TypeInZone, float]) -> tuple[float, float]:
    """Variances (shock, drift) of G by moments around each zone's rate, over windows and blocks of them, shrunk."""
    if not len(windows):
        return _SHOCK, _DRIFT
    rate = [mean[pool] for pool in zip(windows["instance_type"], windows["zone"], strict=True)]
    seen = windows.assign(expected=np.array(rate) * windows["hours"].to_numpy(dtype=float))
    seen["block"] = seen.groupby(["instance_type", "zone"]).cumcount() // _BLOCK
    blocks = seen.groupby(["instance_type", "zone", "block"])[
        ["hours", "interruptions", "expected"]
    ].sum()
    found = []
    for rows in (seen, blocks):
        count, expected = (
            rows["interruptions"].to_numpy(dtype=float),
            rows["expected"].to_numpy(dtype=float),
        )
        part = float(
            passing(float(np.average(rows["hours"].to_numpy(dtype=float), weights=expected)))
        )
        excess = float(np.sum((count - expected) ** 2 - expected))
        excess += _BUNCHING_WEIGHT * (_DRIFT / _AHEAD + part * _SHOCK)
        found.append((part, excess / (float(np.sum(expected**2)) + _BUNCHING_WEIGHT)))
    (short, one_window), (long, one_block) = found
    if short - long < 1e-9:  # a window a zone: nothing tells them apart
        both = max(one_window, 0.0) / (_DRIFT / _AHEAD + short * _SHOCK)
        return both * _SHOCK, both * _DRIFT
    shock = max((one_window - one_block) / (short - long), 0.0)
    return shock, _AHEAD * max(one_block - long * shock, 0.0)


def _shared(together: pd.DataFrame | None) -> float:
    """Part of a machine's interruptions that takes all of its type in the zone: Beta posterior mean."""
    whole, single = _SHARED
    if together is not None:
        gangs = together[together["machines"] > 1]
        all_lost = (gangs["lost"] == gangs["machines"]).to_numpy()
        whole += float(gangs.loc[all_lost, "machines"].sum())
        single += float(gangs.loc[~all_lost, "lost"].sum())
    return whole / (whole + single)

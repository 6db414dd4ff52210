"""Seconds until machines are at work, and the chance that they can be had at once, by type, market and zone.

    log seconds = mu_type,market + noise      mu shrunk to its market, its market to the stated prior
    p_type,market ~ Beta, from own requests granted and refused        p_cluster(n) = p^(1 + (n - 1) (1 - shared))

Start-up is lognormal with partial pooling by the conjugate normal; a cluster is ready when its last machine is:
P(all of n by s) = P(s)^n. Refusals bunch: where one machine can be had, the next is likelier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import log_ndtr

from ..domain.numeric import FloatArray

TypeInMarket = tuple[str, str]  # instance type, market

# GCP's virtual machines with one GPU, from request to running (CM-DARE's launches [P], 55 on demand, 45 preemptible):
# medians of 69 s and 87 s. EC2's and ours differ, which _MARKET_SD says.
PRIOR_S: Mapping[str, float] = {"on-demand": 69.0, "spot": 87.0}
# In logs: how far a provider's market may lie from the prior; a type around its market (GCP's GPUs: up to 0.1); one
# launch around its type (GCP: 0.04 to 0.12, more by a few stragglers).
_MARKET_SD, _TYPE_SD, _LAUNCH_SD = 0.5, 0.15, 0.1
_SPREAD_WEIGHT = 6.0  # launches that the prior of the spread of launches counts as
# The last of n is looked at on a lattice of logs, so many points to a launch's spread and so many spreads around the
# medians: outside P is 0 or 1 to the last digit, and a gang's moments do not depend on which others are asked for.
_POINTS, _FINEST_SD, _BELOW, _ABOVE = 6, 0.02, 9, 9
_ROWS = 4096  # gangs looked at together: what is held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupModel:
    """Log medians by type and market and by market with their doubt, and the spread of single launches."""

    pools: Mapping[TypeInMarket, tuple[float, float]]
    markets: Mapping[str, tuple[float, float]]
    launch_sd: float

    def log_median(self, instance_type: str, market: str) -> tuple[float, float]:
        """(log of the median seconds, its standard deviation) of a type that was launched or not.

        Raises ValueError for a market that is neither "on-demand" nor "spot".
        """
        if market not in self.markets:
            raise ValueError(f"market {market!r} is none of {', '.join(sorted(self.markets))}")
        middle, doubt = self.markets[market]
        return self.pools.get((instance_type, market), (middle, float(np.hypot(doubt, _TYPE_SD))))

    def gangs(self, pools: Sequence[TypeInMarket], counts: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """(mean seconds, standard deviation of their log), of gangs of `counts` (gangs, pools) machines, (gangs,) each.

        A gang has at least one machine and is ready when its last one is. Launches are independent given the medians;
        what is not known of the medians is shared by the whole gang.
        """
        if not len(counts):
            return np.zeros(0), np.zeros(0)
        known = np.array([self.log_median(*pool) for pool in pools]).reshape(-1, 2)
        kinds, kind = np.unique(known, axis=0, return_inverse=True)
        alike = np.zeros((len(counts), len(kinds)))
        for at, number in enumerate(kind.ravel().tolist()):  # pools of equal medians are one
            alike[:, number] += counts[:, at]
        distinct, back = np.unique(alike, axis=0, return_inverse=True)
        parts = [self._last(distinct[at : at + _ROWS], kinds) for at in range(0, len(distinct), _ROWS)]
        mean_s, log_sd = np.concatenate(parts, axis=1)
        return mean_s[back.ravel()], log_sd[back.ravel()]

    def _last(self, counts: FloatArray, kinds: FloatArray) -> FloatArray:
        """(2, gangs) of the last machine: the moments of its log by sums over its distribution."""
        step = max(self.launch_sd, _FINEST_SD) / _POINTS
        first = np.floor((kinds[:, 0].min() - _BELOW * self.launch_sd) / step)
        last = np.ceil((kinds[:, 0].max() + _ABOVE * self.launch_sd) / step)
        grid = np.arange(first, last + 1) * step
        one = log_ndtr((grid - kinds[:, :1]) / self.launch_sd)
        below = np.exp(counts @ one)  # P(all are ready by then)
        end = grid[-1] + step / 2
        mean = end - step * below.sum(axis=1)
        square = end**2 - 2 * step * (below @ grid)
        doubt = np.where(counts > 0, kinds[:, 1], 0.0).max(axis=1)
        variance = np.maximum(square - mean**2, 0.0) + doubt**2
        return np.stack([np.exp(mean + variance / 2), np.sqrt(variance)])


def fit_startup(launches: pd.DataFrame, prior_s: Mapping[str, float] = PRIOR_S) -> StartupModel:
    """The model learned from own launches: instance_type, market, seconds, one row a machine that became ready.

    `prior_s` are the medians by market before any. Raises ValueError where a time is not positive or a market unknown.
    """
    logs = launches.assign(log_s=np.log(launches["seconds"].to_numpy(dtype=float).clip(min=1e-300)))
    if not (launches["seconds"].to_numpy(dtype=float) > 0).all():
        raise ValueError("start-up seconds must be above 0")
    if strange := set(launches["market"]) - set(prior_s):
        raise ValueError(f"market {sorted(map(str, strange))[0]!r} is none of {', '.join(prior_s)}")
    groups = {
        (str(name), str(market)): rows["log_s"].to_numpy(dtype=float)
        for (name, market), rows in logs.groupby(["instance_type", "market"])
    }
    spread = _launch_sd(groups)
    markets = {market: _market(market, groups, spread, middle) for market, middle in prior_s.items()}
    pools: dict[TypeInMarket, tuple[float, float]] = {}
    for (name, market), seen in groups.items():
        middle, doubt = markets[market]
        prior, mine = doubt**2 + _TYPE_SD**2, spread**2 / len(seen)
        part = prior / (prior + mine)
        pools[name, market] = (middle + part * (float(np.mean(seen)) - middle), float(np.sqrt(part * mine)))
    return StartupModel(pools=pools, markets=markets, launch_sd=spread)


def _launch_sd(groups: Mapping[TypeInMarket, FloatArray]) -> float:
    """Spread of single launches in logs, pooled over types, shrunk to its prior."""
    squares = sum(float(np.sum((seen - np.mean(seen)) ** 2)) for seen in groups.values())
    free = sum(len(seen) - 1 for seen in groups.values())
    return float(np.sqrt((squares + _SPREAD_WEIGHT * _LAUNCH_SD**2) / (free + _SPREAD_WEIGHT)))


def _market(
    market: str, groups: Mapping[TypeInMarket, FloatArray], spread: float, prior_s: float
) -> tuple[float, float]:
    """(log median, doubt) of a market: the mean of its types, each weighed by what is known of it, and the prior."""
    own = [seen for (_, other), seen in groups.items() if other == market]
    weights = np.array([1 / (_TYPE_SD**2 + spread**2 / len(seen)) for seen in own])
    middles = np.array([float(np.mean(seen)) for seen in own])
    precision = 1 / _MARKET_SD**2 + float(weights.sum())
    middle = (np.log(prior_s) / _MARKET_SD**2 + float(weights @ middles)) / precision
    return float(middle), float(precision**-0.5)


TypeInZone = tuple[str, str, str]  # instance type, market, zone

# Before anybody asked: granted so many times in ten, counted as so many requests. A guess: there are no public figures.
_GRANTED, _ASKED_WEIGHT = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = 0.7  # of a refusal's cause that all machines of a pool have in common; a guess of the same kind


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityModel:
    """Chance that a request for one machine is granted, by type, market and zone."""

    granted: Mapping[TypeInZone, float]

    def one(self, pool: TypeInZone) -> float:
        """Chance that one machine can be had. Raises ValueError for a market that is neither on-demand nor spot."""
        if pool[1] not in _GRANTED:
            raise ValueError(f"market {pool[1]!r} is none of {', '.join(_GRANTED)}")
        return self.granted.get(pool, _GRANTED[pool[1]])

    def gangs(self, pools: Sequence[TypeInZone], counts: FloatArray) -> FloatArray:
        """(gangs,) chance that all of `counts` (gangs, pools) machines can be had at once.

        Pools are independent, machines of one pool are not.
        """
        logs = np.log(np.array([self.one(pool) for pool in pools], dtype=float))
        often = np.where(counts > 0, 1 + (counts - 1) * (1 - _SHARED), 0.0)
        return np.asarray(np.exp(often @ logs), dtype=float)


def fit_availability(requests: pd.DataFrame) -> AvailabilityModel:
    """Learned from `requests`: instance_type, market, zone, granted (bool), one row a machine asked for."""
    found: dict[TypeInZone, float] = {}
    for (kind, market, zone), rows in requests.groupby(["instance_type", "market", "zone"]):
        prior = _ASKED_WEIGHT * _GRANTED[str(market)]
        found[str(kind), str(market), str(zone)] = (prior + float(rows["granted"].sum())) / (_ASKED_WEIGHT + len(rows))
    return AvailabilityModel(granted=found)

"""Seconds until machines are at work, and the chance that they can be had at once, by type, market and zone.

    log seconds = mu_market + u_type,market + b (log n - c) + noise      n machines that were asked for together
    mu about the stated prior, u about 0, b about its own prior; c the mean of the launches, one noise a launch
    p_type,market ~ Beta, from own requests granted and refused        p_cluster(n) = p^(1 + (n - 1) (1 - shared))

All are normal, so that their posterior is that of a linear regression. Seconds are those of a launch's last machine:
the machines of one launch start alike, so each of them tells little more than the first. Refusals bunch: where one
machine can be had, the next is likelier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.numeric import FloatArray

TypeInMarket = tuple[str, str]  # instance type, market

# GCP's virtual machines with one GPU, from request to running (CM-DARE's launches [P], 55 on demand, 45 preemptible):
# medians of 69 s and 87 s. EC2's and ours differ, which _MARKET_SD says.
PRIOR_S: Mapping[str, float] = {"on-demand": 69.0, "spot": 87.0}
# In logs: how far a provider's market may lie from the prior; a type around its market (GCP's GPUs: up to 0.1); one
# launch around its type (GCP: 0.04 to 0.12, more by a few stragglers).
_MARKET_SD, _TYPE_SD, _LAUNCH_SD = 0.5, 0.15, 0.1
_SPREAD_WEIGHT = 6.0  # launches that the prior of the spread of launches counts as
# b and its doubt. The last of n machines that start independently, each with that spread: exp(0.07 log n) times one, to
# n = 16.
SLOPE = (0.07, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupModel:
    """Log medians of a launch of `e ** size` machines, by type and market and by market, with their doubt; the spread
    of launches; `slope`, with its doubt: what log seconds grow by with the log of the machines.
    """

    pools: Mapping[TypeInMarket, tuple[float, float]]
    markets: Mapping[str, tuple[float, float]]
    launch_sd: float
    slope: tuple[float, float]
    size: float

    def log_median(self, instance_type: str, market: str) -> tuple[float, float]:
        """(log of the median seconds, its standard deviation) of a launch of a type that was launched or not.

        Raises ValueError for a market that is neither "on-demand" nor "spot".
        """
        if market not in self.markets:
            raise ValueError(f"market {market!r} is none of {', '.join(sorted(self.markets))}")
        middle, doubt = self.markets[market]
        return self.pools.get((instance_type, market), (middle, float(np.hypot(doubt, _TYPE_SD))))

    def gangs(
        self, pools: Sequence[TypeInMarket], counts: NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray]:
        """(mean seconds, standard deviation of their log), of gangs of `counts` (gangs, pools) machines, (gangs,) each.

        A gang has at least one machine and is ready when its slowest kind is.
        """
        if not len(counts):
            return np.zeros(0), np.zeros(0)
        known = np.array([self.log_median(*pool) for pool in pools]).reshape(-1, 2)
        slowest = np.where(counts > 0, known[:, 0], -np.inf).argmax(axis=1)
        middle, doubt = known[slowest].T
        more = np.log(counts.sum(axis=1)) - self.size
        log_sd = np.sqrt(doubt**2 + (self.slope[1] * more) ** 2 + self.launch_sd**2)
        return np.exp(middle + self.slope[0] * more + log_sd**2 / 2), log_sd


def fit_startup(
    launches: pd.DataFrame,
    prior_s: Mapping[str, float] = PRIOR_S,
    slope: tuple[float, float] = SLOPE,
) -> StartupModel:
    """The model learned from own launches: instance_type, market, machines of the launch, seconds until its last was at
    work; one row a launch and type.

    `prior_s` are the medians by market before any, `slope` b and its doubt. Raises ValueError where a time is not
    positive, a launch has no machine or a market is unknown.
    """
    seconds, machines = (launches[name].to_numpy(dtype=float) for name in ("seconds", "machines"))
    if not (seconds > 0).all():
        raise ValueError("start-up seconds must be above 0")
    if not (machines >= 1).all():
        raise ValueError("a launch has at least one machine")
    if strange := set(launches["market"]) - set(prior_s):
        raise ValueError(f"market {sorted(map(str, strange))[0]!r} is none of {', '.join(prior_s)}")
    markets = list(prior_s)
    seen = list(
        zip(launches["instance_type"].astype(str), launches["market"].astype(str), strict=True)
    )
    pools = sorted(set(seen))
    size = float(np.mean(np.log(machines))) if len(machines) else 0.0
    kind = np.array([pools.index(pool) for pool in seen], dtype=np.intp)
    told = np.zeros((len(seen), len(markets) + len(pools) + 1))  # (launches, unknowns)
    told[np.arange(len(seen)), [markets.index(market) for _, market in seen]] = 1.0
    told[np.arange(len(seen)), len(markets) + kind] = 1.0
    told[:, -1] = np.log(machines) - size
    expected = np.array([*np.log(list(prior_s.values())), *np.zeros(len(pools)), slope[0]])
    sd = np.array([*[_MARKET_SD] * len(markets), *[_TYPE_SD] * len(pools), slope[1]])
    spread = _LAUNCH_SD
    for last in (False, True):
        covariance = np.linalg.inv(told.T @ told / spread**2 + np.diag(sd**-2.0))
        found = expected + covariance @ (told.T @ (np.log(seconds) - told @ expected)) / spread**2
        if not last:  # the spread around each type's own mean, pooled and shrunk to its prior
            left = np.log(seconds) - found[-1] * told[:, -1]
            left = left - (np.bincount(kind, left) / np.bincount(kind))[kind]
            free = len(seen) - len(pools)
            spread = float(
                np.sqrt((left @ left + _SPREAD_WEIGHT * _LAUNCH_SD**2) / (free + _SPREAD_WEIGHT))
            )

    def known(*unknowns: int) -> tuple[float, float]:
        at = list(unknowns)
        return float(found[at].sum()), float(np.sqrt(covariance[np.ix_(at, at)].sum()))

    return StartupModel(
        pools={
            pool: known(markets.index(pool[1]), len(markets) + number)
            for number, pool in enumerate(pools)
        },
        markets={market: known(number) for number, market in enumerate(markets)},
        launch_sd=spread,
        slope=known(len(found) - 1),
        size=size,
    )


TypeInZone = tuple[str, str, str]  # instance type, market, zone

# Before anybody asked: granted so many times in ten, counted as so many requests. A guess: there are no public figures.
_GRANTED, _ASKED_WEIGHT = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = (
    0.7  # of a refusal's cause that all machines of a pool have in common; a guess of the same kind
)


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
    """Learned from `requests`: instance_type, market, zone, granted (bool), one row a type of each request.

    A request for many machines counts as one for one: its refusals make a type look scarcer than it is to one machine.
    """
    found: dict[TypeInZone, float] = {}
    for (kind, market, zone), rows in requests.groupby(["instance_type", "market", "zone"]):
        prior = _ASKED_WEIGHT * _GRANTED[str(market)]
        found[str(kind), str(market), str(zone)] = (prior + float(rows["granted"].sum())) / (
            _ASKED_WEIGHT + len(rows)
        )
    return AvailabilityModel(granted=found)

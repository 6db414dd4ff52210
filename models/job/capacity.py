"""Seconds until machines are at work, and the chance that they can be had at once, by type, market and zone.

    log seconds = mu_type,market + b log n + noise      n machines that were asked for together; one noise a launch
    mu shrunk to its market, its market to the stated prior      b >= 0 shrunk to its own, from launches of one type
    p_type,market ~ Beta, from own requests granted and refused        p_cluster(n) = p^(1 + (n - 1) (1 - shared))

Start-up is lognormal with partial pooling by the conjugate normal. Seconds are those of a launch's last machine: the
machines of one launch start alike, so each of them tells little more than the first. Refusals bunch: where one machine
can be had, the next is likelier.
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
# The last of n machines that start independently, each with that spread: exp(0.07 log n) times one, to n = 16. Hosts
# that share a machine start one after another (b = 1), so that the doubt is wide.
_SLOPE, _SLOPE_SD = 0.07, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupModel:
    """Log medians of one machine, by type and market and by market, with their doubt; the spread of launches; `slope`:
    what a launch's log seconds grow by with the log of its machines.
    """

    pools: Mapping[TypeInMarket, tuple[float, float]]
    markets: Mapping[str, tuple[float, float]]
    launch_sd: float
    slope: float = _SLOPE

    def log_median(self, instance_type: str, market: str) -> tuple[float, float]:
        """(log of the median seconds, its standard deviation) of one machine of a type that was launched or not.

        Raises ValueError for a market that is neither "on-demand" nor "spot".
        """
        if market not in self.markets:
            raise ValueError(f"market {market!r} is none of {', '.join(sorted(self.markets))}")
        middle, doubt = self.markets[market]
        return self.pools.get((instance_type, market), (middle, float(np.hypot(doubt, _TYPE_SD))))

    def gangs(self, pools: Sequence[TypeInMarket], counts: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """(mean seconds, standard deviation of their log), of gangs of `counts` (gangs, pools) machines, (gangs,) each.

        A gang has at least one machine and is ready when its slowest kind is.
        """
        if not len(counts):
            return np.zeros(0), np.zeros(0)
        known = np.array([self.log_median(*pool) for pool in pools]).reshape(-1, 2)
        slowest = np.where(counts > 0, known[:, 0], -np.inf).argmax(axis=1)
        middle, doubt = known[slowest].T
        log_sd = np.hypot(doubt, self.launch_sd)
        return np.exp(middle + self.slope * np.log(counts.sum(axis=1)) + log_sd**2 / 2), log_sd


def fit_startup(launches: pd.DataFrame, prior_s: Mapping[str, float] = PRIOR_S) -> StartupModel:
    """The model learned from own launches: instance_type, market, machines of the launch, seconds until its last was at
    work; one row a launch and type.

    `prior_s` are the medians of one machine by market before any. Raises ValueError where a time is not positive, a
    launch has no machine or a market is unknown.
    """
    seconds, machines = (launches[name].to_numpy(dtype=float) for name in ("seconds", "machines"))
    if not (seconds > 0).all():
        raise ValueError("start-up seconds must be above 0")
    if not (machines >= 1).all():
        raise ValueError("a launch has at least one machine")
    if strange := set(launches["market"]) - set(prior_s):
        raise ValueError(f"market {sorted(map(str, strange))[0]!r} is none of {', '.join(prior_s)}")
    logs = launches.assign(log_s=np.log(seconds), log_n=np.log(machines))
    kinds = ["instance_type", "market"]
    around = logs[["log_s", "log_n"]] - logs.groupby(kinds)[["log_s", "log_n"]].transform("mean")
    weight, told = (_LAUNCH_SD / _SLOPE_SD) ** 2, float(around["log_s"] @ around["log_n"])
    slope = max((_SLOPE * weight + told) / (weight + float(around["log_n"] @ around["log_n"])), 0.0)
    one = logs["log_s"] - slope * logs["log_n"]
    groups = {
        (str(name), str(market)): rows.to_numpy(dtype=float)
        for (name, market), rows in one.groupby([logs[kind] for kind in kinds])
    }
    spread = _launch_sd(groups)
    markets = {market: _market(market, groups, spread, middle) for market, middle in prior_s.items()}
    pools: dict[TypeInMarket, tuple[float, float]] = {}
    for (name, market), seen in groups.items():
        middle, doubt = markets[market]
        prior, mine = doubt**2 + _TYPE_SD**2, spread**2 / len(seen)
        part = prior / (prior + mine)
        pools[name, market] = (middle + part * (float(np.mean(seen)) - middle), float(np.sqrt(part * mine)))
    return StartupModel(pools=pools, markets=markets, launch_sd=spread, slope=slope)


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

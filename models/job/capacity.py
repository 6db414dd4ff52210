"""Model the seconds until requested machines work, and the chance to get them all at once.

    log seconds = mu_market + u_type,market + b (log n - c) + noise      n machines of one request
    p_type,market,zone ~ Beta(requests granted and refused)
    p_gang(n) = p^(1 + (n - 1) (1 - shared))

The seconds of a launch are those of its last machine. Machines of one launch start alike, so each
further machine adds little information. Refusals are correlated: if one machine is available, the
next machine is more likely to be available.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.numeric import FloatArray
from .log_seconds import LogSeconds

TypeInMarket = tuple[str, str]  # instance type, market

# Median seconds from request to running of GCP's virtual machines with one GPU (CM-DARE's launches
# [P]: 55 on demand, 45 preemptible).
PRIOR_S: Mapping[str, float] = {"on-demand": 69.0, "spot": 87.0}
# Standard deviations of log seconds: a provider's market around the prior; a type around its market
# (GCP's GPUs: up to 0.1); a launch around its type (GCP: 0.04 to 0.12, more with a few stragglers).
_MARKET_SD, _TYPE_SD, _LAUNCH_SD = 0.5, 0.15, 0.1
# Mean and standard deviation of b. If n machines start independently with spread _LAUNCH_SD, the
# last takes about exp(0.07 log n) times the seconds of one machine, for n up to 16.
SLOPE = (0.07, 0.1)


def fit_startup(
    launches: pd.DataFrame,
    prior_s: Mapping[str, float] = PRIOR_S,
    slope: tuple[float, float] = SLOPE,
) -> LogSeconds:
    """Fit start-up seconds by market and type.

    `launches` has instance_type, market, machines (in the launch) and seconds, with a row per
    launch and type. `prior_s` has the prior median seconds by market. `slope` is the mean and
    standard deviation of the prior of b.

    Raises:
        ValueError: if a market is unknown or seconds are not above 0.
    """
    prior = LogSeconds(
        groups={market: (float(np.log(s)), _MARKET_SD) for market, s in prior_s.items()},
        member_sd=_TYPE_SD,
        noise_sd=_LAUNCH_SD,
        slope=slope,
    )
    rows = launches.rename(columns={"market": "group", "instance_type": "member"})
    return prior.fitted(rows.assign(x=np.log(launches["machines"].astype(float))))


def gang_startup(
    model: LogSeconds, pools: Sequence[TypeInMarket], counts: NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Return (gangs,) mean start-up seconds and the standard deviations of their logs.

    `counts` is (gangs, pools) machines, at least one per gang. A gang is ready when its slowest
    type is ready.
    """
    keys = [(market, name) for name, market in pools]
    medians = model.log_medians(keys)[:, 0]
    slowest = np.where(counts > 0, medians, -np.inf).argmax(axis=1)
    middle, log_sd = model.predict([keys[at] for at in slowest], np.log(counts.sum(axis=1)))
    return np.exp(middle + log_sd**2 / 2), log_sd


TypeInZone = tuple[str, str, str]  # instance type, market, zone

# Guesses, since no figures are public: the prior chance of a grant, the number of requests that the
# prior counts as, and the share of a refusal's cause that all machines of a pool have in common.
_GRANTED, _REQUESTS = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityModel:
    """The chance that a request for one machine is granted, by type, market and zone."""

    granted: Mapping[TypeInZone, float]

    def gangs(self, pools: Sequence[TypeInZone], counts: FloatArray) -> FloatArray:
        """Return each gang's chance to get all its machines, (gangs,).

        `counts` is (gangs, pools) machines. Pools are assumed to be independent.
        """
        chances = [self.granted.get(pool, _GRANTED[pool[1]]) for pool in pools]
        exponent = np.where(counts > 0, 1 + (counts - 1) * (1 - _SHARED), 0.0)
        return np.asarray(np.exp(exponent @ np.log(chances)), dtype=float)


def fit_availability(requests: pd.DataFrame) -> AvailabilityModel:
    """Fit the probability that a request is granted, by instance type, market and zone.

    `requests` has columns instance_type, market, zone and granted, with a row for each instance
    type of a request.

    A request for many machines counts like a request for one machine. Refusals therefore make a
    type look scarcer than it is.
    """
    found = requests.groupby(["instance_type", "market", "zone"])["granted"].agg(["sum", "size"])
    prior = found.index.get_level_values("market").map(_GRANTED).to_numpy(float)
    chance = (_REQUESTS * prior + found["sum"].astype(float)) / (_REQUESTS + found["size"])
    return AvailabilityModel(granted=dict(zip(found.index, chance.tolist(), strict=True)))

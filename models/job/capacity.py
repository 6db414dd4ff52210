"""Seconds until requested machines are at work, and the chance to get them all at once.

    log seconds = mu_market + u_type,market + b (log n - c) + noise      n machines of one request
    p_type,market,zone ~ Beta(requests granted and refused)
    p_gang(n) = p^(1 + (n - 1) (1 - shared))

Seconds are those of a launch's last machine. Machines of one launch start alike, so each tells
little more than the first. Refusals bunch: where one machine is available, the next is likelier.
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

# GCP's virtual machines with one GPU, from request to running (CM-DARE's launches [P], 55 on
# demand, 45 preemptible): medians of 69 s and 87 s.
PRIOR_S: Mapping[str, float] = {"on-demand": 69.0, "spot": 87.0}
# In logs: a provider's market around the prior; a type around its market (GCP's GPUs: up to 0.1);
# a launch around its type (GCP: 0.04 to 0.12, more by a few stragglers).
_MARKET_SD, _TYPE_SD, _LAUNCH_SD = 0.5, 0.15, 0.1
# The last of n machines that start independently, each with that spread, takes about exp(0.07 log
# n) times one's seconds, up to n = 16.
SLOPE = (0.07, 0.1)


def fit_startup(
    launches: pd.DataFrame,
    prior_s: Mapping[str, float] = PRIOR_S,
    slope: tuple[float, float] = SLOPE,
) -> LogSeconds:
    """Fit start-up seconds by market and type; `launches` has instance_type, market, machines,
    seconds.

    Raises:
        ValueError: for an unknown market, or seconds that are not above 0.
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
    """Return (gangs,) mean seconds and standard deviations of their logs; `counts` is (gangs,
    pools).

    A gang has at least one machine, and is ready when its slowest type is.
    """
    keys = [(market, name) for name, market in pools]
    medians = model.log_medians(keys)[:, 0]
    slowest = np.where(counts > 0, medians, -np.inf).argmax(axis=1)
    middle, log_sd = model.predict([keys[at] for at in slowest], np.log(counts.sum(axis=1)))
    return np.exp(middle + log_sd**2 / 2), log_sd


TypeInZone = tuple[str, str, str]  # instance type, market, zone

# Guesses: no figures are public. The prior counts as so many requests; `_SHARED` is the share of a
# refusal's cause that all machines of a pool have in common.
_GRANTED, _REQUESTS = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityModel:
    """Chance that a request for one machine is granted, by type, market and zone."""

    granted: Mapping[TypeInZone, float]

    def gangs(self, pools: Sequence[TypeInZone], counts: FloatArray) -> FloatArray:
        """Return (gangs,) chances to get all of `counts` (gangs, pools) machines; pools are
        independent.
        """
        chances = [self.granted.get(pool, _GRANTED[pool[1]]) for pool in pools]
        exponent = np.where(counts > 0, 1 + (counts - 1) * (1 - _SHARED), 0.0)
        return np.asarray(np.exp(exponent @ np.log(chances)), dtype=float)


def fit_availability(requests: pd.DataFrame) -> AvailabilityModel:
    """Fit the probability that a request is granted, by instance type, market and zone.

    `requests` has columns instance_type, market, zone and granted, with a row for each instance
    type of a request.

    A request for many machines counts as one for one machine, so that refusals make a type look
    scarcer than it is.
    """
    found = requests.groupby(["instance_type", "market", "zone"])["granted"].agg(["sum", "size"])
    prior = found.index.get_level_values("market").map(_GRANTED).to_numpy(float)
    chance = (_REQUESTS * prior + found["sum"].astype(float)) / (_REQUESTS + found["size"])
    return AvailabilityModel(granted=dict(zip(found.index, chance.tolist(), strict=True)))

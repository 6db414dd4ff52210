"""Model the start-up seconds of machines, and the chance that a request for machines is granted.

The start-up of a launch with n machines ends when its last machine is ready:

    log seconds = mu_market + u_type,market + b (log n - c) + noise

b is the effect of log n, and c the mean of log n over the observed launches. log_seconds.py defines
mu, u and the noise. Machines of the same launch start in similar times. A launch therefore counts
once per instance type, not once per machine.

The chance p that a request for one machine is granted is fitted for each instance type, market and
zone. A cluster starts only if all its n machines are granted at the same time. The chance of this
is p_gang:

    p       ~ Beta(requests granted, requests refused), with a prior that counts as 5 requests
    p_gang  = p^(1 + (n - 1) (1 - shared))

`shared` is 1 if machines are always granted or refused together, and 0 if they are independent.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..domain.cluster import Pool
from ..domain.numeric import FloatArray, IntArray
from .log_seconds import LogSeconds

# Median seconds from the request until a virtual machine with one GPU runs, on GCP. The published
# data of CM-DARE have 55 on-demand launches and 45 preemptible launches.
PRIOR_S: Mapping[str, float] = {"on-demand": 69.0, "spot": 87.0}
# Standard deviations of log seconds: of a provider's market around PRIOR_S, of an instance type
# around its market, and of a launch around its instance type. On GCP, instance types deviate by up
# to 0.1. Launches deviate by 0.04 to 0.12, and by more if a few machines start late.
_MARKET_SD, _TYPE_SD, _LAUNCH_SD = 0.5, 0.15, 0.1
# Prior mean and standard deviation of b. Suppose that n machines start independently, and that
# their log seconds have the standard deviation _LAUNCH_SD. For n up to 16, the last machine then
# takes about n^0.07 times as long as a single machine.
SLOPE = (0.07, 0.1)


def fit_startup(
    launches: pd.DataFrame,
    prior_s: Mapping[str, float] = PRIOR_S,
    slope: tuple[float, float] = SLOPE,
) -> LogSeconds:
    """Fit start-up seconds for each market and instance type.

    `launches` has a row per launch and instance type, with columns instance_type, market, machines
    (the number of machines in the launch) and seconds. `prior_s` has the prior median seconds of
    each market. `slope` is the prior mean and standard deviation of the effect of log(machines).

    Raises:
        ValueError: if a market is unknown or seconds are not above 0.
    """
    prior = LogSeconds(
        groups={market: (np.log(s), _MARKET_SD) for market, s in prior_s.items()},
        member_sd=_TYPE_SD,
        noise_sd=_LAUNCH_SD,
        slope=slope,
    )
    rows = launches.rename(columns={"market": "group", "instance_type": "member"})
    return prior.fitted(rows.assign(x=np.log(launches["machines"].astype(float))))


def gang_startup(
    model: LogSeconds, pools: Sequence[Pool], counts: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return two (clusters,) arrays: mean start-up seconds, and standard deviations of log seconds.

    A pool is an instance type in a market and zone. The start-up of a cluster is assumed to take as
    long as the start-up of its slowest pool: the pool with the highest median start-up seconds.

    model: the fitted start-up seconds (see `fit_startup`).
    counts: a (clusters, pools) array with the number of machines from each pool.
    """
    keys = [(pool.market, pool.instance_type) for pool in pools]
    found = model.predict(keys, np.log(counts.sum(axis=1, keepdims=True)))  # (clusters, pools)
    slowest = np.where(counts > 0, found[0], -np.inf).argmax(axis=1, keepdims=True)
    middle, log_sd = (np.take_along_axis(each, slowest, axis=1)[:, 0] for each in found)
    return np.exp(middle + log_sd**2 / 2), log_sd


# Guesses, because no figures are public. _GRANTED: the prior chance that a request is granted.
# _REQUESTS: the number of requests that the prior counts as. _SHARED: `shared` above.
_GRANTED, _REQUESTS = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = 0.7


# The chance that a request for one machine is granted, by instance type, market and zone.
Granted = Mapping[tuple[str, str, str], float]


def gang_chances(granted: Granted, pools: Sequence[Pool], counts: IntArray) -> FloatArray:
    """Return a (clusters,) array: the chance that a cluster gets all its machines at once.

    A pool is an instance type in a market and zone. Requests to different pools are assumed to be
    independent.

    granted: the fitted chances that a request is granted (see `fit_availability`).
    counts: a (clusters, pools) array with the number of machines from each pool.
    """
    chances = [granted.get(pool[:3], _GRANTED[pool.market]) for pool in pools]
    exponent = np.where(counts > 0, 1 + (counts - 1) * (1 - _SHARED), 0.0)
    chance: FloatArray = np.exp(exponent @ np.log(chances))
    return chance


def fit_availability(requests: pd.DataFrame) -> Granted:
    """Fit the probability that a request is granted, for each instance type, market and zone.

    `requests` has a row per request and instance type, with columns instance_type, market, zone and
    granted. A request for many machines counts like a request for one machine. Refusals of large
    requests therefore make the probability too low.
    """
    found = requests.groupby(["instance_type", "market", "zone"])["granted"].agg(["sum", "size"])
    prior = found.index.get_level_values("market").map(_GRANTED).to_numpy(float)
    chance = (_REQUESTS * prior + found["sum"].astype(float)) / (_REQUESTS + found["size"])
    return dict(zip(found.index, chance.tolist(), strict=True))

"""Derive start-up, checkpoint and interruption parameters of clusters from priors or past launches.

A job starts when all machines of its cluster have started. Only spot machines are interrupted. The
seconds to replace a lost machine are averaged over the cluster's instance types, each weighted by
its interruption rate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..domain.cluster import Cluster, Pool
from ..domain.numeric import FloatArray, IntArray
from .capacity import Granted, gang_chances, gang_startup
from .checkpoints import PRIOR, write_seconds
from .compilation import CompileModel
from .duration import REPLACEMENT_S, STARTUP_S, Conditions
from .interruption_rates import HazardModel
from .log_seconds import LogSeconds
from .restarts import NO_RESTARTS

RETRY_S = 60.0  # seconds between two requests for machines


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Start-up, checkpoint and interruption parameters before the first launch.

    The provider publishes the interruption rates. The durations are prior values, and are the same
    for all instance types.
    """

    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)

    def gangs(self, pools: Sequence[Pool], counts: IntArray, state_bytes: float) -> Conditions:
        """Return the start-up, checkpoint and interruption parameters of clusters.

        A pool is an instance type in a market and zone. `counts` is a (clusters, pools) array with
        the number of machines from each pool. `state_bytes` is the size of a checkpoint.
        """
        rates = [pool.interruptions_per_hour * (pool.market == "spot") for pool in pools]
        zero = np.zeros(len(counts))
        return Conditions(
            hazard_per_hour=counts @ np.array(rates, dtype=float),
            doubt=zero,
            bunching=zero,
            startup_s=zero + STARTUP_S,
            startup_log_sd=zero,
            checkpoint_s=zero + write_seconds(PRIOR, state_bytes, [""])[0],
            checkpoint_log_sd=zero,
            replacement_s=zero + REPLACEMENT_S,
        )


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Start-up, checkpoint and interruption models that were learned from launches.

    - `startup`: the seconds from the request for machines until all machines have started.
    - `checkpoints`: the seconds to write a checkpoint. Reading is assumed to take as long.
    - `hazard`: the interruption rates; None means the rates that the provider publishes.
    - `availability`: the chances that requests are granted; None means that all are granted.
    - `compilation`: the seconds that torch.compile takes at each start.
    - `restarts`: the seconds until a lost machine is replaced. Before the first observed
      replacement, a replacement is assumed to take as long as a start-up.
    """

    startup: LogSeconds
    checkpoints: LogSeconds = PRIOR
    hazard: HazardModel | None = None
    availability: Granted | None = None
    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)
    restarts: LogSeconds = NO_RESTARTS

    def gangs(self, pools: Sequence[Pool], counts: IntArray, state_bytes: float) -> Conditions:
        """Return the start-up, checkpoint and interruption parameters of clusters.

        A pool is an instance type in a market and zone. `counts` is a (clusters, pools) array with
        the number of machines from each pool. `state_bytes` is the size of a checkpoint.
        """
        spot = counts * np.array([pool.market == "spot" for pool in pools])
        losses: FloatArray = spot * np.array([pool.interruptions_per_hour for pool in pools])
        hazard: FloatArray = losses.sum(axis=1)
        doubt: FloatArray = np.zeros(len(counts))
        bunching = doubt
        if self.hazard is not None:
            hazard, doubt, bunching = self.hazard.gangs(pools, spot)
            losses = spot * self.hazard.rates(pools)[:, 0]
        types = [pool.instance_type for pool in pools]
        startup = gang_startup(self.startup, pools, counts)
        startup_s, startup_log_sd = self._with_refusals(*startup, pools, counts)
        alone = np.eye(len(pools), dtype=np.int64)
        again_s, again_log_sd = gang_startup(self.startup, pools, alone)
        if any(outcome == "replaced" for outcome, _ in self.restarts.members):
            again_s = self.restarts.expected_s("replaced", types)
        again_s, _ = self._with_refusals(again_s, again_log_sd, pools, alone)
        replaced_s = losses @ again_s / np.maximum(losses.sum(axis=1), 1e-300)
        median_s, write_log_sd = write_seconds(self.checkpoints, state_bytes, types)
        write_s = median_s * np.exp(write_log_sd**2 / 2)  # the mean of a lognormal variable
        writer = np.where(counts > 0, write_s, 0.0).argmax(axis=1)
        return Conditions(
            hazard_per_hour=hazard,
            doubt=doubt,
            bunching=bunching,
            startup_s=startup_s,
            startup_log_sd=startup_log_sd,
            checkpoint_s=write_s[writer],
            checkpoint_log_sd=write_log_sd[writer],
            replacement_s=write_s[writer] + replaced_s,
        )

    def _with_refusals(
        self,
        launch_s: FloatArray,
        log_sd: FloatArray,
        pools: Sequence[Pool],
        counts: IntArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return `launch_s` and `log_sd` after adding the time for retries of refused requests.

        `launch_s` (clusters,) are the mean start-up seconds if no request is refused. `log_sd`
        (clusters,) are the standard deviations of log start-up seconds. A pool is an instance type
        in a market and zone. `counts` is a (clusters, pools) array with the number of machines from
        each pool.
        """
        if self.availability is None:
            return launch_s, log_sd
        chance = gang_chances(self.availability, pools, counts)
        mean = launch_s + RETRY_S * (1 - chance) / chance
        variance = launch_s**2 * np.expm1(log_sd**2) + RETRY_S**2 * (1 - chance) / chance**2
        return mean, np.sqrt(np.log1p(variance / mean**2))


JobConditions = Stated | Learned
STATED = Stated()


def pools_of(clusters: Sequence[Cluster]) -> tuple[list[Pool], IntArray]:
    """Return the distinct pools of `clusters`, and a (clusters, pools) array of machine counts.

    A pool is an instance type in a market and zone.
    """
    bought = [Counter(map(Pool.of, cluster.members)) for cluster in clusters]
    pools = list(dict.fromkeys(pool for counted in bought for pool in counted))
    counts = [[counted[pool] for pool in pools] for counted in bought]
    return pools, np.array(counts, dtype=np.int64).reshape(len(clusters), len(pools))

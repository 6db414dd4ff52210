"""Derive start-up, checkpoint and interruption parameters of clusters from priors or past launches.

A job starts when all machines of its cluster have started. Only spot machines are interrupted. The
seconds to replace a lost machine are a weighted mean over the cluster's instance types. The weight
of a type is its interruption rate.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..domain.cluster import Cluster, Pool
from ..domain.numeric import FloatArray, IntArray
from ..domain.workload import Mode
from .capacity import PRIOR_S, Granted, gang_chances, gang_startup
from .checkpoints import PRIOR, write_seconds
from .compilation import prior_s
from .duration import STARTUP_S, Conditions
from .interruption_rates import HazardModel
from .log_seconds import LogSeconds
from .restarts import NO_RESTARTS

RETRY_S = 60.0  # seconds between two requests for machines


@dataclass(frozen=True, kw_only=True)
class JobConditions:
    """The models of start-up, checkpoints and interruptions. The defaults are priors.

    - `startup`: the seconds from the request for machines until all machines have started.
    - `checkpoints`: the seconds to write a checkpoint. Reading is assumed to take as long.
    - `hazard`: the interruption rates; None means the rates that the provider publishes.
    - `availability`: the chances that requests are granted; None means that all are granted.
    - `compiled`: the measured seconds that torch.compile takes at each start.
    - `restarts`: the seconds until a lost machine is replaced. Before the first observed
      replacement, a replacement is assumed to take as long as a start-up.
    """

    startup: LogSeconds
    checkpoints: LogSeconds = PRIOR
    hazard: HazardModel | None = None
    availability: Granted | None = None
    compiled: Mapping[tuple[str, Mode], float] = field(default_factory=dict)
    restarts: LogSeconds = NO_RESTARTS

    def compile_s(self, workload: str, mode: Mode) -> float:
        """Return the seconds that torch.compile is predicted to take at each start of the job.

        A replacement of a machine counts as a start. The result is 0 without torch.compile.
        """
        return self.compiled.get((workload, mode), prior_s(mode))

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


# The conditions before the first launch: every start-up takes STARTUP_S.
_STARTUP = {market: (math.log(STARTUP_S), 0.0) for market in PRIOR_S}
STATED = JobConditions(startup=LogSeconds(groups=_STARTUP, member_sd=0.0, noise_sd=0.0))


def pools_of(clusters: Sequence[Cluster]) -> tuple[list[Pool], IntArray]:
    """Return the distinct pools of `clusters`, and a (clusters, pools) array of machine counts.

    A pool is an instance type in a market and zone.
    """
    bought = [Counter(map(Pool.of, cluster.members)) for cluster in clusters]
    pools = list(dict.fromkeys(pool for counted in bought for pool in counted))
    return pools, np.array([[counted[pool] for pool in pools] for counted in bought])

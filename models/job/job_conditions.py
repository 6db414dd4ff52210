"""What start-up, checkpoints and interruptions a job meets on a cluster: as stated, or by what launches have taught.

A cluster may mix markets: only its spot machines are interrupted, all of them must start, and what is replaced is a
spot machine, whose type is as likely as its share of the interruptions. Of many clusters at once, since a planner asks
about all that can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..domain.cluster import Cluster, Offer
from ..domain.numeric import FloatArray
from .capacity import AvailabilityModel, StartupModel
from .checkpoints import PRIOR, CheckpointModel
from .compilation import CompileModel
from .duration import REPLACEMENT_S, STARTUP_S, Conditions
from .interruption_rates import HazardModel
from .restarts import RestartModel

RETRY_S = 60.0  # between two requests for machines that were not to be had


class Pool(NamedTuple):
    """Machines of one type, market and zone, and the interruptions an hour that are advised of one of them."""

    instance_type: str
    market: str
    zone: str
    interruptions_per_hour: float

    @classmethod
    def of(cls, offer: Offer) -> Pool:
        """The pool that `offer` sells from."""
        return cls(offer.instance_type.name, offer.market, offer.zone, offer.interruptions_per_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The pools' own rates, taken to be known and memoryless, and the same seconds for all clusters.

    `checkpoint_s` None: by the checkpoint's bytes, as the prior of checkpoints says.
    """

    startup_s: float = STARTUP_S
    replacement_s: float = REPLACEMENT_S
    checkpoint_s: float | None = None
    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)

    def gangs(
        self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float
    ) -> Conditions:
        """Of clusters of `counts` (clusters, pools) machines, whose checkpoints are of so many bytes."""
        return Conditions.certain(
            advised_hazards(pools, counts),
            startup_s=self.startup_s,
            checkpoint_s=float(PRIOR.seconds(state_bytes, [""])[0][0])
            if self.checkpoint_s is None
            else self.checkpoint_s,
            replacement_s=self.replacement_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What our own launches and interruptions have taught, each beside its prior.

    `hazard` None: the pools' own rates hold. `availability` None: whatever is asked for can be had. `restores` None:
    reading a checkpoint lasts as long as writing it. Where `restarts` have seen machines replaced, they tell how long
    that takes; else a machine's start-up does.
    """

    startup: StartupModel
    checkpoints: CheckpointModel = PRIOR
    hazard: HazardModel | None = None
    availability: AvailabilityModel | None = None
    retry_s: float = RETRY_S
    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)
    restores: CheckpointModel | None = None
    restarts: RestartModel = RestartModel()  # noqa: RUF009 (frozen)

    def gangs(
        self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float
    ) -> Conditions:
        """Of clusters of `counts` (clusters, pools) machines, whose checkpoints are of so many bytes.

        One machine writes them, and all read them back: the slowest that the cluster has is meant. Raises ValueError
        for an unknown market.
        """
        launch_s, launch_log_sd = self.startup.gangs(
            [(one.instance_type, one.market) for one in pools], counts
        )
        startup_s, startup_log_sd = self._waited(launch_s, launch_log_sd, pools, counts)
        often, doubt, lasting, fleeting, rates = self._hazards(pools, counts)
        again_s = self._replaced(pools)
        taken = np.where([one.market == "spot" for one in pools], counts, 0)
        shares = taken * rates
        shares = np.where(
            shares.sum(axis=1, keepdims=True) > 0, shares, taken
        )  # rates that are 0 tell none apart
        types = [one.instance_type for one in pools]
        seconds, log_sd = self.checkpoints.seconds(state_bytes, types)
        writer = (
            np.where(counts > 0, seconds, 0.0).argmax(axis=1)
            if len(pools)
            else np.zeros(0, dtype=np.intp)
        )
        write_s = read_s = seconds[writer]
        if self.restores is not None and len(pools):
            read_s = np.where(counts > 0, self.restores.seconds(state_bytes, types)[0], 0.0).max(
                axis=1
            )
        return Conditions(
            hazard_per_hour=often,
            doubt=doubt,
            lasting=lasting,
            passing=fleeting,
            startup_s=startup_s,
            startup_log_sd=startup_log_sd,
            checkpoint_s=write_s,
            checkpoint_log_sd=log_sd[writer],
            replacement_s=read_s + (shares @ again_s) / np.maximum(shares.sum(axis=1), 1e-300),
        )

    def _replaced(self, pools: Sequence[Pool]) -> FloatArray:
        """(pools,) seconds from the loss of a machine until the job has another one at work, by refusals too."""
        alone = np.eye(len(pools), dtype=np.int64)
        again_s, _ = self.startup.gangs([(one.instance_type, one.market) for one in pools], alone)
        if "replaced" in self.restarts.seen:
            again_s = self.restarts.seconds("replaced", [one.instance_type for one in pools])
        return self._waited(again_s, np.zeros_like(again_s), pools, alone)[0]

    def _waited(
        self,
        launch_s: FloatArray,
        log_sd: FloatArray,
        pools: Sequence[Pool],
        counts: NDArray[np.int64],
    ) -> tuple[FloatArray, FloatArray]:
        """(mean seconds, standard deviation of their log) with the refusals before all can be had, by moments."""
        if self.availability is None:
            return launch_s, log_sd
        chance = self.availability.gangs([one[:3] for one in pools], counts.astype(float))
        mean = launch_s + self.retry_s * (1 - chance) / chance
        variance = launch_s**2 * np.expm1(log_sd**2) + self.retry_s**2 * (1 - chance) / chance**2
        return mean, np.asarray(np.sqrt(np.log1p(variance / mean**2)), dtype=float)

    def _hazards(
        self, pools: Sequence[Pool], counts: NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """(clusters,) rate, its doubt, bunching that stays and that passes; and (pools,) the rate of one machine."""
        nothing = np.zeros(len(counts))
        if self.hazard is None:
            rates = np.array([one.interruptions_per_hour for one in pools], dtype=float)
            return advised_hazards(pools, counts), nothing, nothing, nothing, rates
        at = np.flatnonzero([one.market == "spot" for one in pools])
        spots = [
            (pools[one].instance_type, pools[one].zone, pools[one].interruptions_per_hour)
            for one in at.tolist()
        ]
        found = self.hazard.gangs(spots, counts[:, at].astype(float))
        rates = np.zeros(len(pools))
        rates[at] = found.machine
        left = found.concentration
        return (
            found.per_hour,
            found.doubt,
            left * self.hazard.drift,
            left * self.hazard.shock,
            rates,
        )


JobConditions = Stated | Learned


def advised_hazards(pools: Sequence[Pool], counts: NDArray[np.int64]) -> FloatArray:
    """(clusters,) interruptions an hour: the sum over the spot machines; on-demand ones are safe."""
    rates = [one.interruptions_per_hour if one.market == "spot" else 0.0 for one in pools]
    return np.asarray(counts @ np.array(rates, dtype=float), dtype=float)


def pools_of(clusters: Sequence[Cluster]) -> tuple[list[Pool], NDArray[np.int64]]:
    """All pools that the clusters buy from, and (clusters, pools) how many machines from each."""
    bought = [
        [(Pool.of(offer), count) for count, offer in cluster.counted()] for cluster in clusters
    ]
    pools = list(dict.fromkeys(pool for members in bought for pool, _ in members))
    column = {pool: at for at, pool in enumerate(pools)}
    counts = np.zeros((len(clusters), len(pools)), dtype=np.int64)
    for row, members in enumerate(bought):
        for pool, count in members:
            counts[row, column[pool]] += count
    return pools, counts

"""Start-up, checkpoints and interruptions of jobs on clusters: as stated, or learned from launches.

A cluster may mix markets: all of its machines must start, only its spot machines are interrupted.
The replaced machine is a spot machine, its type as likely as its share of the interruptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..domain.cluster import Cluster, Offer
from ..domain.numeric import FloatArray
from .capacity import AvailabilityModel, gang_startup
from .checkpoints import PRIOR, CheckpointModel
from .compilation import CompileModel
from .duration import REPLACEMENT_S, STARTUP_S, Conditions
from .interruption_rates import HazardModel
from .log_seconds import LogSeconds
from .restarts import NO_RESTARTS

RETRY_S = 60.0  # between two requests for machines


class Pool(NamedTuple):
    """A type, market and zone, and the advised interruptions an hour of one machine."""

    instance_type: str
    market: str
    zone: str
    interruptions_per_hour: float

    @classmethod
    def of(cls, offer: Offer) -> Pool:
        return cls(offer.instance_type.name, offer.market, offer.zone, offer.interruptions_per_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The pools' advised rates as memoryless, and the same seconds for all clusters.

    `checkpoint_s` None: the prior of checkpoints by their bytes.
    """

    startup_s: float = STARTUP_S
    replacement_s: float = REPLACEMENT_S
    checkpoint_s: float | None = None
    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)

    def gangs(
        self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float
    ) -> Conditions:
        """Return conditions of clusters of `counts` (clusters, pools) machines with checkpoints of
        `state_bytes`.
        """
        checkpoint_s = self.checkpoint_s
        if checkpoint_s is None:
            checkpoint_s = float(PRIOR.seconds(state_bytes, [""])[0][0])
        return Conditions.certain(
            advised_hazards(pools, counts),
            startup_s=self.startup_s,
            checkpoint_s=checkpoint_s,
            replacement_s=self.replacement_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Models learned from launches and interruptions.

    `hazard` None: the pools' advised rates. `availability` None: every request is granted. `reads`
    None: a checkpoint is read as slowly as it is written. `restarts` tell how long a replacement
    takes once one was observed, else start-up does.
    """

    startup: LogSeconds
    checkpoints: CheckpointModel = PRIOR
    hazard: HazardModel | None = None
    availability: AvailabilityModel | None = None
    retry_s: float = RETRY_S
    compilation: CompileModel = CompileModel()  # noqa: RUF009 (frozen)
    reads: CheckpointModel | None = None
    restarts: LogSeconds = NO_RESTARTS

    def gangs(
        self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float
    ) -> Conditions:
        """Return conditions of clusters of `counts` (clusters, pools) machines with checkpoints of
        `state_bytes`.

        One machine writes a checkpoint and all read it: the slowest of the cluster counts.

        Raises:
            ValueError: for an unknown market.
        """
        startup_s, startup_log_sd = self._startup(pools, counts)
        spot = np.array([pool.market == "spot" for pool in pools], dtype=bool)
        hazard, doubt, bunching, rates = self._hazards(pools, counts * spot)
        types = [pool.instance_type for pool in pools]
        write_s, log_sd = self.checkpoints.seconds(state_bytes, types)
        read_s = write_s if self.reads is None else self.reads.seconds(state_bytes, types)[0]
        # without a last column of zeros, no clusters of no pools would have no slowest machine
        padded = np.hstack([np.where(counts > 0, write_s, 0.0), np.zeros((len(counts), 1))])
        writer = padded.argmax(axis=1)
        losses = counts * spot * rates
        losses = np.where(losses.sum(axis=1, keepdims=True) > 0, losses, counts * spot)
        replaced_s = losses @ self._replacement_s(pools) / np.maximum(losses.sum(axis=1), 1e-300)
        return Conditions(
            hazard_per_hour=hazard,
            doubt=doubt,
            bunching=bunching,
            startup_s=startup_s,
            startup_log_sd=startup_log_sd,
            checkpoint_s=padded.max(axis=1),
            checkpoint_log_sd=np.append(log_sd, 0.0)[writer],
            replacement_s=np.where(counts > 0, read_s, 0.0).max(axis=1, initial=0.0) + replaced_s,
        )

    def _startup(
        self, pools: Sequence[Pool], counts: NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray]:
        launch_s, log_sd = gang_startup(
            self.startup, [(pool.instance_type, pool.market) for pool in pools], counts
        )
        return self._with_refusals(launch_s, log_sd, pools, counts)

    def _replacement_s(self, pools: Sequence[Pool]) -> FloatArray:
        """Return (pools,) seconds from a machine's loss until the job has another at work."""
        alone = np.eye(len(pools), dtype=np.int64)
        if not any(outcome == "replaced" for outcome, _ in self.restarts.members):
            return self._startup(pools, alone)[0]
        types = [pool.instance_type for pool in pools]
        again_s = self.restarts.expected_s("replaced", types)
        return self._with_refusals(again_s, np.zeros_like(again_s), pools, alone)[0]

    def _with_refusals(
        self,
        launch_s: FloatArray,
        log_sd: FloatArray,
        pools: Sequence[Pool],
        counts: NDArray[np.int64],
    ) -> tuple[FloatArray, FloatArray]:
        """Add the retries before all machines are granted: (mean seconds, standard deviation of
        their log).
        """
        if self.availability is None:
            return launch_s, log_sd
        chance = self.availability.gangs([pool[:3] for pool in pools], counts.astype(float))
        mean = launch_s + self.retry_s * (1 - chance) / chance
        variance = launch_s**2 * np.expm1(log_sd**2) + self.retry_s**2 * (1 - chance) / chance**2
        return mean, np.asarray(np.sqrt(np.log1p(variance / mean**2)), dtype=float)

    def _hazards(
        self, pools: Sequence[Pool], spot_counts: NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return (clusters,) hazard, doubt and bunching, and (pools,) the rate of one machine."""
        if self.hazard is None:
            rates = np.array([pool.interruptions_per_hour for pool in pools], dtype=float)
            nothing = np.zeros(len(spot_counts))
            return advised_hazards(pools, spot_counts), nothing, nothing, rates
        spots = [(pool.instance_type, pool.zone, pool.interruptions_per_hour) for pool in pools]
        gangs = self.hazard.gangs(spots, spot_counts.astype(float))
        return *gangs, self.hazard.rates(spots)[:, 0]


JobConditions = Stated | Learned


def advised_hazards(pools: Sequence[Pool], counts: NDArray[np.int64]) -> FloatArray:
    """Return (clusters,) interruptions an hour: the sum over the spot machines."""
    rates = [pool.interruptions_per_hour if pool.market == "spot" else 0.0 for pool in pools]
    return np.asarray(counts @ np.array(rates, dtype=float), dtype=float)


def pools_of(clusters: Sequence[Cluster]) -> tuple[list[Pool], NDArray[np.int64]]:
    """Return the pools that the clusters buy from, and (clusters, pools) machines from each."""
    column: dict[Pool, int] = {}
    bought = []
    for row, cluster in enumerate(clusters):
        for count, offer in cluster.counted():
            bought.append((row, column.setdefault(Pool.of(offer), len(column)), count))
    counts = np.zeros((len(clusters), len(column)), dtype=np.int64)
    for row, at, count in bought:
        counts[row, at] += count
    return list(column), counts

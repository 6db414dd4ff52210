"""What start-up, checkpoints and interruptions a job meets on a cluster: as stated, or by what launches have taught.

A cluster may mix markets: only its spot machines are interrupted, all of them must start, and what is replaced is a
spot machine, whose type is as likely as its share of the interruptions. Of many clusters at once, since a planner asks
about all that can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..domain.cluster import Cluster, Offer
from . import duration as spot
from .capacity import AvailabilityModel, StartupModel
from .duration import CheckpointModel
from .interruptions import HazardModel, passing

Floats = NDArray[np.float64]

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
class Conditions:
    """One number a job: what `spot.drawn_hours` takes beside the work."""

    hazard_per_hour: Floats
    doubt: Floats
    bunching: Floats
    startup_s: Floats
    startup_log_sd: Floats
    checkpoint_s: Floats
    checkpoint_log_sd: Floats
    replacement_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Gangs:
    """What holds of each cluster however long the job is; (clusters,) arrays.

    `lasting` and `passing` are the variances of bunching that stay, and that pass within about a day.
    """

    hazard_per_hour: Floats
    doubt: Floats
    lasting: Floats
    passing: Floats
    startup_s: Floats
    startup_log_sd: Floats
    checkpoint_s: Floats
    checkpoint_log_sd: Floats
    replacement_s: Floats

    def take(self, rows: NDArray[np.intp] | slice) -> Gangs:
        """The clusters at these positions, which may repeat."""
        return Gangs(**{one.name: getattr(self, one.name)[rows] for one in fields(Gangs)})

    def for_work(self, work_hours: ArrayLike) -> Conditions:
        """What jobs of so many hours meet, one a cluster."""
        same = {one.name: getattr(self, one.name) for one in fields(Conditions) if one.name != "bunching"}
        bunching = self.lasting + self.passing * passing(work_hours)
        return Conditions(**same, bunching=np.asarray(bunching, dtype=float))


def joined_gangs(parts: Sequence[Gangs]) -> Gangs:
    """Several as one, in order; empty for none."""
    empty = np.zeros(0)
    return Gangs(
        **{one.name: np.concatenate([getattr(part, one.name) for part in parts] or [empty]) for one in fields(Gangs)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The pools' own rates, taken to be known and memoryless, and the same seconds for all clusters.

    `checkpoint_s` None: by the checkpoint's bytes, as `spot.checkpoint_seconds` says.
    """

    startup_s: float = spot.STARTUP_S
    replacement_s: float = spot.REPLACEMENT_S
    checkpoint_s: float | None = None

    def gangs(self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float) -> Gangs:
        """Of clusters of `counts` (clusters, pools) machines, whose checkpoints are of so many bytes."""
        write_s = spot.checkpoint_seconds(state_bytes) if self.checkpoint_s is None else self.checkpoint_s
        nothing, same = np.zeros(len(counts)), np.ones(len(counts))
        return Gangs(
            hazard_per_hour=advised_hazards(pools, counts),
            doubt=nothing,
            lasting=nothing,
            passing=nothing,
            startup_s=self.startup_s * same,
            startup_log_sd=nothing,
            checkpoint_s=write_s * same,
            checkpoint_log_sd=nothing,
            replacement_s=self.replacement_s * same,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What our own launches, checkpoints and interruptions have taught, each beside its prior.

    `hazard` None: the pools' own rates hold. `availability` None: whatever is asked for can be had.
    """

    startup: StartupModel
    checkpoint: CheckpointModel
    hazard: HazardModel | None = None
    availability: AvailabilityModel | None = None
    retry_s: float = RETRY_S

    def gangs(self, pools: Sequence[Pool], counts: NDArray[np.int64], state_bytes: float) -> Gangs:
        """Of clusters of `counts` (clusters, pools) machines, whose checkpoints are of so many bytes.

        Reading a checkpoint back is taken to last as long as writing it. Raises ValueError for an unknown market.
        """
        launch_s, launch_log_sd = self.startup.gangs([(one.instance_type, one.market) for one in pools], counts)
        startup_s, startup_log_sd = self._waited(launch_s, launch_log_sd, pools, counts)
        often, doubt, lasting, fleeting, rates = self._hazards(pools, counts)
        alone = np.eye(len(pools), dtype=np.int64)
        again_s, _ = self.startup.gangs([(one.instance_type, one.market) for one in pools], alone)
        again_s, _ = self._waited(again_s, np.zeros_like(again_s), pools, alone)
        taken = np.where([one.market == "spot" for one in pools], counts, 0)
        shares = taken * rates
        shares = np.where(shares.sum(axis=1, keepdims=True) > 0, shares, taken)  # rates that are 0 tell none apart
        write_s = float(self.checkpoint.seconds(state_bytes / 1e6))
        same = np.ones(len(counts))
        return Gangs(
            hazard_per_hour=often,
            doubt=doubt,
            lasting=lasting,
            passing=fleeting,
            startup_s=startup_s,
            startup_log_sd=startup_log_sd,
            checkpoint_s=write_s * same,
            checkpoint_log_sd=float(self.checkpoint.log_sd(state_bytes / 1e6)) * same,
            replacement_s=write_s + (shares @ again_s) / np.maximum(shares.sum(axis=1), 1e-300),
        )

    def _waited(
        self, launch_s: Floats, log_sd: Floats, pools: Sequence[Pool], counts: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """(mean seconds, standard deviation of their log) with the refusals before all can be had, by moments."""
        if self.availability is None:
            return launch_s, log_sd
        chance = self.availability.gangs([one[:3] for one in pools], counts.astype(float))
        mean = launch_s + self.retry_s * (1 - chance) / chance
        variance = launch_s**2 * np.expm1(log_sd**2) + self.retry_s**2 * (1 - chance) / chance**2
        return mean, np.asarray(np.sqrt(np.log1p(variance / mean**2)), dtype=float)

    def _hazards(
        self, pools: Sequence[Pool], counts: NDArray[np.int64]
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """(clusters,) rate, its doubt, bunching that stays and that passes; and (pools,) the rate of one machine."""
        nothing = np.zeros(len(counts))
        if self.hazard is None:
            rates = np.array([one.interruptions_per_hour for one in pools], dtype=float)
            return advised_hazards(pools, counts), nothing, nothing, nothing, rates
        at = np.flatnonzero([one.market == "spot" for one in pools])
        spots = [(pools[one].instance_type, pools[one].zone, pools[one].interruptions_per_hour) for one in at.tolist()]
        found = self.hazard.gangs(spots, counts[:, at].astype(float))
        rates = np.zeros(len(pools))
        rates[at] = found.machine
        left = found.concentration
        return found.per_hour, found.doubt, left * self.hazard.drift, left * self.hazard.shock, rates


Circumstances = Stated | Learned


def advised_hazards(pools: Sequence[Pool], counts: NDArray[np.int64]) -> Floats:
    """(clusters,) interruptions an hour: the sum over the spot machines; on-demand ones are safe."""
    rates = [one.interruptions_per_hour if one.market == "spot" else 0.0 for one in pools]
    return np.asarray(counts @ np.array(rates, dtype=float), dtype=float)


def pools_of(clusters: Sequence[Cluster]) -> tuple[list[Pool], NDArray[np.int64]]:
    """All pools that the clusters buy from, and (clusters, pools) how many machines from each."""
    places: dict[Pool, int] = {}
    bought = [
        [(places.setdefault(Pool.of(offer), len(places)), count) for count, offer in cluster.counted()]
        for cluster in clusters
    ]
    counts = np.zeros((len(clusters), len(places)), dtype=np.int64)
    for row, members in enumerate(bought):
        for at, count in members:
            counts[row, at] += count
    return list(places), counts
